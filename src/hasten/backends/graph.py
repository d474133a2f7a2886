"""Run an unmodified graph in plain ONNX Runtime: the baseline of a model given as ONNX, and every bundle's fallback.

It competes only if the model came as a graph; if it came as weights, `onnxruntime` runs the same graph, fused.
"""

from __future__ import annotations

from collections.abc import Sequence

from hasten.backends import Dialect
from hasten.backends.onnxruntime import BACKEND as RUNTIME
from hasten.core.system.hardware import Machine
from hasten.core.variant import CPU, Support, Variant


class Graph:
    """The backend `graph`."""

    name = "graph"
    requires = RUNTIME.requires
    extra = RUNTIME.extra
    dialect = Dialect.ONNX
    is_stored = True

    def probe(self, machine: Machine, variant: Variant | None = None) -> Support:
        if variant is not None and variant.device != CPU:
            return Support.no(f"it runs on the CPU, not on '{variant.device}'")
        return RUNTIME.probe(machine, variant)

    def variants(self, machine: Machine) -> Sequence[Variant]:
        return []

    make = RUNTIME.make
    open = RUNTIME.open
    placements = RUNTIME.placements
    first_non_finite = RUNTIME.first_non_finite


BACKEND = Graph()
