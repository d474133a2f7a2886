"""Run engines in TensorRT on NVIDIA GPUs. Experimental: no engine was ever run, and it is tried only if named.

The same code serves the backend `tensorrt-rtx`, with another library (`library.py`).

A variant has three files: the typed graph (`typed_graph.py`), the engine built from it (`engine.py`), and a record of
the GPU, TensorRT version and shapes it was built for (`engine_spec.py`). An engine runs only on that kind of GPU with
that version; elsewhere it is rebuilt from the graph and cached.
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
    probe_capability,
    probe_on_gpu,
    probe_packages,
)
from hasten.backends.tensorrt.engine import (
    FOLDER,
    Engine,
    build,
    current_platform,
    infer,
    load_engine,
    write_atomically,
)
from hasten.backends.tensorrt.engine_spec import EngineRecord, EngineSpec, engine_name, profiles, read_record
from hasten.backends.tensorrt.library import TENSORRT, Library, loading_error
from hasten.backends.tensorrt.typed_graph import write_typed
from hasten.core.batching import batch_in_order
from hasten.core.errors import StageError
from hasten.core.placement import SelfTest
from hasten.core.system.cache import cache_directory
from hasten.core.system.hardware import Gpu, Machine
from hasten.core.tensors import MASKS, Batch, Layout, Outputs, SessionSpec, gather, pad, unpad
from hasten.core.variant import CUDA, Precision, Support, Variant

__all__ = ["BACKEND", "Engine", "infer", "load_engine"]

logger = logging.getLogger("hasten")

# The first compute capability with tensor cores for each precision; TensorRT supports none before 7.5.
_MIN_CAPABILITY = {
    Precision.FP32: (7, 5),
    Precision.FP16: (7, 5),
    Precision.INT8: (7, 5),
    Precision.BF16: (8, 0),
    Precision.FP8: (8, 9),
}


class TensorRT:
    """A backend that builds engines with one of the libraries and runs them."""

    dialect = Dialect.ONNX
    is_stored = True

    def __init__(self, library: Library, note: str) -> None:
        self.name = self.extra = library.backend
        self.requires = (library.module, "cuda")
        self._library = library
        self._note = note

    def probe(self, machine: Machine, variant: Variant | None = None) -> Support:
        support = probe_on_gpu(machine, variant, lambda: self._installed(machine.gpus[0]))
        if not support.ok:
            return support
        precision = variant.precision if variant is not None else Precision.FP32
        if precision not in _MIN_CAPABILITY:
            return Support.no(f"it does not compute in {precision}")
        return probe_capability(machine.gpus[0], _MIN_CAPABILITY[precision], precision)

    def _installed(self, gpu: Gpu) -> Support:
        """Return whether the library accepts the GPU and loads; a GPU that it rejects needs no packages."""
        support = self._library.probe_gpu(gpu)
        support = probe_packages(self) if support.ok else support
        if support.ok and (error := loading_error(self._library)) is not None:
            hint = f"install its libraries: {self._library.installation}"
            return Support.no(f"{self._library.name} does not load: {error}", hint)
        return support

    def variants(self, machine: Machine) -> Sequence[Variant]:
        """Return fp16; the search leaves it out unless it is named, because the backend is experimental."""
        fp16 = Variant(self.name, Precision.FP16, CUDA)
        return [fp16] if self.probe(machine, fp16).ok else []

    def make(self, source: Source, variant: Variant, directory: Path) -> Artifact:
        spec = EngineSpec(profiles(source.shapes, source.signature.max_length), source.workspace_bytes)
        graphs = {}
        for name, path in source.graphs.items():
            graph, plan = directory / f"{name}.onnx", directory / f"{name}.plan"
            precision = write_typed(path, graph, variant.precision, source.fp16_overflow_tensors)
            build(self._library, graph, source.signature, spec, plan)
            with load_engine(plan, self._library) as engine:
                record = EngineRecord(current_platform(self._library), spec, precision, engine.inputs, engine.outputs)
            plan.with_suffix(".json").write_bytes(msgspec.json.encode(record))
            graphs[name] = plan.name
        return Artifact(variant, source.signature, directory, graphs)

    def open(self, artifact: Artifact, options: RunOptions) -> Session:
        record = read_record(artifact.path().with_suffix(".json"))
        is_compatible = record.platform == current_platform(self._library)
        plan = artifact.path() if is_compatible else _rebuild_engine(artifact, record, self._library)
        return _Session(artifact, record, load_engine(plan, self._library))

    def trials(self, machine: Machine) -> Sequence[SelfTest]:
        """Run nothing, and report that the backend is experimental."""
        return [SelfTest(CUDA, note=self._note)]


def _rebuild_engine(artifact: Artifact, record: EngineRecord, library: Library) -> Path:
    """Return the engine for this GPU and library version from the cache, building it if it is missing."""
    graph, platform = artifact.path().with_suffix(".onnx"), current_platform(library)
    try:
        plan = cache_directory() / FOLDER / engine_name(graph, record.spec, platform)
        if not plan.exists():
            logger.warning("%s was built on %s: rebuilding it for %s", artifact.variant, record.platform, platform)
            with tempfile.TemporaryDirectory(prefix="hasten-") as folder:
                build(library, graph, artifact.signature, record.spec, Path(folder) / plan.name)
                write_atomically(plan, (Path(folder) / plan.name).read_bytes())
    except OSError as error:
        raise StageError(f"{artifact.variant} cannot be rebuilt for {platform}: {error}") from error
    return plan


class _Session(PaddedSession):
    """An engine, called on padded batches; larger batches than its profiles allow are split."""

    def __init__(self, artifact: Artifact, record: EngineRecord, engine: Engine) -> None:
        self._engine = engine
        self._max_rows = max(profile.max.batch for profile in record.spec.profiles)
        # Recorded from the graph's types (typed_graph.py), which TensorRT obeys.
        self.spec = SessionSpec(artifact.signature, Layout.PADDED, artifact.variant.device, record.precision)

    def close(self) -> None:
        self._engine.close()

    def run_padded(self, batch: Batch) -> Outputs:
        signature = self.spec.signature
        if len(batch) > self._max_rows:
            parts = [(rows, self.run_padded(batch.take(rows))) for rows in batch_in_order(len(batch), self._max_rows)]
            return gather(parts, batch, signature)
        counts = [signature.count(spec, batch) for spec in signature.outputs if MASKS in spec.shape]
        outputs = self._engine.infer(pad(batch, signature), counts[0] if counts else None)
        return unpad({spec.name: outputs[spec.name] for spec in signature.outputs}, batch, signature)


BACKEND = TensorRT(TENSORRT, "experimental: never run on a real TensorRT; tried only if named (--variants)")
