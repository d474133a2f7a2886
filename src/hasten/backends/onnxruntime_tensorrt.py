"""TensorRT inside ONNX Runtime: the second road, where TensorRT's libraries are and its Python is not.

Its provider is given the graph that `tensorrt` builds engines from, with the types that are in it, and all that the
model takes as one profile: it never changes to a second one. It builds the engine when a session is opened, first of
all while the variant is made, and keeps it in our cache.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from hasten.backends import (
    MODEL,
    Artifact,
    Dialect,
    RunOptions,
    Session,
    Source,
    probe_on_gpu,
    probe_packages,
)
from hasten.backends.onnxruntime import trial
from hasten.backends.onnxruntime.cuda import CudaSession, check_placements, open_graph
from hasten.backends.onnxruntime.session import TENSORRT_PROVIDER
from hasten.backends.tensorrt import probe_capability
from hasten.backends.tensorrt.planning import Order, Place, Profile, Record, dims, engine_name, read_record
from hasten.backends.tensorrt.typed import write_typed
from hasten.core.batching import in_order
from hasten.core.cache import cache_directory
from hasten.core.errors import StageError
from hasten.core.hardware import Machine, this_machine
from hasten.core.plan import Shapes
from hasten.core.tensors import Batch, Outputs, Shape, Signature, gather
from hasten.core.variant import CUDA, Precision, Support, Variant

logger = logging.getLogger("hasten")

FOLDER = "onnxruntime-tensorrt"
# Not fp32, which it computes in TF32, and nothing of its settings says otherwise.
_PRECISIONS = (Precision.FP16, Precision.BF16)
_HINT = "pip install onnxruntime-gpu, and put TensorRT's libraries, of the version that it wants, on LD_LIBRARY_PATH"


class OnnxRuntimeTensorRT:
    name = "onnxruntime-tensorrt"
    requires = ("onnxruntime",)
    extra = None
    dialect = Dialect.ONNX
    is_stored = True

    def probe(self, machine: Machine, variant: Variant | None = None) -> Support:
        support = probe_on_gpu(machine, variant, lambda: probe_packages(self))
        if support.ok and variant is not None:
            if variant.precision not in _PRECISIONS:
                return Support.no(f"it does not compute in {variant.precision}")
            support = probe_capability(machine, variant.precision)
        if not support.ok:
            return support
        # To run it takes a while, and a build asks all backends.
        if reason := _why_not_listed() or (_why_not_run() if variant is not None else ""):
            return Support.no(f"ONNX Runtime's provider for TensorRT does not run here: {reason}", _HINT)
        return support

    def variants(self, machine: Machine) -> Sequence[Variant]:
        """`tensorrt` does the same without a runtime around it."""
        return []

    def make(self, source: Source, variant: Variant, directory: Path) -> Artifact:
        import onnx

        signature = source.signature
        order = Order((whole(source.shapes, signature.max_length),), source.workspace_bytes)
        outputs = {spec.name: spec.dtype for spec in signature.outputs}
        for name, path in source.graphs.items():
            graph = directory / f"{name}.onnx"
            found = write_typed(path, graph, variant.precision, source.beyond_fp16)
            # What nobody reads is pruned, and must not be in the profile.
            read = {entry.name for entry in onnx.load(graph, load_external_data=False).graph.input}
            inputs = {spec.name: spec.dtype for spec in signature.inputs if spec.name in read}
            record = Record(this_place(), order, found, inputs, outputs)
            graph.with_suffix(".json").write_bytes(msgspec.json.encode(record))
        artifact = Artifact(variant, signature, directory, {name: f"{name}.onnx" for name in source.graphs})
        check_placements(artifact, ProviderSession, TENSORRT_PROVIDER)
        return artifact

    def open(self, artifact: Artifact, options: RunOptions) -> Session:
        return ProviderSession(artifact, options)


def _why_not_listed() -> str:
    import onnxruntime

    is_listed = TENSORRT_PROVIDER in onnxruntime.get_available_providers()
    return "" if is_listed else "the ONNX Runtime that is installed was built without it"


@cache
def _why_not_run() -> str:
    """By a few operators, of which it builds an engine: it is listed also where TensorRT is missing."""
    tried = trial(TENSORRT_PROVIDER, this_machine())
    return "" if any(execution.on == TENSORRT_PROVIDER for execution in tried.executed) else tried.note


def whole(shapes: Shapes, max_length: int) -> Profile:
    """From one token to all that the model takes, tuned for what was asked for.

    Rows end at a power of two, as the buckets of the session do.
    """
    rows = 1 << (shapes.batch.max - 1).bit_length()
    usual = Shape(shapes.batch.opt, shapes.sequence.at_most(max_length).opt)
    return Profile(Shape(1, 1), usual, Shape(rows, max_length))


def provider_options(record: Record, signature: Signature, folder: Path) -> dict[str, str]:
    """No precision is named: with none, it builds a strongly typed network, and the graph's types hold."""
    specs = [spec for spec in signature.inputs if spec.name in record.inputs]
    profile = record.order.profiles[0]
    shapes = {
        f"trt_profile_{end}_shapes": ",".join(f"{spec.name}:{'x'.join(map(str, dims(spec, shape)))}" for spec in specs)
        for end, shape in (("min", profile.min), ("opt", profile.opt), ("max", profile.max))
    }
    kept = {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(folder),
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(folder),
    }
    limit = record.order.workspace_bytes
    return shapes | kept | ({"trt_max_workspace_size": str(limit)} if limit is not None else {})


