"""ONNX Runtime, on the CPU and on NVIDIA GPUs."""

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

from hasten.backends import (
    DECODER,
    MODEL,
    Artifact,
    Decoder,
    Dialect,
    RunOptions,
    Session,
    Source,
    probe_packages,
)
from hasten.backends.onnxruntime.cuda import CudaSession, check_placements, load_libraries, probe_provider
from hasten.backends.onnxruntime.cuda_decoder import CudaDecoder, check_decoder_placements
from hasten.backends.onnxruntime.decoder import DecoderSession
from hasten.backends.onnxruntime.session import (
    CPU_PROVIDER,
    CUDA_PROVIDER,
    TENSORRT_PROVIDER,
    CpuSession,
    executed,
    placements,
    settings,
)
from hasten.core.errors import StageError
from hasten.core.execution import Execution, Step, Trial, origin
from hasten.core.hardware import Machine
from hasten.core.probe_graph import INPUT, WIDTH, probe_graph
from hasten.core.tensors import Batch, Shape, pad
from hasten.core.variant import CPU, CUDA, Precision, Support, Variant

# Without being asked for, and what there is beside it; on a GPU, weights in blocks are for models that write.
_OFFERED = {CPU: (Precision.FP32, Precision.INT8), CUDA: (Precision.FP16, Precision.FP32)}
_PRECISIONS = {
    CPU: (*_OFFERED[CPU], Precision.INT4),
    CUDA: (*_OFFERED[CUDA], Precision.INT8, Precision.INT4),
}


class OnnxRuntime:
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
        is_elsewhere = variant is not None and variant.device == CUDA
        return probe_provider(machine) if support.ok and is_elsewhere else support

    def variants(self, machine: Machine) -> Sequence[Variant]:
        on_gpu = [Variant(self.name, precision, CUDA) for precision in _OFFERED[CUDA]]
        return [
            *(Variant(self.name, precision) for precision in _OFFERED[CPU]),
            *(variant for variant in on_gpu if self.probe(machine, variant).ok),
        ]

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
        artifact = Artifact(variant, source.signature, directory, graphs)
        if variant.device == CUDA:
            (check_decoder_placements if DECODER in graphs else check_placements)(artifact)
        return artifact

    def open(self, artifact: Artifact, options: RunOptions) -> Session:
        return _open(artifact, options)

    def open_decoder(self, artifact: Artifact, options: RunOptions, slots: int) -> Decoder:
        return _open_decoder(artifact, options, slots)

    def executions(self, artifact: Artifact) -> Sequence[Execution]:
        """A small batch with the profiler on, which writes down the provider of every kernel that ran."""
        with tempfile.TemporaryDirectory(prefix="hasten-") as work:
            if DECODER in artifact.graphs:
                with _open_decoder(artifact, RunOptions(1), 1, work) as decoder:
                    decoder.begin(0, np.zeros(8, np.int32))
                    return executed([one for runtime in decoder.runtimes for one in placements(runtime)])
            with _open(artifact, RunOptions(1), work) as session:
                session.warm([Shape(1, 8)])
                return executed(placements(session.runtime))

    def first_non_finite(self, artifact: Artifact, batch: Batch) -> str | None:
        """Every tensor an output; on the CPU, where what leaves the range of fp16 does so too."""
        import onnx
        import onnxruntime

        graph = artifact.path(MODEL)
        model = onnx.load(graph, load_external_data=False)
        nodes, outputs = model.graph.node, [entry.name for entry in model.graph.output]
        inner = [name for node in nodes for name in node.output if name and name not in outputs]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
        options = settings(1)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(graph.parent))
        feeds = pad(batch, artifact.signature)
        try:
            session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[CPU_PROVIDER])
            taken = {entry.name: feeds[entry.name] for entry in session.get_inputs()}
            found = dict(zip([*outputs, *inner], session.run([*outputs, *inner], taken), strict=True))
        except Exception as error:  # the binding raises its own unrelated classes
            raise StageError(f"ONNX Runtime cannot show what {artifact.variant} computes: {error}") from error
        broken = {name for name, value in found.items() if value.dtype.kind == "f" and not np.isfinite(value).all()}
        steps = [Step(node.name or node.output[0], tuple(node.input), tuple(node.output)) for node in nodes]
        return origin(steps, outputs, broken)

    def trials(self, machine: Machine) -> Sequence[Trial]:
        import onnxruntime

        return [trial(provider, machine) for provider in onnxruntime.get_available_providers()]


