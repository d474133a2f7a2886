"""Run graphs in ONNX Runtime, on CPUs and NVIDIA GPUs."""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from hasten.backends import DECODER, MODEL, Artifact, Dialect, RunOptions, Source, probe_packages
from hasten.backends.onnxruntime.cuda import CudaSession, check_placements, load_libraries, probe_provider
from hasten.backends.onnxruntime.cuda_decoder import CudaDecoder, check_decoder_placements
from hasten.backends.onnxruntime.decoder import DecoderSession
from hasten.backends.onnxruntime.session import (
    CPU_PROVIDER,
    CUDA_PROVIDER,
    TENSORRT_PROVIDER,
    CpuSession,
    count_placements,
    node_placements,
    session_options,
)
from hasten.core.errors import StageError
from hasten.core.onnx.probe_graph import INPUT, WIDTH, probe_graph
from hasten.core.placement import OperatorPlacement, PlacementStep, SelfTest, origin
from hasten.core.system.hardware import Machine
from hasten.core.tensors import Batch, Shape, pad
from hasten.core.variant import CPU, CUDA, Precision, Support, Variant

# Precisions that are tried by default, and all supported ones. On GPUs, int8 and int4 are block-wise weight-only
# quantization for generative models.
_OFFERED = {CPU: (Precision.FP32, Precision.INT8), CUDA: (Precision.FP16, Precision.FP32)}
_PRECISIONS = {CPU: (*_OFFERED[CPU], Precision.INT4), CUDA: (*_OFFERED[CUDA], Precision.INT8, Precision.INT4)}


class OnnxRuntime:
    """The backend `onnxruntime`."""

    name = "onnxruntime"
    requires = ("onnxruntime",)
    extra = None
    dialect = Dialect.ORT
    is_stored = True

    def probe(self, machine: Machine, variant: Variant | None = None) -> Support:
        if variant is not None and variant.device not in _PRECISIONS:
            return Support.no(f"it runs on '{CPU}' and on '{CUDA}', not on '{variant.device}'")
        if variant is not None and variant.precision not in _PRECISIONS[variant.device]:
            return Support.no(f"its kernels for '{variant.device}' do not compute in {variant.precision}")
        support = probe_packages(self)
        needs_gpu = variant is not None and variant.device == CUDA
        return probe_provider(machine) if support.ok and needs_gpu else support

    def variants(self, machine: Machine) -> Sequence[Variant]:
        on_cpu, on_gpu = (
            [Variant(self.name, precision, device) for precision in _OFFERED[device]] for device in _OFFERED
        )
        return on_cpu + [variant for variant in on_gpu if self.probe(machine, variant).ok]

    def make(self, source: Source, variant: Variant, directory: Path) -> Artifact:
        """Copy the graph, which is already fused and quantized, and its external data."""
        graphs = {}
        for name, path in source.graphs.items():
            stored = stored_precision(path)
            if stored is not variant.precision:
                raise StageError(f"{variant} cannot be made: the graph '{name}' holds {stored} weights")
            for file in (path, *path.parent.glob(f"{path.name}.data*")):
                shutil.copy2(file, directory / file.name)
            graphs[name] = path.name
        artifact = Artifact(variant, source.signature, directory, graphs)
        if variant.device == CUDA:
            (check_decoder_placements if DECODER in graphs else check_placements)(artifact)
        return artifact

    def open(
        self, artifact: Artifact, options: RunOptions, profile_folder: str | None = None
    ) -> CpuSession | CudaSession:
        """Load a variant; with a folder, a profile is written to it."""
        session_class = CudaSession if artifact.variant.device == CUDA else CpuSession
        return session_class(artifact, options, profile_folder)

    def open_decoder(
        self, artifact: Artifact, options: RunOptions, slots: int, profile_folder: str | None = None
    ) -> DecoderSession:
        """Load a generative variant; with a folder, profiles are written to it."""
        session_class = CudaDecoder if artifact.variant.device == CUDA else DecoderSession
        return session_class(artifact, options, slots, profile_folder)

    def placements(self, artifact: Artifact) -> Sequence[OperatorPlacement]:
        """Profile a small batch and return the execution provider of every kernel that ran."""
        with tempfile.TemporaryDirectory(prefix="hasten-") as folder:
            if DECODER in artifact.graphs:
                with self.open_decoder(artifact, RunOptions(1), 1, folder) as decoder:
                    decoder.prefill(0, np.zeros(8, np.int32))
                    return count_placements([node for runtime in decoder.runtimes for node in node_placements(runtime)])
            with self.open(artifact, RunOptions(1), folder) as session:
                session.warm([Shape(1, 8)])
                return count_placements(node_placements(session.runtime))

    def first_non_finite(self, artifact: Artifact, batch: Batch) -> str | None:
        """Run the graph on the CPU with every tensor as an output; values that overflow fp16 do so there too."""
        import onnx
        import onnxruntime

        graph = artifact.path(MODEL)
        model = onnx.load(graph, load_external_data=False)
        nodes, outputs = model.graph.node, [entry.name for entry in model.graph.output]
        inner = [name for node in nodes for name in node.output if name and name not in outputs]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
        options = session_options(1)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(graph.parent))
        feeds = pad(batch, artifact.signature)
        try:
            session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[CPU_PROVIDER])
            used_feeds = {entry.name: feeds[entry.name] for entry in session.get_inputs()}
            values = dict(zip([*outputs, *inner], session.run([*outputs, *inner], used_feeds), strict=True))
        except Exception as error:  # the binding raises its own unrelated classes
            raise StageError(f"ONNX Runtime cannot expose the tensors of {artifact.variant}: {error}") from error
        broken = {name for name, value in values.items() if value.dtype.kind == "f" and not np.isfinite(value).all()}
        steps = [PlacementStep(node.name or node.output[0], tuple(node.input), tuple(node.output)) for node in nodes]
        return origin(steps, outputs, broken)

    def trials(self, machine: Machine) -> Sequence[SelfTest]:
        import onnxruntime

        return [_self_test(provider, machine) for provider in onnxruntime.get_available_providers()]


