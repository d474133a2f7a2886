"""From the exported graph to the graphs that backends are made from: each pass exact, in this order.

exported ──fold──▶ ──┬──────────prune──▶ plain (every ONNX backend, and the bundle's own fp32 graph)
                     └──fuse──▶ prune──▶ fused (ONNX Runtime)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.backends import Dialect
from hasten.builder.fold import fold_types
from hasten.builder.optimize import fuse
from hasten.builder.prune import prune


@dataclass(frozen=True, slots=True)
class Graphs:
    plain: Path
    fused: Path
    notes: tuple[str, ...]

    def by_dialect(self) -> dict[Dialect, Path]:
        return {Dialect.ONNX: self.plain, Dialect.ORT: self.fused}


def apply_passes(exported: Path, work: Path, config: Any, *, external_data: bool) -> Graphs:
    """Each pass writes into a folder of its own under `work`, so that each can be looked at."""
    folded, plain, whole, fused = (work / name / exported.name for name in ("folded", "plain", "whole", "fused"))
    for file in (folded, plain, whole, fused):
        file.parent.mkdir()
    is_folded = fold_types(exported, folded, external_data=external_data)
    pruning = prune(folded, plain, external_data=external_data)
    # Fused first and pruned then: fusion knows attention only while queries, keys and values have the same rows.
    fusions = fuse(folded, whole, config, external_data=external_data)
    prune(whole, fused, external_data=external_data, plain=folded)
    notes = ("token types folded into the words",) if is_folded else ()
    return Graphs(plain, fused, (*notes, *pruning.notes(), *fusions.notes()))