def _open(artifact: Artifact, options: RunOptions, profile: str | None = None) -> CpuSession | CudaSession:
    on = CudaSession if artifact.variant.device == CUDA else CpuSession
    return on(artifact, options, profile)


def _open_decoder(artifact: Artifact, options: RunOptions, slots: int, profile: str | None = None) -> DecoderSession:
    on = CudaDecoder if artifact.variant.device == CUDA else DecoderSession
    return on(artifact, options, slots, profile)


def trial(provider: str, machine: Machine) -> Trial:
    """ONNX Runtime hands what a provider cannot do, or everything if it does not start, to the CPU."""
    import onnxruntime

    is_wanted = provider == CPU_PROVIDER or (provider == CUDA_PROVIDER and bool(machine.gpus))
    with tempfile.TemporaryDirectory(prefix="hasten-") as work:
        options = settings(1, work)
        if provider in (CUDA_PROVIDER, TENSORRT_PROVIDER):
            load_libraries()
        # As they are in the graph, so that each is seen.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        printed = Path(work) / "stderr"
        try:
            with _stderr_into(printed):
                session = onnxruntime.InferenceSession(probe_graph(), options, providers=[provider])
                session.run(None, {INPUT: np.ones((2, WIDTH), np.float32)})
            ran = executed(placements(session))
        except Exception as error:  # the binding raises its own unrelated classes
            return Trial(provider, is_ok=not is_wanted, note=str(error).strip().partition("\n")[0] or repr(error))
        reason = re.search(r"with error: (.+)", printed.read_text(errors="replace"))
    has_run = any(execution.on == provider for execution in ran)
    note = "" if has_run else "it executes none of them"
    if provider not in session.get_providers():
        note = f"it does not start: {reason[1] if reason else 'ONNX Runtime does not say why'}"
    return Trial(provider, ran, has_run or not is_wanted, note)


@contextmanager
def _stderr_into(file: Path) -> Iterator[None]:
    """ONNX Runtime's own code prints why a provider does not start, and tells nobody else."""
    before = os.dup(2)
    try:
        with file.open("wb") as stream:
            os.dup2(stream.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


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
    nodes = model.graph.node
    looked_up = {node.input[0] for node in nodes if node.op_type == "Gather"}
    looked_up.update(*(node.input for node in nodes if node.op_type.endswith("EmbedLayerNormalization")))
    # A head that words are looked up in too has bits of its own.
    tables = {node.input[0] for node in nodes if node.op_type == "GatherBlockQuantized"}
    tables |= {node.input[0] for node in nodes if node.op_type == "Reshape" and node.output[0] in tables}
    weights: Counter[Precision] = Counter()
    for node in nodes:
        if node.op_type == "MatMulNBits":
            # Packed into bytes, whatever their bits; beside them a matrix of scales.
            about = {entry.name: entry.i for entry in node.attribute}
            if node.input[1] not in tables:
                weights[Precision.INT8 if about["bits"] == 8 else Precision.INT4] += about["K"] * about["N"]
            looked_up.update(node.input)
    for tensor in model.graph.initializer:
        if len(tensor.dims) == 2 and tensor.data_type in kinds and tensor.name not in looked_up:
            weights[kinds[tensor.data_type]] += math.prod(tensor.dims)
    return weights.most_common(1)[0][0] if weights else Precision.FP32


BACKEND = OnnxRuntime()
