"""Run graphs in OpenVINO on Intel and Arm CPUs, in fp32, in the half precisions that the CPU supports, and in int8."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from hasten.backends import (
    LIMITED_BUCKET_TOKENS,
    MODEL,
    Artifact,
    Dialect,
    PaddedSession,
    RunOptions,
    Session,
    Source,
    probe_packages,
)
from hasten.backends.openvino.arm_workarounds import work_around_arm_bugs
from hasten.core.errors import StageError
from hasten.core.onnx.probe_graph import INPUT, WIDTH, probe_graph
from hasten.core.placement import OperatorPlacement, PlacementStep, SelfTest, origin
from hasten.core.system.hardware import Machine, this_machine
from hasten.core.tensors import Batch, Layout, Outputs, SessionSpec, Shape, pad, unpad
from hasten.core.variant import CPU, Precision, Support, Variant

# OpenVINO's names of the precisions.
_HINTS = {Precision.FP32: "f32", Precision.FP16: "f16", Precision.BF16: "bf16"}
_NOT_OPERATORS = ("Parameter", "Constant", "Result")
# The attribute of OpenVINO's file format that keeps an operator out of fp16.
_STAYS_FP32 = {"name": "DisablePrecisionConversion", "version": "0", "value": "dynamic:f16"}
# The precision of an int8 model between its matmuls. Not bf16: quantized attention is then wrong at some lengths
# (MiniLM at 32 tokens on AMX, OpenVINO 2026.4: logits off by 1.5, SST-2 accuracy 0.904 instead of 0.913).
_INT8_ACTIVATIONS = "f32"
_INT8_TYPES = ("i8", "u8")
# The modifier of variants whose activations are quantized at run time, in groups of this many channels of a token. On
# MiniLM, groups of 128 are hardly faster and fail the gate (mean cosine 0.9987 instead of 0.9991); at the value for a
# whole row, OpenVINO computes in fp32.
_DYNAMIC = "dynamic"
_GROUP_CHANNELS = 64
# Other CPUs compute such variants in fp32.
_DYNAMIC_INSTRUCTIONS = ("avx512_vnni", "avx_vnni", "amx_int8")
# Shapes after which memory is released by compiling the model again, which takes as long as loading it.
_MAX_SHAPES = 64


class OpenVino:
    """The backend `openvino`."""

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
        if variant.precision not in (*_HINTS, Precision.INT8):
            return Support.no(f"it does not compute in {variant.precision}")
        if _DYNAMIC in variant.modifiers and not machine.has(*_DYNAMIC_INSTRUCTIONS):
            return Support.no(
                "this CPU has no VNNI instructions, with which OpenVINO quantizes activations at run time"
            )
        if variant.precision in (Precision.FP16, Precision.BF16) and variant.precision.name not in _cpu_capabilities():
            return Support.no(f"this CPU does not compute in {variant.precision}")
        return support

    def variants(self, machine: Machine) -> Sequence[Variant]:
        """Return fp32 and the fastest supported half precision: bf16 uses the CPU's matrix units if it has any.

        int8 is not among them, because it has to be calibrated first.
        """
        fp32 = Variant(self.name, Precision.FP32)
        if not self.probe(machine, fp32).ok:
            return []
        half_precision = [Variant(self.name, precision) for precision in (Precision.BF16, Precision.FP16)]
        return [fp32, *[variant for variant in half_precision if self.probe(machine, variant).ok][:1]]

    def make(self, source: Source, variant: Variant, directory: Path) -> Artifact:
        import openvino

        graphs = {}
        for name, path in source.graphs.items():
            try:
                model = _core().read_model(path)
                if variant.precision is Precision.INT8 and not _is_quantized(model):
                    raise StageError(f"{variant} cannot be made: the graph '{name}' is not quantized")
                # Weights stay fp32 in the file: with fp16 weights the embedding lookup is four times slower (2 % of
                # MiniLM at 8×128), and loading has to widen them before it can repack them.
                openvino.save_model(model, directory / f"{name}.xml", compress_to_fp16=False)
                if variant.precision is Precision.FP16 and source.fp16_overflow_tensors:
                    _keep_in_fp32(directory / f"{name}.xml", source.fp16_overflow_tensors)
            except RuntimeError as error:
                raise StageError(f"OpenVINO cannot read the graph '{name}': {_reason(error)}") from error
            graphs[name] = f"{name}.xml"
        return Artifact(variant, source.signature, directory, graphs)

    def open(self, artifact: Artifact, options: RunOptions) -> Session:
        return _Session(artifact, options)

    def placements(self, artifact: Artifact) -> Sequence[OperatorPlacement]:
        try:
            compiled = _compile(artifact.path(MODEL), artifact.variant, threads=1)
        except RuntimeError as error:
            raise StageError(f"OpenVINO cannot load {artifact.variant}: {error}") from error
        return _placements(compiled)

    def first_non_finite(self, artifact: Artifact, batch: Batch) -> str | None:
        """Run the model with every tensor as an output. Fewer operators are fused then, so values may differ."""
        feeds = pad(batch, artifact.signature)
        try:
            model = _core().read_model(artifact.path(MODEL))
            operators = [node for node in model.get_ordered_ops() if node.get_type_name() not in _NOT_OPERATORS]
            outputs = [_tensor_name(result.input_value(0)) for result in model.get_results()]
            model.add_outputs(
                [output for node in operators for output in node.outputs() if output.get_element_type().is_real()]
            )
            compiled = _compile(model, artifact.variant, threads=1)
            input_names = {name for entry in compiled.inputs for name in entry.get_names()}
            results = compiled({name: value for name, value in feeds.items() if name in input_names})
        except RuntimeError as error:
            raise StageError(f"OpenVINO cannot expose the tensors of {artifact.variant}: {_reason(error)}") from error
        names = [_tensor_name(result.input_value(0)) for result in model.get_results()]
        broken = {name for index, name in enumerate(names) if not np.isfinite(results[index]).all()}
        steps = [
            PlacementStep(
                node.get_friendly_name(),
                tuple(map(_tensor_name, node.input_values())),
                tuple(map(_tensor_name, node.outputs())),
            )
            for node in operators
        ]
        return origin(steps, outputs, broken)

    def trials(self, machine: Machine) -> Sequence[SelfTest]:
        offered = [p for p in _HINTS if self.probe(machine, Variant(self.name, p)).ok]
        others = [device for device in _core().available_devices if device != "CPU"]
        return [
            *map(_self_test, offered),
            *(SelfTest(device, note="available, but hasten runs OpenVINO on the CPU only") for device in others),
        ]


def _tensor_name(output: Any) -> str:
    """Return a unique name for an output of a node."""
    return f"{output.get_node().get_name()}:{output.get_index()}"


def _keep_in_fp32(file: Path, tensors: frozenset[str]) -> None:
    """Mark the operators that write or read these tensors, so that they stay in fp32 when the model is compiled."""
    model = _core().read_model(file)
    marked = {node.get_friendly_name() for node in _touching(model, tensors)}
    tree = ElementTree.parse(file)
    for layer in tree.iter("layer"):
        if layer.get("name") in marked:
            rt_info = layer.find("rt_info")
            if rt_info is None:
                rt_info = ElementTree.Element("rt_info")
                layer.insert(1 if layer.find("data") is not None else 0, rt_info)
            ElementTree.SubElement(rt_info, "attribute", _STAYS_FP32)
    tree.write(file, encoding="utf-8", xml_declaration=True)
    precisions = {
        name: str(node.get_rt_info()["runtimePrecision"].value)
        for node in _compile(file, Variant(OpenVino.name, Precision.FP16), threads=1).get_runtime_model().get_ops()
        for name in str(node.get_rt_info()["originalLayersNames"].value).split(",")
    }
    overflowing = sorted(name for name in marked if precisions.get(name) == _HINTS[Precision.FP16])
    if overflowing:
        raise StageError(
            f"values of {overflowing[0]} exceed the range of fp16, and this OpenVINO does not keep it in fp32",
            hint="pip install -U openvino",
        )


def _touching(model: Any, tensors: frozenset[str]) -> list[Any]:
    """Return the nodes that write or read the tensors.

    OpenVINO may convert one ONNX operator to several nodes; the tensors between these have no name.
    """
    nodes: dict[tuple[str, bool], Any] = {}

    def add(node: Any, *, is_reader: bool) -> None:
        if node.get_type_name() in _NOT_OPERATORS or (node.get_name(), is_reader) in nodes:
            return
        nodes[node.get_name(), is_reader] = node
        if is_reader:
            unnamed = [output for output in node.outputs() if not output.get_names()]
            others = [entry.get_node() for output in unnamed for entry in output.get_target_inputs()]
        else:
            others = [value.get_node() for value in node.input_values() if not value.get_names()]
        for other in others:
            add(other, is_reader=is_reader)

    for node in model.get_ordered_ops():
        for output in node.outputs():
            if not tensors.isdisjoint(output.get_names()):
                add(node, is_reader=False)
                for entry in output.get_target_inputs():
                    add(entry.get_node(), is_reader=True)
    return list(nodes.values())


@cache
def _core() -> Any:
    """Return the process's only Core, which is never freed.

    Each Core that compiles on a CPU with AMX installs a signal stack and, if freed out of order, leaves a dangling one
    behind: the next signal (Ctrl-C) kills the process (seen with 2026.4; tests/e2e/test_interruption.py).
    """
    import openvino

    return openvino.Core()


@cache
def _cpu_capabilities() -> frozenset[str]:
    return frozenset(_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"))


def _is_quantized(model: Any) -> bool:
    """Return whether a model is quantized: NNCF's ranges and ONNX's QDQ pairs are read as FakeQuantize."""
    return any(
        node.get_type_name() == "FakeQuantize"
        or (node.get_type_name() == "Constant" and node.get_element_type().get_type_name() in _INT8_TYPES)
        for node in model.get_ops()
    )


def _compile(model: Any, variant: Variant, threads: int) -> Any:
    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": _HINTS.get(variant.precision, _INT8_ACTIVATIONS),
        "INFERENCE_NUM_THREADS": threads,
    }
    if _DYNAMIC in variant.modifiers:
        options["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = _GROUP_CHANNELS
    if this_machine().has("neon"):
        model = work_around_arm_bugs(_core().read_model(model) if isinstance(model, Path) else model)
    return _core().compile_model(model, "CPU", options)


class _Session(PaddedSession):
    """A compiled model with one inference request."""

    def __init__(self, artifact: Artifact, options: RunOptions) -> None:
        self._artifact, self._threads = artifact, options.thread_count
        self._is_limited = options.max_memory is not None
        # Fewer shapes need fewer compiled kernels, and rows more padding.
        self._has_buckets = self._is_limited and artifact.signature.ignores_padding
        # Shapes that kernels were compiled for since the model was compiled.
        self._shapes: set[Shape] = set()
        self._is_closed = False
        compiled = self._open()
        # All names: an input whose cast was optimized away has the cast's name too, and that may come first.
        self._feeds = {name for entry in compiled.inputs for name in entry.get_names()}
        # Not `get_index()`, which counts the outputs of the node that an output comes from.
        indices = {name: index for index, entry in enumerate(compiled.outputs) for name in entry.get_names()}
        self._output_indices = {spec.name: indices[spec.name] for spec in artifact.signature.outputs}
        self.spec = SessionSpec(artifact.signature, Layout.PADDED, CPU, _executed_precision(compiled))

    def _open(self) -> Any:
        try:
            compiled = _compile(self._artifact.path(MODEL), self._artifact.variant, self._threads)
        except RuntimeError as error:
            raise StageError(f"OpenVINO cannot load {self._artifact.variant}: {_reason(error)}") from error
        self._request: Any = compiled.create_infer_request()
        self._shapes.clear()
        return compiled

    def close(self) -> None:
        self._is_closed = True
        self._request = None

    def release_memory(self, *, everything: bool = False) -> None:
        """Release the activations, and after many shapes compile the model again: only that releases their kernels.

        The kernels of a shape of MiniLM take 1 to 3 MB; a limit on OpenVINO's cache of them hardly lowers that.
        """
        if self._request is None:
            return
        self._request.get_compiled_model().release_memory()
        if len(self._shapes) > (0 if everything else _MAX_SHAPES):
            self._request = None
            self._open()

    def run_padded(self, batch: Batch) -> Outputs:
        if self._is_closed:
            raise StageError("the session is closed")
        if self._request is None:  # it could not be compiled again when it released memory
            self._open()
        bucket = None
        if self._has_buckets:
            width = -(-batch.longest // LIMITED_BUCKET_TOKENS) * LIMITED_BUCKET_TOKENS
            bucket = Shape(len(batch), min(width, self.spec.signature.max_length))
        if self._is_limited:
            self._shapes.add(bucket or Shape(len(batch), batch.longest))
        feeds = pad(batch, self.spec.signature, bucket)
        try:
            self._request.infer(
                {name: value for name, value in feeds.items() if name in self._feeds}, share_inputs=True
            )
        except RuntimeError as error:
            raise StageError(f"OpenVINO failed on a batch of {len(batch)}: {_reason(error)}") from error
        # Copied: the request owns the buffer and the next run overwrites it.
        outputs = {
            name: self._request.get_output_tensor(index).data.copy() for name, index in self._output_indices.items()
        }
        return unpad(outputs, batch, self.spec.signature, bucket)


def _reason(error: RuntimeError) -> str:
    """Return the last line of the message; those before it are source locations of OpenVINO."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _executed_precision(compiled: Any) -> str:
    """Return the precision that most matmuls run in: OpenVINO treats the requested precision as a hint."""
    counts: Counter[str] = Counter()
    for (layer, precision), count in _layers(compiled).items():
        if layer in ("FullyConnected", "MatMul"):
            counts[precision] += count
    return counts.most_common(1)[0][0] if counts else ""


