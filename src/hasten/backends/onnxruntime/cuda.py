"""Run one graph in ONNX Runtime on an NVIDIA GPU, with device buffers and a captured CUDA graph per bucket of shapes.

The host's cost per batch is one copy per input, one launch, and one copy per output.
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

from hasten.backends import MODEL, Artifact, PaddedSession, RunOptions, probe_gpu, to_dims
from hasten.backends.onnxruntime.session import (
    CPU_PROVIDER,
    CUDA_PROVIDER,
    NodePlacement,
    node_placements,
    session_options,
)
from hasten.core.errors import StageError
from hasten.core.gpu.capture_lock import capture_lock
from hasten.core.gpu.padded_buckets import bucket_of
from hasten.core.system.hardware import Machine
from hasten.core.tensors import (
    MASKS,
    Batch,
    FloatArray,
    IntArray,
    Layout,
    Outputs,
    SessionSpec,
    Shape,
    Signature,
    pad,
    unpad,
)
from hasten.core.variant import CUDA, Support

logger = logging.getLogger("hasten")

_HINT = "pip uninstall --yes onnxruntime, then pip install onnxruntime-gpu: the two cannot be installed side by side"
# Each CUDA graph holds driver memory that ONNX Runtime never releases; batches of further shapes run without one.
_MAX_GRAPHS = 256
_NO_GRAPH = -1
# Nodes that ONNX Runtime inserts where a node on one device reads the output of a node on the other.
_COPIES = ("MemcpyToHost", "MemcpyFromHost")
_MAX_NAMED_NODES = 3


def probe_provider(machine: Machine) -> Support:
    """Return whether the installed ONNX Runtime has its CUDA execution provider, and the machine a GPU."""
    support = probe_gpu(machine)
    if not support.ok:
        return support
    import onnxruntime

    if CUDA_PROVIDER in onnxruntime.get_available_providers():
        return support
    return Support.no("the installed ONNX Runtime has no CUDA execution provider", _HINT)


class CudaSession(PaddedSession):
    """A graph on the CUDA execution provider. With another `device` it runs on the CPU without capture, for tests."""

    def __init__(
        self, artifact: Artifact, options: RunOptions, profile_folder: str | None = None, *, device: str = CUDA
    ) -> None:
        signature = artifact.signature
        self._device = device
        self._uses_graphs = device == CUDA and profile_folder is None and has_fixed_outputs(signature)
        try:
            with capture_lock.shared():
                self.runtime: Any = self._open(artifact, profile_folder)
        except Exception as error:  # the binding raises its own unrelated classes
            raise StageError(f"ONNX Runtime cannot load {artifact.variant}: {error}") from error
        check_started(self.runtime, device)
        self._buckets: dict[Shape, _Bucket] = {}
        # Counts failed captures too, so that the id of a graph is never used twice.
        self._graph_count = 0
        # The precision was checked when the variant was made (stored_precision); the bundle's hashes protect it.
        self.spec = SessionSpec(signature, Layout.PADDED, device, artifact.variant.precision)

    @capture_lock.shared()
    def close(self) -> None:
        self._buckets.clear()
        self.runtime = None

    def run_padded(self, batch: Batch) -> Outputs:
        if self.runtime is None:
            raise StageError("the session is closed")
        signature = self.spec.signature
        shape = bucket_of(batch, signature)
        feeds = pad(batch, signature, shape)
        is_new = shape not in self._buckets
        try:
            with capture_lock.exclusive() if is_new and self._captures_next else capture_lock.shared():
                results = self._bucket(shape)(feeds)
        except Exception as error:
            if is_new:
                # The capture may have succeeded with buffers that are freed now: the next batch captures a new graph.
                self._buckets.pop(shape, None)
            raise StageError(f"ONNX Runtime failed on a batch of {len(batch)}: {error}") from error
        return unpad(results, batch, signature, shape)

    def _open(self, artifact: Artifact, profile_folder: str | None) -> Any:
        """Open the graph; if it cannot be captured, because of a branch for example, log it and run node by node."""
        graph, reason = str(artifact.path(MODEL)), ""
        if self._uses_graphs:
            try:
                return open_graph(graph, self._device, profile_folder, {"enable_cuda_graph": "1"})
            except Exception as error:  # the binding raises its own unrelated classes
                reason = str(error).strip()
        self._uses_graphs = False
        session = open_graph(graph, self._device, profile_folder)
        if reason:
            logger.warning("%s runs without CUDA graphs: %s", artifact.variant, reason)
        return session

    @property
    def _captures_next(self) -> bool:
        return self._uses_graphs and self._graph_count < _MAX_GRAPHS

    def _bucket(self, shape: Shape) -> _Bucket:
        if shape not in self._buckets:
            graph_id = _NO_GRAPH
            if self._captures_next:
                graph_id = self._graph_count = self._graph_count + 1
            self._buckets[shape] = _Bucket(self.runtime, self.spec.signature, shape, self._device, graph_id)
        return self._buckets[shape]


class _Bucket:
    """Device buffers for batches of one shape, at the fixed addresses that a CUDA graph requires."""

    def __init__(self, session: Any, signature: Signature, bucket: Shape, device: str, graph_id: int) -> None:
        import onnxruntime

        def allocate(shape: Sequence[int], dtype: str) -> Any:
            return onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, np.dtype(dtype).type, device, 0)

        self._session, self._binding = session, session.io_binding()
        dtypes = {spec.name: spec.dtype.value for spec in signature.inputs}
        # The inputs of the graph file decide: unused inputs are pruned.
        names = [entry.name for entry in session.get_inputs()]
        self._inputs = {name: allocate((bucket.batch, bucket.sequence), dtypes[name]) for name in names}
        for name, value in self._inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        self._outputs = [spec.name for spec in signature.outputs]
        for spec in signature.outputs:
            if has_fixed_outputs(signature):
                self._binding.bind_ortvalue_output(spec.name, allocate(to_dims(spec, bucket), spec.dtype.value))
            else:
                self._binding.bind_output(spec.name, device)
        self._options = onnxruntime.RunOptions()
        # The first batch runs twice and is captured.
        self._options.add_run_config_entry("gpu_graph_id", str(graph_id))

    def __call__(self, feeds: Mapping[str, IntArray]) -> dict[str, FloatArray]:
        for name, value in self._inputs.items():
            value.update_inplace(np.ascontiguousarray(feeds[name]))
        self._session.run_with_iobinding(self._binding, self._options)
        return dict(zip(self._outputs, self._binding.copy_outputs_to_cpu(), strict=True))


def open_graph(
    graph: str | bytes, device: str, profile_folder: str | None = None, extra_options: Mapping[str, str] | None = None
) -> Any:
    """Open a graph on the GPU, or for tests on the CPU; `extra_options` are for the CUDA execution provider."""
    import onnxruntime

    options = session_options(1, profile_folder)
    if device != CUDA:
        return onnxruntime.InferenceSession(graph, options, providers=[CPU_PROVIDER])
    load_libraries()
    # Without `use_tf32`, fp32 matmuls would run in TF32. The device id is left out: with it, ONNX Runtime first looks
    # for a plugin provider and logs a warning for every session that there is none.
    cuda_options = {"use_tf32": "0", "arena_extend_strategy": "kSameAsRequested", **(extra_options or {})}
    providers = [(CUDA_PROVIDER, cuda_options), CPU_PROVIDER]
    return onnxruntime.InferenceSession(graph, options, providers=providers, enable_fallback=0)


def check_started(session: Any, device: str) -> None:
    """Raise an error if ONNX Runtime fell back to the CPU."""
    if device == CUDA and CUDA_PROVIDER not in session.get_providers():
        raise StageError(
            "ONNX Runtime's CUDA execution provider failed to start", hint="run hasten doctor for the reason"
        )


def has_fixed_outputs(signature: Signature) -> bool:
    """Return whether output shapes follow from the batch's shape; the number of mask tokens does not."""
    return all(MASKS not in spec.shape for spec in signature.outputs)


