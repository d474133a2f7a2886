"""OpenVINO on the CPU: Intel and Arm, in fp32, in the half precisions the processor computes in, and in int8."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

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
from hasten.backends.openvino.arm import repaired
from hasten.core.errors import StageError
from hasten.core.execution import Execution, Step, Trial, origin
from hasten.core.hardware import Machine, this_machine
from hasten.core.probe_graph import INPUT, WIDTH, probe_graph
from hasten.core.tensors import Batch, Layout, Outputs, SessionSpec, pad, unpad
from hasten.core.variant import CPU, Precision, Support, Variant

# OpenVINO's word for the precision, and what its CPU plugin must list among its capabilities.
_HINTS = {Precision.FP32: "f32", Precision.FP16: "f16", Precision.BF16: "bf16"}
_NOT_COMPUTED = ("Parameter", "Constant", "Result")
# How a file says that an operator is not to be computed in fp16, in OpenVINO's own words.
_STAYS_FP32 = {"name": "DisablePrecisionConversion", "version": "0", "value": "dynamic:f16"}
_CAPABILITIES = {Precision.FP16: "FP16", Precision.BF16: "BF16"}
# What an int8 model computes in between its products. Not bf16: quantized attention then answers wrongly at single
# lengths (MiniLM at 32 tokens on AMX, OpenVINO 2026.4: logits off by 1.5, SST-2 accuracy 0.904 instead of 0.913).
_IN_BETWEEN = "f32"
_BYTES = ("i8", "u8")


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
        if variant.precision not in (*_HINTS, Precision.INT8):
            return Support.no(f"it does not compute in {variant.precision}")
        needed = _CAPABILITIES.get(variant.precision)
        if needed is not None and needed not in _cpu_capabilities():
            return Support.no(f"this processor does not compute in {variant.precision}")
        return support

    def variants(self, machine: Machine) -> Sequence[Variant]:
        """fp32, and the half precision that pays here: bf16 goes through the matrix units where a processor has any.

        Int8 has to be calibrated first.
        """
        whole = Variant(self.name, Precision.FP32)
        if not self.probe(machine, whole).ok:
            return []
        halves = [Variant(self.name, precision) for precision in (Precision.BF16, Precision.FP16)]
        return [whole, *[half for half in halves if self.probe(machine, half).ok][:1]]

    def make(self, source: Source, variant: Variant, directory: Path) -> Artifact:
        import openvino

        graphs = {}
        for name, path in source.graphs.items():
            try:
                model = _core().read_model(path)
                if variant.precision is Precision.INT8 and not _is_quantized(model):
                    raise StageError(f"{variant} cannot be made: the graph '{name}' is not quantized")
                # Weights stay fp32 in the file: from fp16 ones the embedding lookup is four times slower (2 % of MiniLM
                # at 8×128), and loading has to widen them before it can repack them.
                openvino.save_model(model, directory / f"{name}.xml", compress_to_fp16=False)
                if variant.precision is Precision.FP16 and source.beyond_fp16:
                    _keep_wide(directory / f"{name}.xml", source.beyond_fp16)
            except RuntimeError as error:
                raise StageError(f"OpenVINO cannot read the graph '{name}': {_why(error)}") from error
            graphs[name] = f"{name}.xml"
        return Artifact(variant, source.signature, directory, graphs)

    def open(self, artifact: Artifact, options: RunOptions) -> Session:
        return _Session(artifact, options)

    def executions(self, artifact: Artifact) -> Sequence[Execution]:
        try:
            compiled = _compile(artifact.path(MODEL), artifact.variant.precision, threads=1)
        except RuntimeError as error:
            raise StageError(f"OpenVINO cannot load {artifact.variant}: {error}") from error
        return _executed(compiled)

    def first_non_finite(self, artifact: Artifact, batch: Batch) -> str | None:
        """Every tensor an output: fewer operators are merged then, so that it may come to other numbers."""
        import numpy as np

        feeds = pad(batch, artifact.signature)
        try:
            model = _core().read_model(artifact.path(MODEL))
            operators = [node for node in model.get_ordered_ops() if node.get_type_name() not in _NOT_COMPUTED]
            outputs = [_name(result.input_value(0)) for result in model.get_results()]
            model.add_outputs(
                [place for node in operators for place in node.outputs() if place.get_element_type().is_real()]
            )
            compiled = _compile(model, artifact.variant.precision, threads=1)
            taken = {name for entry in compiled.inputs for name in entry.get_names()}
            results = compiled({name: value for name, value in feeds.items() if name in taken})
        except RuntimeError as error:
            raise StageError(f"OpenVINO cannot show what {artifact.variant} computes: {_why(error)}") from error
        names = [_name(result.input_value(0)) for result in model.get_results()]
        broken = {name for place, name in enumerate(names) if not np.isfinite(results[place]).all()}
        steps = [
            Step(node.get_friendly_name(), tuple(map(_name, node.input_values())), tuple(map(_name, node.outputs())))
            for node in operators
        ]
        return origin(steps, outputs, broken)

    def trials(self, machine: Machine) -> Sequence[Trial]:
        offered = [p for p in _HINTS if self.probe(machine, Variant(self.name, p)).ok]
        others = [device for device in _core().available_devices if device != "CPU"]
        return [
            *map(_trial, offered),
            *(Trial(device, note="available, but hasten runs OpenVINO on the CPU only") for device in others),
        ]


def _name(place: Any) -> str:
    """Of one output of a node, the same wherever it is met."""
    return f"{place.get_node().get_name()}:{place.get_index()}"


def _keep_wide(file: Path, tensors: frozenset[str]) -> None:
    """Mark what computes or reads these tensors, so that it stays in fp32 however the model is compiled."""
    model = _core().read_model(file)
    kept = {node.get_friendly_name() for node in _touching(model, tensors)}
    tree = ElementTree.parse(file)
    for layer in tree.iter("layer"):
        if layer.get("name") in kept:
            about = layer.find("rt_info")
            if about is None:
                about = ElementTree.Element("rt_info")
                layer.insert(1 if layer.find("data") is not None else 0, about)
            ElementTree.SubElement(about, "attribute", _STAYS_FP32)
    tree.write(file, encoding="utf-8", xml_declaration=True)
    ran = {
        name: str(node.get_rt_info()["runtimePrecision"].value)
        for node in _compile(file, Precision.FP16, threads=1).get_runtime_model().get_ops()
        for name in str(node.get_rt_info()["originalLayersNames"].value).split(",")
    }
    lost = sorted(name for name in kept if ran.get(name) == _HINTS[Precision.FP16])
    if lost:
        raise StageError(
            f"values of {lost[0]} leave the range of fp16, and this OpenVINO does not keep it in fp32",
            hint="pip install -U openvino",
        )


def _touching(model: Any, tensors: frozenset[str]) -> list[Any]:
    """What writes or reads the tensors, with all that OpenVINO made of the same operator: nothing there has a name."""
    found: dict[tuple[str, bool], Any] = {}

    def add(node: Any, *, is_reader: bool) -> None:
        if node.get_type_name() in _NOT_COMPUTED or (node.get_name(), is_reader) in found:
            return
        found[node.get_name(), is_reader] = node
        if is_reader:
            unnamed = [place for place in node.outputs() if not place.get_names()]
            others = [entry.get_node() for place in unnamed for entry in place.get_target_inputs()]
        else:
            others = [place.get_node() for place in node.input_values() if not place.get_names()]
        for other in others:
            add(other, is_reader=is_reader)

    for node in model.get_ordered_ops():
        for place in node.outputs():
            if not tensors.isdisjoint(place.get_names()):
                add(node, is_reader=False)
                for entry in place.get_target_inputs():
                    add(entry.get_node(), is_reader=True)
    return list(found.values())


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


def _is_quantized(model: Any) -> bool:
    """By NNCF, or with pairs of ONNX's own operators."""
    return any(op.get_type_name() == "FakeQuantize" for op in model.get_ops())