def _layers(compiled: Any) -> Counter[tuple[str, str]]:
    """Count the layers of the compiled model by type and precision."""
    names = {hint: precision.value for precision, hint in _HINTS.items()}
    names |= dict.fromkeys(_INT8_TYPES, Precision.INT8.value)
    counts: Counter[tuple[str, str]] = Counter()
    for node in compiled.get_runtime_model().get_ops():
        rt_info = node.get_rt_info()
        precision = str(rt_info["runtimePrecision"].value)
        counts[str(rt_info["layerType"].value), names.get(precision, precision)] += 1
    return counts


def _placements(compiled: Any) -> tuple[OperatorPlacement, ...]:
    return tuple(
        OperatorPlacement(layer, f"CPU {precision}", count)
        for (layer, precision), count in _layers(compiled).most_common()
        if layer not in ("Input", "Output", "Const")
    )


def _self_test(precision: Precision) -> SelfTest:
    target = f"CPU {precision}"
    try:
        compiled = _compile(_core().read_model(probe_graph()), Variant(OpenVino.name, precision), threads=1)
        compiled.create_infer_request().infer({INPUT: np.ones((2, WIDTH), np.float32)})
    except RuntimeError as error:
        return SelfTest(target, is_ok=False, note=(str(error).strip() or "RuntimeError").splitlines()[0])
    executed = _executed_precision(compiled)
    return SelfTest(target, _placements(compiled), executed == precision, f"matmuls run in {executed}")


BACKEND = OpenVino()
