"""A graph as it is, in plain ONNX Runtime: the original of a model that came as ONNX, and what every bundle can fall
back on. It competes where it was given; of a model that came as weights, `onnxruntime` runs the same graph, fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hasten.backends import Artifact, Dialect, RunOptions, Session, Source
from hasten.backends.onnxruntime import BACKEND as RUNTIME
from hasten.core.execution import Execution
from hasten.core.hardware import Machine
from hasten.core.tensors import Batch
from hasten.core.variant import CPU, Support, Variant


class Graph:
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

    def make(self, source: Source, variant: Variant, directory: Path) -> Artifact:
        return RUNTIME.make(source, variant, directory)

    def open(self, artifact: Artifact, options: RunOptions) -> Session:
        return RUNTIME.open(artifact, options)

    def executions(self, artifact: Artifact) -> Sequence[Execution]:
        return RUNTIME.executions(artifact)

    def first_non_finite(self, artifact: Artifact, batch: Batch) -> str | None:
        return RUNTIME.first_non_finite(artifact, batch)


BACKEND = Graph()