def _compile(model: Any, precision: Precision, threads: int) -> Any:
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": _HINTS.get(precision, _IN_BETWEEN),
        "INFERENCE_NUM_THREADS": threads,
    }
    if this_machine().has("neon"):
        model = repaired(_core().read_model(model) if isinstance(model, Path) else model)
    return _core().compile_model(model, "CPU", settings)


class _Session(PaddedSession):
    def __init__(self, artifact: Artifact, options: RunOptions) -> None:
        try:
            compiled = _compile(artifact.path(MODEL), artifact.variant.precision, options.thread_count)
        except RuntimeError as error:
            raise StageError(f"OpenVINO cannot load {artifact.variant}: {_why(error)}") from error
        self._request: Any = compiled.create_infer_request()
        # All names: an input whose cast was optimized away answers to the cast's name too, and that may come first.
        self._feeds = {name for entry in compiled.inputs for name in entry.get_names()}
        # Not an output's own index, which counts the outputs of the node it comes from.
        places = {name: place for place, entry in enumerate(compiled.outputs) for name in entry.get_names()}
        self._places = {spec.name: places[spec.name] for spec in artifact.signature.outputs}
        self.spec = SessionSpec(artifact.signature, Layout.PADDED, CPU, _executed_precision(compiled))

    def close(self) -> None:
        self._request = None

    def run_padded(self, batch: Batch) -> Outputs:
        if self._request is None:
            raise StageError("the session is closed")
        feeds = pad(batch, self.spec.signature)
        try:
            self._request.infer(
                {name: value for name, value in feeds.items() if name in self._feeds}, share_inputs=True
            )
        except RuntimeError as error:
            raise StageError(f"OpenVINO failed on a batch of {len(batch)}: {_why(error)}") from error
        # Copied: the request owns the buffer and the next run overwrites it.
        outputs = {name: self._request.get_output_tensor(place).data.copy() for name, place in self._places.items()}
        return unpad(outputs, batch, self.spec.signature)


