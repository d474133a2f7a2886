"""From the exported graph to the graphs that backends are made from: each pass exact, in this order, and recorded.

exported ──fold──▶ ──┬──────────prune──▶ plain (every ONNX backend, and the bundle's own fp32 graph)
                     └──fuse──▶ prune──┬────────────▶ joined (ONNX Runtime on GPUs)
                                       └─split norms─▶ fused (ONNX Runtime)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.backends import Dialect
from hasten.builder.fold import fold_types
from hasten.builder.norms import split_norms
from hasten.builder.optimize import fuse
from hasten.builder.prune import prune
from hasten.core.report import Pass, Unfused
from hasten.graph import operators


@dataclass(frozen=True, slots=True)
class Graphs:
    plain: Path
    fused: Path
    # The same, before norms were taken apart.
    joined: Path
    passes: tuple[Pass, ...]

    def by_dialect(self) -> dict[Dialect, Path]:
        return {Dialect.ONNX: self.plain, Dialect.ORT: self.fused, Dialect.ORT_CUDA: self.joined}


def apply_passes(
    exported: Path,
    work: Path,
    config: Any,
    *,
    external_data: bool,
    pads_left: bool = False,
    made: Mapping[Dialect, Sequence[str]] | None = None,
) -> Graphs:
    """Each pass writes into a folder of its own; `made` names the variants that start from each dialect."""
    onnx, ort, cuda = ((made or {}).get(dialect, ()) for dialect in (Dialect.ONNX, Dialect.ORT, Dialect.ORT_CUDA))
    folded, plain, passes = apply_plain(exported, work, external_data=external_data, made=onnx, others=[*ort, *cuda])
    whole, pruned, fused = (work / name / exported.name for name in ("whole", "pruned", "fused"))
    for file in (whole, pruned, fused):
        file.parent.mkdir()
    # Fused first and pruned then: fusion knows attention only while queries, keys and values have the same rows.
    fusions = fuse(folded, whole, config, external_data=external_data, pads_left=pads_left)
    passes.append(record("fuse", folded, whole, variants=[*ort, *cuda], notes=fusions.notes(), left=fusions.left))
    pruning = prune(whole, pruned, external_data=external_data, plain=folded)
    passes.append(record("prune", whole, pruned, variants=[*ort, *cuda], notes=pruning.notes()))
    count = split_norms(pruned, fused, external_data=external_data)
    apart = [f"{count} norms apart from what is added before them"] if count else []
    passes.append(record("split norms", pruned, fused, variants=ort, notes=apart))
    return Graphs(plain, fused, pruned, tuple(passes))


def apply_plain(
    exported: Path, work: Path, *, external_data: bool, made: Sequence[str], others: Sequence[str] = ()
) -> tuple[Path, Path, list[Pass]]:
    """Those that every ONNX backend goes by: the graph that others are fused from, and the plain one."""
    folded, plain = (work / name / exported.name for name in ("folded", "plain"))
    for file in (folded, plain):
        file.parent.mkdir()
    is_folded = fold_types(exported, folded, external_data=external_data)
    notes = ("token types folded into the words",) if is_folded else ("no token types to fold",)
    passes = [record("fold", exported, folded, variants=[*made, *others], notes=notes)]
    pruning = prune(folded, plain, external_data=external_data)
    passes.append(record("prune", folded, plain, variants=made, notes=pruning.notes()))
    return folded, plain, passes


def record(
    name: str,
    before: Path | None,
    after: Path,
    *,
    variants: Iterable[str],
    notes: Sequence[str] = (),
    left: Sequence[Unfused] = (),
) -> Pass:
    """A pass takes a graph file and writes another; the first one has none to take."""
    counted = operators(before) if before is not None else {}
    return Pass(name, counted, operators(after), tuple(variants), tuple(notes), tuple(left))