def _self_test(provider: str, machine: Machine) -> SelfTest:
    """Run a few operators on an execution provider and report where they ran.

    ONNX Runtime silently moves unsupported operators, or all of them if the provider fails to start, to the CPU.
    """
    import onnxruntime

    is_expected = provider == CPU_PROVIDER or (provider == CUDA_PROVIDER and bool(machine.gpus))
    with tempfile.TemporaryDirectory(prefix="hasten-") as folder:
        options = session_options(1, folder)
        if provider in (CUDA_PROVIDER, TENSORRT_PROVIDER):
            load_libraries()
        # Without fusions, so that every operator is reported.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        stderr = Path(folder) / "stderr"
        try:
            with _redirect_stderr(stderr):
                session = onnxruntime.InferenceSession(probe_graph(), options, providers=[provider])
                session.run(None, {INPUT: np.ones((2, WIDTH), np.float32)})
            placements = count_placements(node_placements(session))
        except Exception as error:  # the binding raises its own unrelated classes
            return SelfTest(provider, is_ok=not is_expected, note=str(error).strip().partition("\n")[0] or repr(error))
        reason = re.search(r"with error: (.+)", stderr.read_text(errors="replace"))
    has_run = any(placement.on == provider for placement in placements)
    note = "" if has_run else "it executes none of them"
    if provider not in session.get_providers():
        note = f"it does not start: {reason[1] if reason else 'ONNX Runtime gives no reason'}"
    return SelfTest(provider, placements, has_run or not is_expected, note)


@contextmanager
def _redirect_stderr(file: Path) -> Iterator[None]:
    """Write the process's stderr to a file: only there does ONNX Runtime report why a provider does not start."""
    original = os.dup(2)
    try:
        with file.open("wb") as stream:
            os.dup2(stream.fileno(), 2)
        yield
    finally:
        os.dup2(original, 2)
        os.close(original)


def stored_precision(graph: Path) -> Precision:
    """Return the precision that most of a graph's matmul weights are stored in."""
    import onnx

    precisions = {
        onnx.TensorProto.FLOAT: Precision.FP32,
        onnx.TensorProto.FLOAT16: Precision.FP16,
        onnx.TensorProto.BFLOAT16: Precision.BF16,
        onnx.TensorProto.INT8: Precision.INT8,
        onnx.TensorProto.UINT8: Precision.INT8,
    }
    try:
        model = onnx.load(graph, load_external_data=False)
    except Exception as error:  # protobuf raises its own classes
        raise StageError(f"{graph} is not an ONNX graph: {error}") from error
    # Only matrices count: biases, norms and embeddings stay in fp32 whatever precision the matmuls run in.
    nodes = model.graph.node
    looked_up = {node.input[0] for node in nodes if node.op_type == "Gather"}
    looked_up.update(*(node.input for node in nodes if node.op_type.endswith("EmbedLayerNormalization")))
    # An output head that is tied to the embeddings may have another bit width than the other matmuls.
    tables = {node.input[0] for node in nodes if node.op_type == "GatherBlockQuantized"}
    tables |= {node.input[0] for node in nodes if node.op_type == "Reshape" and node.output[0] in tables}
    weights: Counter[Precision] = Counter()
    for node in nodes:
        if node.op_type == "MatMulNBits":
            # Weights of any bit width are packed into bytes; their scales are a matrix too.
            attributes = {entry.name: entry.i for entry in node.attribute}
            if node.input[1] not in tables:
                precision = Precision.INT8 if attributes["bits"] == 8 else Precision.INT4
                weights[precision] += attributes["K"] * attributes["N"]
            looked_up.update(node.input)
    for tensor in model.graph.initializer:
        if len(tensor.dims) == 2 and tensor.data_type in precisions and tensor.name not in looked_up:
            weights[precisions[tensor.data_type]] += math.prod(tensor.dims)
    return weights.most_common(1)[0][0] if weights else Precision.FP32


BACKEND = OnnxRuntime()
