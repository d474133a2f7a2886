"""One graph in ONNX Runtime on an NVIDIA GPU: buffers there for each bucket of shapes, and a CUDA graph over them.

What a batch costs the host is one copy for each input, one launch, and one copy for each output.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from typing import Any

import numpy as np

from hasten.backends import MODEL, Artifact, PaddedSession, RunOptions, probe_gpu
from hasten.backends.onnxruntime.session import CPU_PROVIDER, CUDA_PROVIDER, Placement, placements, settings
from hasten.core.buckets import bucket_of, fill, take_out
from hasten.core.errors import StageError
from hasten.core.hardware import Machine
from hasten.core.recording import recording
from hasten.core.tensors import (
    BATCH,
    SEQUENCE,
    Batch,
    FloatArray,
    IntArray,
    Layout,
    Outputs,
    SessionSpec,
    Shape,
    Signature,
)
from hasten.core.variant import CUDA, Support

logger = logging.getLogger("hasten")

_HINT = "pip uninstall --yes onnxruntime, then pip install onnxruntime-gpu: the two cannot be installed side by side"
# Each holds some of the driver's memory, and ONNX Runtime gives none back; batches of further shapes run without one.
_MOST_GRAPHS = 256
_NO_GRAPH = -1
# Between the memory of the two processors: ONNX Runtime puts them where a node of one reads what the other wrote.
_COPIES = ("MemcpyToHost", "MemcpyFromHost")
_NAMED = 3


def probe_provider(machine: Machine) -> Support:
    """Whether the ONNX Runtime that is installed has its provider for a GPU that is there."""
    support = probe_gpu(machine)
    if not support.ok:
        return support
    import onnxruntime

    if CUDA_PROVIDER in onnxruntime.get_available_providers():
        return support
    return Support.no("the ONNX Runtime that is installed has no provider for a GPU", _HINT)


class CudaSession(PaddedSession):
    """On the CPU, where nothing is captured, it is for tests."""

    def __init__(
        self, artifact: Artifact, options: RunOptions, profile: str | None = None, *, device: str = CUDA
    ) -> None:
        signature = artifact.signature
        self._device = device
        self._has_graphs = device == CUDA and profile is None and has_fixed_outputs(signature)
        try:
            with recording.beside_others():
                self.runtime: Any = self._open(artifact, profile)
        except Exception as error:  # the binding raises its own unrelated classes
            raise StageError(f"ONNX Runtime cannot load {artifact.variant}: {error}") from error
        check_started(self.runtime, device)
        self._buckets: dict[Shape, _Bucket] = {}
        # Also of those that failed: a number is never that of another graph.
        self._graphs = 0
        # Proven when it was made (stored_precision); the bundle's hashes keep it so.
        self.spec = SessionSpec(signature, Layout.PADDED, device, artifact.variant.precision)

    @recording.beside_others()
    def close(self) -> None:
        self._buckets.clear()
        self.runtime = None

    def run_padded(self, batch: Batch) -> Outputs:
        if self.runtime is None:
            raise StageError("the session is closed")
        signature = self.spec.signature
        room = bucket_of(batch, signature)
        feeds = fill(batch, signature, room)
        is_new = room not in self._buckets
        try:
            with recording.alone() if is_new and self._records_next else recording.beside_others():
                results = self._bucket(room)(feeds)
        except Exception as error:
            if is_new:
                # It may have been recorded, with buffers that are no more: the next one begins anew.
                self._buckets.pop(room, None)
            raise StageError(f"ONNX Runtime failed on a batch of {len(batch)}: {error}") from error
        return take_out(results, batch, signature, room)

    def _open(self, artifact: Artifact, profile: str | None) -> Any:
        """Where the whole cannot be one CUDA graph, a branch in it say, it runs node by node, and says so."""
        graph, reason = str(artifact.path(MODEL)), ""
        if self._has_graphs:
            try:
                return open_graph(graph, self._device, profile, {"enable_cuda_graph": "1"})
            except Exception as error:  # the binding raises its own unrelated classes
                reason = str(error).strip()
        self._has_graphs = False
        session = open_graph(graph, self._device, profile)
        if reason:
            logger.warning("%s runs without CUDA graphs: %s", artifact.variant, reason)
        return session

    @property
    def _records_next(self) -> bool:
        return self._has_graphs and self._graphs < _MOST_GRAPHS

    def _bucket(self, room: Shape) -> _Bucket:
        if room not in self._buckets:
            graph = _NO_GRAPH
            if self._records_next:
                graph = self._graphs = self._graphs + 1
            self._buckets[room] = _Bucket(self.runtime, self.spec.signature, room, self._device, graph)
        return self._buckets[room]


class _Bucket:
    """Buffers on the device for batches of one shape: a CUDA graph reads and writes the same ones every time."""

    def __init__(self, session: Any, signature: Signature, room: Shape, device: str, graph: int) -> None:
        import onnxruntime

        def allocate(shape: Sequence[int], dtype: str) -> Any:
            return onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, np.dtype(dtype).type, device, 0)

        self._session, self._binding = session, session.io_binding()
        dtypes = {spec.name: spec.dtype.value for spec in signature.inputs}
        # What the graph file says it takes decides: what nobody reads is pruned.
        names = [entry.name for entry in session.get_inputs()]
        self._inputs = {name: allocate((room.batch, room.sequence), dtypes[name]) for name in names}
        for name, value in self._inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        self._outputs = [spec.name for spec in signature.outputs]
        for spec in signature.outputs:
            if has_fixed_outputs(signature):
                sizes = {BATCH: room.batch, SEQUENCE: room.sequence}
                shape = [size if isinstance(size, int) else sizes[size] for size in spec.shape]
                self._binding.bind_ortvalue_output(spec.name, allocate(shape, spec.dtype.value))
            else:
                self._binding.bind_output(spec.name, device)
        self._options = onnxruntime.RunOptions()
        # The first batch is computed twice, and recorded.
        self._options.add_run_config_entry("gpu_graph_id", str(graph))

    def __call__(self, feeds: Mapping[str, IntArray]) -> dict[str, FloatArray]:
        for name, value in self._inputs.items():
            value.update_inplace(feeds[name])
        self._session.run_with_iobinding(self._binding, self._options)
        return dict(zip(self._outputs, self._binding.copy_outputs_to_cpu(), strict=True))


def open_graph(
    graph: str | bytes,
    device: str,
    profile: str | None = None,
    more: Mapping[str, str] | None = None,
    first: tuple[str, Mapping[str, str]] | None = None,
) -> Any:
    """A session on a GPU, or for tests on the CPU; `more` is for the provider, `first` one that is asked before it."""
    import onnxruntime

    options = settings(1, profile)
    if device != CUDA:
        return onnxruntime.InferenceSession(graph, options, providers=[CPU_PROVIDER])
    load_libraries()
    # Its products would be in TF32 otherwise, which is no fp32. The first GPU goes without saying: named, ONNX Runtime
    # looks for a provider of another kind first, and warns of every session that there is none.
    about = {"use_tf32": "0", "arena_extend_strategy": "kSameAsRequested", **(more or {})}
    providers: list[Any] = [(CUDA_PROVIDER, about), CPU_PROVIDER]
    if first is not None:
        # It knows none of what would be fused for the others.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        providers.insert(0, first)
    return onnxruntime.InferenceSession(graph, options, providers=providers, enable_fallback=0)


def check_started(session: Any, device: str) -> None:
    if device == CUDA and CUDA_PROVIDER not in session.get_providers():
        raise StageError("ONNX Runtime's provider for CUDA does not start here", hint="hasten doctor tells why")


def has_fixed_outputs(signature: Signature) -> bool:
    """Whether the shape of a batch tells those of its outputs: how many mask tokens there are, it does not."""
    return all(size in (BATCH, SEQUENCE) or isinstance(size, int) for spec in signature.outputs for size in spec.shape)


def check_placements(
    artifact: Artifact,
    on: Callable[[Artifact, RunOptions, str], CudaSession] = CudaSession,
    provider: str = CUDA_PROVIDER,
) -> None:
    """Refuse a graph of which ONNX Runtime leaves a part to the CPU: a batch would wait for it, and be copied twice.

    Where all of it is left, nothing is copied; and who starts, and takes no node, says nothing.
    """
    with (
        tempfile.TemporaryDirectory(prefix="hasten-") as work,
        on(artifact, RunOptions(1), work) as session,
    ):
        session.warm([Shape(1, 8)])
        ran = placements(session.runtime)
    refuse_left(left_to_cpu(ran))
    if all(one.provider != provider for one in ran):
        raise StageError(f"ONNX Runtime gave none of its nodes to {provider}")


def refuse_left(left: Sequence[str]) -> None:
    if left:
        names = ", ".join(left[:_NAMED]) + (", …" if len(left) > _NAMED else "")
        raise StageError(f"{len(left)} of its nodes have no kernel for a GPU, and landed on the CPU: {names}")


def left_to_cpu(ran: Sequence[Placement], size_bytes: int = 0) -> tuple[str, ...]:
    """The nodes that compute on the CPU what the GPU needs, or the other way round; those that give most come first.

    Where nothing is copied between the two there are none: nodes on the CPU then compute shapes, which are there anyway
    and which ONNX Runtime puts there on purpose. What is copied of up to `size_bytes` is a size, and no matter.
    """
    copies = [one.node for one in ran if one.operator in _COPIES and not 0 < one.output_bytes <= size_bytes]
    if not copies:
        return ()
    nodes = [
        f"{one.operator} '{one.node}'"
        for one in sorted(ran, key=lambda placement: -placement.output_bytes)
        if one.provider == CPU_PROVIDER
    ]
    return tuple(dict.fromkeys(nodes)) or tuple(copies)


@cache
def load_libraries() -> None:
    """Those of CUDA that came as packages of Python: the linker does not look for them there."""
    import onnxruntime

    with redirect_stdout(StringIO()):  # what it does not find may still be found elsewhere
        onnxruntime.preload_dlls()