class ProviderSession(CudaSession):
    def __init__(
        self, artifact: Artifact, options: RunOptions, profile: str | None = None, *, device: str = CUDA
    ) -> None:
        self._record = read_record(artifact.path(MODEL).with_suffix(".json"))
        super().__init__(artifact, options, profile, device=device)
        # The graph's types, counted when it was made (typed.py): all of it may have had to stay in fp32.
        self.spec = replace(self.spec, precision=self._record.precision)

    def run_padded(self, batch: Batch) -> Outputs:
        most = self._record.order.profiles[0].max.batch
        if len(batch) <= most:
            return super().run_padded(batch)
        parts = [(rows, self.run_padded(batch.take(rows))) for rows in in_order(len(batch), most)]
        return gather(parts, batch, self.spec.signature)

    def _open(self, artifact: Artifact, profile: str | None) -> Any:
        """Without CUDA graphs, which this provider records for one shape alone."""
        self._has_graphs = False
        graph = artifact.path(MODEL)
        if self._device != CUDA:
            return open_graph(str(graph), self._device, profile)
        folder = cache_directory() / FOLDER / Path(engine_name(graph, self._record.order, this_place())).stem
        folder.mkdir(parents=True, exist_ok=True)
        first = TENSORRT_PROVIDER, provider_options(self._record, artifact.signature, folder)
        try:
            session = open_graph(str(graph), CUDA, profile, first=first)
        except Exception as error:  # the binding raises its own unrelated classes
            if not any(folder.iterdir()):
                raise
            # It refuses an engine of another TensorRT, or one that was not written to its end, instead of building it.
            told = "%s: building its engine anew, since the one in %s fails: %s"
            logger.warning(told, artifact.variant, folder, error)
            shutil.rmtree(folder)
            folder.mkdir()
            session = open_graph(str(graph), CUDA, profile, first=first)
        if TENSORRT_PROVIDER not in session.get_providers():
            raise StageError("its provider for TensorRT does not start here", hint="hasten doctor tells why")
        return session


def this_place() -> Place:
    """TensorRT itself is not asked; another ONNX Runtime may come with another."""
    import onnxruntime

    gpu = this_machine().gpus[0]
    return Place(gpu.name, gpu.capability, f"in ONNX Runtime {onnxruntime.__version__}")


BACKEND = OnnxRuntimeTensorRT()
