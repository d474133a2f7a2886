"""ONNX Runtime on the CPU."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hasten.backends import (
    MODEL,
    Artifact,
    Dialect,
    PaddedSession,
    RunOptions,
    Session,
    Source,
    probe_packages,
)
from hasten.core.errors import StageError
from hasten.core.hardware import Machine
from hasten.core.tensors import Batch, Layout, Outputs, SessionSpec, pad, unpad
from hasten.core.variant import CPU, Precision, Support, Variant

_PRECISIONS = (Precision.FP32, Precision.INT8)
_ERRORS_ONLY = 3


class OnnxRuntime:
    name = "onnxruntime"
    requires = ("onnxruntime",)
    extra = None
    dialect = Dialect.ORT
    is_stored = True

    def probe(self, machine: Machine, variant: Variant | None = None) -> Support:
        if variant is not None and variant.device != CPU:
            return Support.no(f"it runs on the CPU, not on '{variant.device}'")
        if variant is not None and variant.precision not in _PRECISIONS:
            return Support.no(f"its CPU kernels do not compute in {variant.precision}")
        return probe_packages(self)

    def variants(self, machine: Machine) -> Sequence[Variant]:
        return [Variant(self.name, precision) for precision in _PRECISIONS]

    def make(self, source: Source, variant: Variant, directory: Path) -> Artifact:
        """The graph comes fused and quantized; here it only moves, its external data with it."""
        graphs = {}
        for name, path in source.graphs.items():
            found = stored_precision(path)
            if found is not variant.precision:
                raise StageError(f"{variant} cannot be made: the graph '{name}' holds {found} weights")
            for file in (path, *path.parent.glob(f"{path.name}.data*")):
                shutil.copy2(file, directory / file.name)
            graphs[name] = path.name
        return Artifact(variant, source.signature, directory, graphs)

    def open(self, artifact: Artifact, options: RunOptions) -> Session:
        return _Session(artifact, options)


class _Session(PaddedSession):
    def __init__(self, artifact: Artifact, options: RunOptions) -> None:
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = options.thread_count
        settings.inter_op_num_threads = 1
        settings.log_severity_level = _ERRORS_ONLY
        try:
            session = onnxruntime.InferenceSession(
                str(artifact.path(MODEL)), settings, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # the binding raises its own unrelated classes
            raise StageError(f"ONNX Runtime cannot load {artifact.variant}: {error}") from error
        self._session: Any = session
        self._outputs = [spec.name for spec in artifact.signature.outputs]
        # What the graph file says it takes decides, since a fused graph may take 32-bit ids.
        self._feeds = {entry.name for entry in session.get_inputs()}
        # Proven when it was made (stored_precision); the bundle's hashes keep it so.
        self.spec = SessionSpec(artifact.signature, Layout.PADDED, CPU, artifact.variant.precision)

    def close(self) -> None:
        self._session = None

    def run(self, batch: Batch) -> Outputs:
        if self._session is None:
            raise StageError("the session is closed")
        feeds = pad(batch, self.spec.signature)
        try:
            results = self._session.run(
                self._outputs, {name: value for name, value in feeds.items() if name in self._feeds}
            )
        except Exception as error:
            raise StageError(f"ONNX Runtime failed on a batch of {len(batch)}: {error}") from error
        return unpad(dict(zip(self._outputs, results, strict=True)), batch, self.spec.signature)


def stored_precision(graph: Path) -> Precision:
    """What most of a graph's weights are stored in, counted in the file itself."""
    import onnx

    kinds = {
        onnx.TensorProto.FLOAT: Precision.FP32,
        onnx.TensorProto.FLOAT16: Precision.FP16,
        onnx.TensorProto.BFLOAT16: Precision.BF16,
        onnx.TensorProto.INT8: Precision.INT8,
        onnx.TensorProto.UINT8: Precision.INT8,
    }
    try:
        model = onnx.load(graph, load_external_data=False)
    except Exception as error:  # protobuf's own classes
        raise StageError(f"{graph} is not an ONNX graph: {error}") from error
    # Only matrices count: biases and norms stay in fp32 whatever the products run in, and so do embeddings.
    looked_up = {node.input[0] for node in model.graph.node if node.op_type == "Gather"}
    weights: Counter[Precision] = Counter()
    for tensor in model.graph.initializer:
        if len(tensor.dims) == 2 and tensor.data_type in kinds and tensor.name not in looked_up:
            weights[kinds[tensor.data_type]] += math.prod(tensor.dims)
    return weights.most_common(1)[0][0] if weights else Precision.FP32


BACKEND = OnnxRuntime()
