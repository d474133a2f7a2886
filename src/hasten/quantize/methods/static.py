"""Static int8 quantization: activations are quantized by calibrated ranges, which the recipe stores."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hasten.core.errors import InputError, PlanError, StageError
from hasten.onnx_graph import read_graph, write_graph
from hasten.quantize.analysis.calibration import Calibration
from hasten.quantize.methods.dynamic import loses_inputs
from hasten.quantize.quiet import quiet_logging
from hasten.quantize.recipe import Calibrator, Recipe
from hasten.quantize.rewrites.split import float_nodes

_MATMULS = ("MatMul", "Gemm")
# Ranges need not be symmetric: GELU's outputs, -0.2 to 24, get twice the resolution in unsigned bytes. Entropy gets
# more bins than ONNX Runtime's 128, which leave it no choice, and fewer than 2048, which take minutes.
_CALIBRATORS: dict[Calibrator, tuple[str, dict[str, Any]]] = {
    Calibrator.MINMAX: ("MinMaxCalibrater", {}),
    Calibrator.ENTROPY: ("EntropyCalibrater", {"num_bins": 512}),
    Calibrator.PERCENTILE: ("PercentileCalibrater", {"num_bins": 2048, "percentile": 99.999}),
}


def find_ranges(
    graph: Path, calibration: Calibration, calibrator: Calibrator, recipe: Recipe
) -> dict[str, tuple[float, float]]:
    """Return the range of the input of every matmul that the recipe quantizes."""
    model = read_graph(graph)
    names = _annotate_inputs(model.graph, recipe)
    if not names:
        return {}
    if not len(calibration.rows):
        raise InputError("there are no rows to calibrate on")
    try:
        with tempfile.TemporaryDirectory(prefix="hasten-") as work, quiet_logging():
            collector = _collector(model, names, calibrator, Path(work))
            for feed in calibration.feeds([entry.name for entry in collector.infer_session.get_inputs()]):
                # One batch at a time: otherwise it stores the activations of all batches before it reduces any.
                collector.collect_data(SimpleNamespace(get_next=partial(next, iter([feed]), None)))
            collected = collector.compute_data()
    except Exception as error:
        raise StageError(f"calibration failed: {error}") from error
    ranges = {name: (data.lowest.item(), data.highest.item()) for name, data in sorted(collected.items())}
    not_finite = [name for name, limits in ranges.items() if not all(map(isfinite, limits))]
    if not_finite:
        raise StageError(f"calibration failed: {not_finite[0]} is not finite")
    return ranges


def quantize_static(graph: Path, file: Path, recipe: Recipe, *, external_data: bool) -> None:
    """Quantize the graph by the recipe's ranges alone, so that it can be repeated without data."""
    from onnxruntime.quantization import QuantType

    model = read_graph(graph)
    missing = [name for name in _annotate_inputs(model.graph, recipe) if name not in recipe.ranges]
    if missing:
        raise PlanError(
            f"the recipe has no range for {missing[0]}, the input of a matmul", hint="calibrate it on this graph"
        )
    # ONNX Runtime's kernels take signed activations on Arm, unsigned ones on x86.
    activation_type = QuantType.QInt8 if recipe.target == "arm64" else QuantType.QUInt8
    try:
        with quiet_logging():
            model = _quantize_matmuls(model, recipe, activation_type)
            if recipe.attention:
                model = _quantize_attention(model, recipe)
            write_graph(model, file, external_data=external_data)
    except Exception as error:
        raise StageError(f"static quantization failed: {error}") from error


