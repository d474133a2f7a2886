"""TensorRT on NVIDIA GPUs, from the portable graph: types by `typed.py`, shapes by `planning.py`, calls by `engine.py`.

A variant holds three files: the typed graph, the engine that was built from it, and the record of where and for what.
An engine runs on its own kind of GPU with its own version of TensorRT; elsewhere another is built from the graph, and
kept in the cache.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hasten.backends import (
    Artifact,
    Dialect,
    PaddedSession,
    RunOptions,
    Session,
    Source,
    probe_on_gpu,
    probe_packages,
)
from hasten.backends.tensorrt.engine import (
    FOLDER,
    Engine,
    build,
    infer,
    load_engine,
    loading_error,
    this_place,
    write_whole,
)
from hasten.backends.tensorrt.planning import Order, Record, engine_name, profiles, read_record
from hasten.backends.tensorrt.typed import write_typed
from hasten.core.batching import in_order
from hasten.core.cache import cache_directory
from hasten.core.errors import StageError
from hasten.core.hardware import Machine
from hasten.core.tensors import MASKS, Batch, Layout, Outputs, SessionSpec, gather, pad, unpad
from hasten.core.variant import Precision, Support, Variant

__all__ = ["BACKEND", "Engine", "infer", "load_engine"]

logger = logging.getLogger("hasten")

CUDA = "cuda"
# The first GPUs with tensor cores for each; TensorRT itself begins with the oldest of them.
_OLDEST = {
    Precision.FP32: (7, 5),
    Precision.FP16: (7, 5),
    Precision.INT8: (7, 5),
    Precision.BF16: (8, 0),
    Precision.FP8: (8, 9),
}


class TensorRT:
    name = "tensorrt"
    requires = ("tensorrt", "cuda")
    extra = "tensorrt"
    dialect = Dialect.ONNX
    is_stored = True

    def probe(self, machine: Machine, variant: Variant | None = None) -> Support:
        support = probe_on_gpu(machine, variant, self._installed)
        if not support.ok:
            return support
        return probe_capability(machine, variant.precision if variant is not None else Precision.FP32)

    def _installed(self) -> Support:
        support = probe_packages(self)
        if support.ok and (error := loading_error()) is not None:
            return Support.no(f"TensorRT does not load: {error}", "its libraries lie outside PyPI")
        return support

    def variants(self, machine: Machine) -> Sequence[Variant]:
        half = Variant(self.name, Precision.FP16, CUDA)
        return [half] if self.probe(machine, half).ok else []

    def make(self, source: Source, variant: Variant, directory: Path) -> Artifact:
        order = Order(profiles(source.shapes, source.signature.max_length), source.workspace_bytes)
        graphs = {}
        for name, path in source.graphs.items():
            graph, plan = directory / f"{name}.onnx", directory / f"{name}.plan"
            found = write_typed(path, graph, variant.precision, source.beyond_fp16)
            build(graph, source.signature, order, plan)
            with load_engine(plan) as engine:
                record = Record(this_place(), order, found, engine.inputs, engine.outputs)
            plan.with_suffix(".json").write_bytes(msgspec.json.encode(record))
            graphs[name] = plan.name
        return Artifact(variant, source.signature, directory, graphs)

    def open(self, artifact: Artifact, options: RunOptions) -> Session:
        record = read_record(artifact.path().with_suffix(".json"))
        is_at_home = record.place == this_place()
        return _Session(artifact, record, load_engine(artifact.path() if is_at_home else _rebuilt(artifact, record)))


def probe_capability(machine: Machine, precision: Precision) -> Support:
    """Whether TensorRT computes in it on the GPU that is there."""
    if precision not in _OLDEST:
        return Support.no(f"it does not compute in {precision}")
    gpu, (major, minor) = machine.gpus[0], _OLDEST[precision]
    if tuple(map(int, gpu.capability.split("."))) < (major, minor):
        return Support.no(f"{precision} needs compute capability {major}.{minor}; {gpu.name} has {gpu.capability}")
    return Support.yes()


def _rebuilt(artifact: Artifact, record: Record) -> Path:
    """The engine for this GPU and this version, built now or found where it was built before."""
    graph, here = artifact.path().with_suffix(".onnx"), this_place()
    try:
        plan = cache_directory() / FOLDER / engine_name(graph, record.order, here)
        if not plan.exists():
            logger.warning("%s was built on %s: building it again for %s", artifact.variant, record.place, here)
            with tempfile.TemporaryDirectory(prefix="hasten-") as work:
                build(graph, artifact.signature, record.order, Path(work) / plan.name)
                write_whole(plan, (Path(work) / plan.name).read_bytes())
    except OSError as error:
        raise StageError(f"{artifact.variant} cannot be built again for {here}: {error}") from error
    return plan


class _Session(PaddedSession):
    def __init__(self, artifact: Artifact, record: Record, engine: Engine) -> None:
        self._engine = engine
        self._max_rows = max(profile.max.batch for profile in record.order.profiles)
        # The graph's types, counted when it was made (typed.py); TensorRT keeps to them.
        self.spec = SessionSpec(artifact.signature, Layout.PADDED, artifact.variant.device, record.precision)

    def close(self) -> None:
        self._engine.close()

    def run_padded(self, batch: Batch) -> Outputs:
        signature = self.spec.signature
        if len(batch) > self._max_rows:
            parts = [(rows, self.run_padded(batch.take(rows))) for rows in in_order(len(batch), self._max_rows)]
            return gather(parts, batch, signature)
        counts = [signature.count(spec, batch) for spec in signature.outputs if MASKS in spec.shape]
        found = self._engine.infer(pad(batch, signature), counts[0] if counts else None)
        return unpad({spec.name: found[spec.name] for spec in signature.outputs}, batch, signature)


BACKEND = TensorRT()
