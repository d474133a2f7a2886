"""A graph as it is, in plain ONNX Runtime: the original of a model that came as ONNX, and what every bundle can fall
back on. It competes where it was given; of a model that came as weights, `onnxruntime` runs the same graph, fused.
"""

from __future__ import annotations

from collections.abc import Sequence

from hasten.backends import Dialect, probe_packages
from hasten.backends.onnxruntime import OnnxRuntime
from hasten.core.execution import Trial
from hasten.core.hardware import Machine
from hasten.core.variant import CPU, Support, Variant


class Graph(OnnxRuntime):
    name = "graph"
    dialect = Dialect.ONNX

    def probe(self, machine: Machine, variant: Variant | None = None) -> Support:
        if variant is not None and variant.device != CPU:
            return Support.no(f"it runs on the CPU, not on '{variant.device}'")
        return probe_packages(self)

    def variants(self, machine: Machine) -> Sequence[Variant]:
        return []

    def trials(self, machine: Machine) -> Sequence[Trial]:
        return []  # those of `onnxruntime` are of the same library


BACKEND = Graph()