def _quantize_matmuls(model: Any, recipe: Recipe, activation_type: Any) -> Any:
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
    from onnxruntime.quantization.quant_utils import add_dequant_output_suffix

    matmuls = {node.name for node in _quantized_nodes(model.graph, recipe) if node.op_type in _MATMULS}
    if not matmuls:
        return model
    quantizer = QDQQuantizer(
        model,
        **_common_options(recipe),
        activation_qType=activation_type,
        nodes_to_quantize=sorted(matmuls),
        nodes_to_exclude=[],
        op_types_to_quantize=list(_MATMULS),
        # The operators behind compute in float, so the outputs are not rounded.
        extra_options={"OpTypesToExcludeOutputQuantization": list(_MATMULS)},
    )
    quantized = quantizer.quantize_model()
    quantizer.model.topological_sort()
    # The quantizer passes rounded values to all consumers: residuals and float matmuls get the exact ones back.
    exact = {add_dequant_output_suffix(name): name for name in recipe.ranges}
    for node in quantized.graph.node:
        if node.name not in matmuls:
            for index, name in enumerate(node.input):
                node.input[index] = exact.get(name, name)
    return quantized


def _quantize_attention(model: Any, recipe: Recipe) -> Any:
    """Quantize fused attention, which has no QDQ form: the operator takes bytes, and their scale as a constant."""
    import onnx
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.onnx_quantizer import ONNXQuantizer
    from onnxruntime.quantization.quant_utils import QuantizationMode

    quantizer = ONNXQuantizer(
        model,
        **_common_options(recipe),
        mode=QuantizationMode.IntegerOps,
        static=True,
        activation_qType=QuantType.QUInt8,
        nodes_to_quantize=[],
        nodes_to_exclude=[*float_nodes(recipe), *(node.name for node in model.graph.node if loses_inputs(node))],
        op_types_to_quantize=["Attention"],
        extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
    )
    quantized = quantizer.quantize_model()
    quantizer.model.topological_sort()
    return quantized


def _quantized_nodes(graph: Any, recipe: Recipe) -> Iterator[Any]:
    """Yield the nodes to quantize: those with weights. Matmuls of two activations are cheap, and lose most accuracy."""
    weights = {tensor.name for tensor in graph.initializer if len(tensor.dims) == 2}
    op_types = (*_MATMULS, "Attention") if recipe.attention else _MATMULS
    excluded = set(float_nodes(recipe))
    for node in graph.node:
        has_weights = node.op_type in op_types and node.input[1] in weights and node.input[0] not in weights
        if has_weights and node.name not in excluded and not loses_inputs(node):
            yield node


def _annotate_inputs(graph: Any, recipe: Recipe) -> list[str]:
    """Return the tensors to quantize, after declaring them as floats: fused operators have no shape inference."""
    from onnx import TensorProto, helper

    names = sorted({node.input[0] for node in _quantized_nodes(graph, recipe)})
    known = {entry.name for entry in (*graph.value_info, *graph.input, *graph.output)}
    graph.value_info.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names if name not in known
    )
    return names


def _common_options(recipe: Recipe) -> dict[str, Any]:
    """Return the options of both quantizers: signed weights with a scale per column, and the activation ranges."""
    import numpy as np
    from onnxruntime.quantization import CalibrationMethod, QuantType
    from onnxruntime.quantization.calibrate import TensorsData

    limits = {name: tuple(np.array(limit, np.float32) for limit in pair) for name, pair in recipe.ranges.items()}
    return {
        "per_channel": True,
        "reduce_range": recipe.reduce_range,
        "weight_qType": QuantType.QInt8,
        "tensors_range": TensorsData(CalibrationMethod.MinMax, limits),
    }


def _collector(model: Any, names: list[str], calibrator: Calibrator, work: Path) -> Any:
    import onnx
    from onnxruntime.quantization import calibrate

    onnx.save_model(model, work / "model.onnx", save_as_external_data=True, location="weights")
    class_name, options = _CALIBRATORS[calibrator]
    collector = getattr(calibrate, class_name)(
        work / "model.onnx", augmented_model_path=str(work / "seen.onnx"), use_external_data_format=True, **options
    )
    # By default it also collects the outputs of the operators.
    known = {entry.name: entry for entry in collector.model.graph.value_info}
    collector.select_tensors_to_calibrate = lambda _: (names, known)
    collector.augment_graph()
    collector.create_inference_session()
    return collector