def check_placements(
    artifact: Artifact, open_session: Callable[[Artifact, RunOptions, str], CudaSession] = CudaSession
) -> None:
    """Reject a graph that ONNX Runtime runs partly on the CPU: a batch would wait for it and be copied twice.

    A graph that runs entirely on the CPU has no copies, and ONNX Runtime does not report it: that is checked too.
    """
    with (
        tempfile.TemporaryDirectory(prefix="hasten-") as folder,
        open_session(artifact, RunOptions(1), folder) as session,
    ):
        session.warm([Shape(1, 8)])
        nodes = node_placements(session.runtime)
    reject_cpu_nodes(nodes_on_cpu(nodes))
    if all(node.provider != CUDA_PROVIDER for node in nodes):
        raise StageError(f"ONNX Runtime ran none of the nodes on {CUDA_PROVIDER}")


def reject_cpu_nodes(nodes: Sequence[str]) -> None:
    """Raise an error that names the first of these nodes, if there are any."""
    if nodes:
        names = ", ".join(nodes[:_MAX_NAMED_NODES]) + (", …" if len(nodes) > _MAX_NAMED_NODES else "")
        raise StageError(f"{len(nodes)} nodes have no GPU kernel and ran on the CPU: {names}")


def nodes_on_cpu(nodes: Sequence[NodePlacement], max_shape_bytes: int = 0) -> tuple[str, ...]:
    """Return the nodes that run on the CPU and exchange data with the GPU, those with the largest outputs first.

    Without copies between the devices there are none: the nodes on the CPU then compute shapes, which ONNX Runtime
    places there on purpose. Copies of up to `max_shape_bytes` are shapes too and are ignored.
    """
    copies = [node.node for node in nodes if node.operator in _COPIES and not 0 < node.output_bytes <= max_shape_bytes]
    if not copies:
        return ()
    names = [
        f"{node.operator} '{node.node}'"
        for node in sorted(nodes, key=lambda node: -node.output_bytes)
        if node.provider == CPU_PROVIDER
    ]
    return tuple(dict.fromkeys(names)) or tuple(copies)


@cache
def load_libraries() -> None:
    """Load the CUDA libraries installed as Python packages, where the dynamic linker does not search."""
    import onnxruntime

    with redirect_stdout(StringIO()):  # it prints missing libraries, which the linker may still find
        onnxruntime.preload_dlls()
