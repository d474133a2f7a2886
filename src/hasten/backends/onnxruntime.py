"""ONNX Runtime on the CPU."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from hasten.core.execution import Execution, Step, Trial, origin
from hasten.core.hardware import Machine
from hasten.core.probe_graph import INPUT, WIDTH, probe_graph
from hasten.core.tensors import Batch, Layout, Outputs, SessionSpec, Shape, pad, unpad
from hasten.core.variant import CPU, Precision, Support, Variant

_OFFERED = (Precision.FP32, Precision.INT8)
_PRECISIONS = (*_OFFERED, Precision.INT4)
_ERRORS_ONLY = 3
_CPU = "CPUExecutionProvider"
# It would put norms back together with the additions before them, into a kernel that is slower than the two.
_UNWANTED = ["SkipLayerNormFusion"]


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
        return [Variant(self.name, precision) for precision in _OFFERED]

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

    def executions(self, artifact: Artifact) -> Sequence[Execution]:
        """A small batch with the profiler on, which writes down the provider of every kernel that ran."""
        with tempfile.TemporaryDirectory(prefix="hasten-") as work, _Session(artifact, RunOptions(1), work) as session:
            session.warm([Shape(1, 8)])
            return _profiled(session._session)

    def first_non_finite(self, artifact: Artifact, batch: Batch) -> str | None:
        """Every tensor an output."""
        import numpy as np
        import onnx
        import onnxruntime

        graph = artifact.path(MODEL)
        model = onnx.load(graph, load_external_data=False)
        nodes, outputs = model.graph.node, [entry.name for entry in model.graph.output]
        inner = [name for node in nodes for name in node.output if name and name not in outputs]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
        settings = _settings(1)
        settings.add_session_config_entry("session.model_external_initializers_file_folder_path", str(graph.parent))
        feeds = pad(batch, artifact.signature)
        try:
            session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=[_CPU])
            taken = {entry.name: feeds[entry.name] for entry in session.get_inputs()}
            found = dict(zip([*outputs, *inner], session.run([*outputs, *inner], taken), strict=True))
        except Exception as error:  # the binding raises its own unrelated classes
            raise StageError(f"ONNX Runtime cannot show what {artifact.variant} computes: {error}") from error
        broken = {name for name, value in found.items() if value.dtype.kind == "f" and not np.isfinite(value).all()}
        steps = [Step(node.name or node.output[0], tuple(node.input), tuple(node.output)) for node in nodes]
        return origin(steps, outputs, broken)

    def trials(self, machine: Machine) -> Sequence[Trial]:
        import onnxruntime

        return [_trial(provider, machine) for provider in onnxruntime.get_available_providers()]


class _Session(PaddedSession):
    def __init__(self, artifact: Artifact, options: RunOptions, profile: str | None = None) -> None:
        import onnxruntime

        settings = _settings(options.thread_count, profile)
        try:
            session = onnxruntime.InferenceSession(
                str(artifact.path(MODEL)), settings, providers=[_CPU], disabled_optimizers=_UNWANTED
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

    def run_padded(self, batch: Batch) -> Outputs:
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


def _settings(threads: int, profile: str | None = None) -> Any:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.inter_op_num_threads = 1
    settings.log_severity_level = _ERRORS_ONLY
    if profile is not None:
        settings.enable_profiling = True
        settings.profile_file_prefix = f"{profile}/profile"
    return settings


def _profiled(session: Any) -> tuple[Execution, ...]:
    """Who executed what, as the profile of the one run says."""
    events = json.loads(Path(session.end_profiling()).read_bytes())
    ran = Counter(
        (event["args"]["op_name"], event["args"]["provider"])
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
    )
    return tuple(Execution(operator, provider, count) for (operator, provider), count in ran.most_common())


def _trial(provider: str, machine: Machine) -> Trial:
    """ONNX Runtime hands what a provider cannot do, or everything if it does not start, to the CPU."""
    import numpy as np
    import onnxruntime

    is_wanted = provider == _CPU or (provider == "CUDAExecutionProvider" and bool(machine.gpus))
    with tempfile.TemporaryDirectory(prefix="hasten-") as work:
        settings = _settings(1, work)
        # As they are in the graph, so that each is seen.
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        printed = Path(work) / "stderr"
        try:
            with _stderr_into(printed):
                session = onnxruntime.InferenceSession(probe_graph(), settings, providers=[provider])
                session.run(None, {INPUT: np.ones((2, WIDTH), np.float32)})
            executed = _profiled(session)
        except Exception as error:  # the binding raises its own unrelated classes
            return Trial(provider, is_ok=not is_wanted, note=str(error).strip().partition("\n")[0] or repr(error))
        reason = re.search(r"with error: (.+)", printed.read_text(errors="replace"))
    has_run = any(execution.on == provider for execution in executed)
    note = "" if has_run else "it executes none of them"
    if provider not in session.get_providers():
        note = f"it does not start: {reason[1] if reason else 'ONNX Runtime does not say why'}"
    return Trial(provider, executed, has_run or not is_wanted, note)


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
    weights: Counter[Precision] = Counter()
    for node in nodes:
        if node.op_type == "MatMulNBits":
            # Packed into bytes, whatever their bits; beside them a matrix of scales.
            about = {entry.name: entry.i for entry in node.attribute}
            weights[Precision.INT8 if about["bits"] == 8 else Precision.INT4] += about["K"] * about["N"]
            looked_up.update(node.input)
    for tensor in model.graph.initializer:
        if len(tensor.dims) == 2 and tensor.data_type in kinds and tensor.name not in looked_up:
            weights[kinds[tensor.data_type]] += math.prod(tensor.dims)
    return weights.most_common(1)[0][0] if weights else Precision.FP32


BACKEND = OnnxRuntime()
