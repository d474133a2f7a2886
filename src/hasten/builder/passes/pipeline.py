"""Rewrite the exported graph into the graphs that backends use; each pass is exact and recorded.

exported ──fold──▶ ──┬──────────prune──▶ plain (every ONNX backend, and the bundle's fp32 graph)
                     └──fuse──▶ prune──┬────────────────────▶ fused with norms (ONNX Runtime on GPUs)
                                       └─split norms──attend▶ fused (ONNX Runtime on CPUs)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.backends import Dialect
from hasten.builder.passes.attend import attend
from hasten.builder.passes.fold import fold_types
from hasten.builder.passes.fuse import fuse
from hasten.builder.passes.prune import prune
from hasten.builder.passes.split_norms import split_norms
from hasten.core.report import Pass, Unfused
from hasten.onnx_graph import merge_weights, operators, read_graph


@dataclass(frozen=True, slots=True)
class Graphs:
    """The graphs after the passes."""

    plain: Path
    fused: Path
    # Before `split_norms`.
    fused_with_norms: Path
    passes: tuple[Pass, ...]

    def by_dialect(self) -> dict[Dialect, Path]:
        """Return the graph of each dialect."""
        return {Dialect.ONNX: self.plain, Dialect.ORT: self.fused, Dialect.ORT_CUDA: self.fused_with_norms}


def apply_passes(
    exported: Path,
    work: Path,
    config: Any,
    *,
    pads_left: bool = False,
    variants: Mapping[Dialect, Sequence[str]] | None = None,
) -> Graphs:
    """Apply all passes, each into its own folder; `variants` names the variants of each dialect, for the record."""
    onnx, ort, cuda = ((variants or {}).get(dialect, ()) for dialect in (Dialect.ONNX, Dialect.ORT, Dialect.ORT_CUDA))
    folded, plain, passes = apply_plain(exported, work, variants=onnx, others=[*ort, *cuda])
    whole, pruned, split, fused = (work / name / exported.name for name in ("whole", "pruned", "split", "fused"))
    for file in (whole, pruned, split, fused):
        file.parent.mkdir()
    # Fuse before pruning: fusion recognizes attention only while queries, keys and values have the same rows.
    fusions = fuse(folded, whole, config, pads_left=pads_left)
    pruning = prune(whole, pruned, plain=folded)
    split_count = split_norms(pruned, split)
    attending = attend(split, fused, plain=folded)
    # Variants on GPUs run the graph before the last pass.
    left = {node.name or node.output[0] for node in read_graph(split if cuda else fused, with_weights=False).graph.node}
    unfused = [part for part in fusions.unfused if part.node in left]
    notes = [f"{split_count} norms split from the preceding addition"] if split_count else []
    passes += [
        record_pass("fuse", folded, whole, variants=[*ort, *cuda], notes=fusions.notes(), unfused=unfused),
        record_pass("prune", whole, pruned, variants=[*ort, *cuda], notes=pruning.notes()),
        record_pass("split norms", pruned, split, variants=ort, notes=notes),
    ]
    if attending.notes():
        passes.append(record_pass("attend", split, fused, variants=ort, notes=attending.notes()))
    for file in (pruned, fused):
        merge_weights(file)
    return Graphs(plain, fused, pruned, tuple(passes))


def apply_plain(
    exported: Path, work: Path, *, variants: Sequence[str], others: Sequence[str] = ()
) -> tuple[Path, Path, list[Pass]]:
    """Apply the passes of every ONNX backend; return the graph to fuse, the plain graph and the records."""
    folded, plain = (work / name / exported.name for name in ("folded", "plain"))
    for file in (folded, plain):
        file.parent.mkdir()
    is_folded = fold_types(exported, folded)
    notes = ("token types folded into the word embeddings",) if is_folded else ("no token types to fold",)
    passes = [record_pass("fold", exported, folded, variants=[*variants, *others], notes=notes)]
    pruning = prune(folded, plain)
    passes.append(record_pass("prune", folded, plain, variants=variants, notes=pruning.notes()))
    # Passes read graphs without their weights, and runtimes read one file.
    merge_weights(plain)
    return folded, plain, passes


def record_pass(
    name: str,
    before: Path | None,
    after: Path,
    *,
    variants: Iterable[str],
    notes: Sequence[str] = (),
    unfused: Sequence[Unfused] = (),
) -> Pass:
    """Return the record of a pass, with operator counts before and after; `before` is None for the export."""
    operators_before = operators(before) if before is not None else {}
    return Pass(name, operators_before, operators(after), tuple(variants), tuple(notes), tuple(unfused))