def _why(error: RuntimeError) -> str:
    """The last line of its message: those before name the places in its source it came through."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _executed_precision(compiled: Any) -> str:
    """What the matrix products really run in: OpenVINO treats the precision as a hint."""
    found: Counter[str] = Counter()
    for (layer, precision), count in _layers(compiled).items():
        if layer in ("FullyConnected", "MatMul"):
            found[precision] += count
    return found.most_common(1)[0][0] if found else ""


def _layers(compiled: Any) -> Counter[tuple[str, str]]:
    """The layers that the compiled model consists of, with the precision each runs in."""
    names = {hint: precision.value for precision, hint in _HINTS.items()} | dict.fromkeys(_BYTES, Precision.INT8.value)
    found: Counter[tuple[str, str]] = Counter()
    for node in compiled.get_runtime_model().get_ops():
        about = node.get_rt_info()
        precision = str(about["runtimePrecision"].value)
        found[str(about["layerType"].value), names.get(precision, precision)] += 1
    return found


def _executed(compiled: Any) -> tuple[Execution, ...]:
    return tuple(
        Execution(layer, f"CPU {precision}", count)
        for (layer, precision), count in _layers(compiled).most_common()
        if layer not in ("Input", "Output", "Const")
    )


def _trial(precision: Precision) -> Trial:
    import numpy as np

    asked = f"CPU {precision}"
    try:
        compiled = _compile(_core().read_model(probe_graph()), precision, threads=1)
        compiled.create_infer_request().infer({INPUT: np.ones((2, WIDTH), np.float32)})
    except RuntimeError as error:
        return Trial(asked, is_ok=False, note=(str(error).strip() or "RuntimeError").splitlines()[0])
    found = _executed_precision(compiled)
    return Trial(asked, _executed(compiled), found == precision, f"matrix products run in {found}")


BACKEND = OpenVino()
