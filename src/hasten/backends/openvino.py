"""OpenVINO on the CPU: Intel and Arm, in fp32 and in the half precisions the processor computes in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
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

# OpenVINO's word for the precision, and what its CPU plugin must list among its capabilities.
_HINTS = {Precision.FP32: "f32", Precision.FP16: "f16", Precision.BF16: "bf16"}
_CAPABILITIES = {Precision.FP16: "FP16", Precision.BF16: "BF16"}


class OpenVino:
    name = "openvino"
    requires = ("openvino",)
    extra = "openvino"
    dialect = Dialect.ONNX
    is_stored = True

    def probe(self, machine: Machine, variant: Variant | None = None) -> Support:
        support = probe_packages(self)
        if not support.ok or variant is None:
            return support
        if variant.device != CPU:
            return Support.no(f"it runs on the CPU, not on '{variant.device}'")
        if variant.precision not in _HINTS:
            return Support.no(f"it has no {variant.precision} without quantization")
        needed = _CAPABILITIES.get(variant.precision)
        if needed is not None and needed not in _cpu_capabilities():
            return Support.no(f"this processor does not compute in {variant.precision}")
        return support

    def variants(self, machine: Machine) -> Sequence[Variant]:
        """fp32, and the half precision that pays here: bf16 goes through the matrix units where a processor has any."""
        halves = [Variant(self.name, precision) for precision in (Precision.BF16, Precision.FP16)]
        return [
            Variant(self.name, Precision.FP32),
            *[half for half in halves if self.probe(machine, half).ok][:1],
        ]

    def make(self, source: Source, variant: Variant, directory: Path) -> Artifact:
        import openvino

        graphs = {}
        for name, path in source.graphs.items():
            try:
                model = _core().read_model(path)
                # Weights stay fp32 in the file: from fp16 ones the embedding lookup is four times slower (2 % of MiniLM
                # at 8×128), and loading has to widen them before it can repack them.
                openvino.save_model(model, directory / f"{name}.xml", compress_to_fp16=False)
            except RuntimeError as error:
                raise StageError(f"OpenVINO cannot read the graph '{name}': {error}") from error
            graphs[name] = f"{name}.xml"
        return Artifact(variant, source.signature, directory, graphs)

    def open(self, artifact: Artifact, options: RunOptions) -> Session:
        return _Session(artifact, options)


@cache
def _core() -> Any:
    """One for the process, never freed. Each Core that compiles on a processor with AMX installs a signal stack of its
    own and, when freed out of order, leaves a dangling one behind: the next signal (Ctrl-C) kills the process
    (seen with 2026.4; tests/e2e/test_interruption.py)."""
    import openvino

    return openvino.Core()


@cache
def _cpu_capabilities() -> frozenset[str]:
    return frozenset(_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"))


class _Session(PaddedSession):
    def __init__(self, artifact: Artifact, options: RunOptions) -> None:
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": _HINTS[artifact.variant.precision],
            "INFERENCE_NUM_THREADS": options.thread_count,
        }
        try:
            compiled = _core().compile_model(artifact.path(MODEL), "CPU", settings)
        except RuntimeError as error:
            raise StageError(f"OpenVINO cannot load {artifact.variant}: {error}") from error
        self._request: Any = compiled.create_infer_request()
        self._feeds = {entry.get_any_name() for entry in compiled.inputs}
        self._places = {spec.name: compiled.output(spec.name).index for spec in artifact.signature.outputs}
        self.spec = SessionSpec(artifact.signature, Layout.PADDED, CPU, _executed_precision(compiled))

    def close(self) -> None:
        self._request = None

    def run(self, batch: Batch) -> Outputs:
        if self._request is None:
            raise StageError("the session is closed")
        feeds = pad(batch, self.spec.signature)
        try:
            self._request.infer(
                {name: value for name, value in feeds.items() if name in self._feeds}, share_inputs=True
            )
        except RuntimeError as error:
            raise StageError(f"OpenVINO failed on a batch of {len(batch)}: {error}") from error
        # Copied: the request owns the buffer and the next run overwrites it.
        outputs = {name: self._request.get_output_tensor(place).data.copy() for name, place in self._places.items()}
        return unpad(outputs, batch, self.spec.signature)


def _executed_precision(compiled: Any) -> str:
    """What the matrix products really run in: OpenVINO treats the precision as a hint."""
    found: Counter[str] = Counter()
    for node in compiled.get_runtime_model().get_ops():
        about = node.get_rt_info()
        if str(about["layerType"].value) in ("FullyConnected", "MatMul"):
            found[str(about["runtimePrecision"].value)] += 1
    names = {hint: precision.value for precision, hint in _HINTS.items()}
    most = found.most_common(1)[0][0] if found else ""
    return names.get(most, most)


BACKEND = OpenVino()
