"""Static int8: activations are quantized by ranges that were seen in calibration, and that the recipe carries."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from hasten.core.errors import InputError, PlanError, StageError
from hasten.core.tensors import IntArray
from hasten.graph import read_graph, write_graph
from hasten.quantize.calibration import Calibration
from hasten.quantize.dynamic import loses_inputs
from hasten.quantize.recipe import Calibrator, Recipe
from hasten.quantize.silence import silenced
from hasten.quantize.split import kept

_PRODUCTS = ("MatMul", "Gemm")
# Ranges need not be symmetric: unsigned bytes hold what GELU gives, -0.2 to 24, twice as finely so. Entropy gets more
# bins than ONNX Runtime's 128, which leave it nothing to choose among, and fewer than 2048, which take it minutes.
_CALIBRATORS: dict[Calibrator, tuple[str, dict[str, Any]]] = {
    Calibrator.MINMAX: ("MinMaxCalibrater", {}),
    Calibrator.ENTROPY: ("EntropyCalibrater", {"num_bins": 512}),
    Calibrator.PERCENTILE: ("PercentileCalibrater", {"num_bins": 2048, "percentile": 99.999}),
}


def find_ranges(
    graph: Path, calibration: Calibration, calibrator: Calibrator, recipe: Recipe
) -> dict[str, tuple[float, float]]:
    """The range of the input of every product that the recipe quantizes."""
    model = read_graph(graph)
    names = _tell_inputs(model.graph, recipe)
    if not names:
        return {}
    try:
        with tempfile.TemporaryDirectory(prefix="hasten-") as work, silenced():
            collector = _collector(model, names, calibrator, Path(work))
            for feed in calibration.feeds():
                # One at a time: given them all, it would hold every activation of every row before it looks at one.
                collector.collect_data(_One(feed, collector.infer_session))
            found = collector.compute_data() if len(calibration.rows) else None
    except Exception as error:
        raise StageError(f"calibration failed: {error}") from error
    if found is None:
        raise InputError("there are no rows to calibrate on")
    ranges = {name: (data.lowest.item(), data.highest.item()) for name, data in sorted(found.items())}
    lost = [name for name, limits in ranges.items() if not all(map(isfinite, limits))]
    if lost:
        raise StageError(f"calibration failed: {lost[0]} is not finite")
    return ranges


def quantize_static(graph: Path, file: Path, recipe: Recipe, *, external_data: bool) -> None:
    """By the recipe's ranges alone, so that it can be repeated without data."""
    from onnxruntime.quantization import QuantType

    model = read_graph(graph)
    missing = [name for name in _tell_inputs(model.graph, recipe) if name not in recipe.ranges]
    if missing:
        raise PlanError(
            f"the recipe has no range for {missing[0]}, which a product reads", hint="calibrate it on this graph"
        )
    # Each processor has its kernels: signed bytes on Arm, unsigned ones on x86.
    activations = QuantType.QInt8 if recipe.target == "arm64" else QuantType.QUInt8
    try:
        with silenced():
            model = _quantize_products(model, recipe, activations)
            if recipe.attention:
                model = _quantize_attention(model, recipe)
            write_graph(model, file, external_data=external_data)
    except Exception as error:
        raise StageError(f"static quantization failed: {error}") from error


def _quantize_products(model: Any, recipe: Recipe, activations: Any) -> Any:
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
    from onnxruntime.quantization.quant_utils import add_dequant_output_suffix

    products = {node.name for node in _quantized(model.graph, recipe) if node.op_type in _PRODUCTS}
    if not products:
        return model
    quantizer = QDQQuantizer(
        model,
        **_told(recipe),
        activation_qType=activations,
        nodes_to_quantize=sorted(products),
        nodes_to_exclude=[],
        op_types_to_quantize=list(_PRODUCTS),
        # What follows computes in float, so results stay as exact as their sums are.
        extra_options={"OpTypesToExcludeOutputQuantization": list(_PRODUCTS)},
    )
    made = quantizer.quantize_model()
    quantizer.model.topological_sort()
    # It hands the rounded values to all who read the tensor: residuals and products in float get the exact ones back.
    exact = {add_dequant_output_suffix(name): name for name in recipe.ranges}
    for node in made.graph.node:
        if node.name not in products:
            for place, name in enumerate(node.input):
                node.input[place] = exact.get(name, name)
    return made


def _quantize_attention(model: Any, recipe: Recipe) -> Any:
    """There is no pair of QDQ nodes for it: the operator itself takes bytes, and their scale as a constant."""
    import onnx
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.onnx_quantizer import ONNXQuantizer
    from onnxruntime.quantization.quant_utils import QuantizationMode

    quantizer = ONNXQuantizer(
        model,
        **_told(recipe),
        mode=QuantizationMode.IntegerOps,
        static=True,
        activation_qType=QuantType.QUInt8,
        nodes_to_quantize=[],
        nodes_to_exclude=[*kept(recipe), *(node.name for node in model.graph.node if loses_inputs(node))],
        op_types_to_quantize=["Attention"],
        extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
    )
    made = quantizer.quantize_model()
    quantizer.model.topological_sort()
    return made


def _quantized(graph: Any, recipe: Recipe) -> Iterator[Any]:
    """The nodes that are quantized: those with weights. Products of two activations are cheap, and suffer most."""
    weights = {tensor.name for tensor in graph.initializer if len(tensor.dims) == 2}
    kinds = (*_PRODUCTS, "Attention") if recipe.attention else _PRODUCTS
    left_alone = set(kept(recipe))
    for node in graph.node:
        is_weighted = node.op_type in kinds and node.input[1] in weights and node.input[0] not in weights
        if is_weighted and node.name not in left_alone and not loses_inputs(node):
            yield node


def _tell_inputs(graph: Any, recipe: Recipe) -> list[str]:
    """The tensors that are to be quantized, made known as floats: fused operators have no shape inference."""
    from onnx import TensorProto, helper

    names = sorted({node.input[0] for node in _quantized(graph, recipe)})
    known = {entry.name for entry in (*graph.value_info, *graph.input, *graph.output)}
    graph.value_info.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names if name not in known
    )
    return names


def _told(recipe: Recipe) -> dict[str, Any]:
    """What every quantizer is told: weights signed, with a scale for each column, and the ranges of activations."""
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
    kind, options = _CALIBRATORS[calibrator]
    collector = getattr(calibrate, kind)(
        work / "model.onnx", augmented_model_path=str(work / "seen.onnx"), use_external_data_format=True, **options
    )
    # It would look at all that the operators give, too.
    known = {entry.name: entry for entry in collector.model.graph.value_info}
    collector.select_tensors_to_calibrate = lambda _: (names, known)
    collector.augment_graph()
    collector.create_inference_session()
    return collector


class _One:
    """The reader of a single rectangle: what the graph takes of it, and then nothing."""

    def __init__(self, feed: Mapping[str, IntArray], session: Any) -> None:
        taken = {entry.name for entry in session.get_inputs()}
        self._left = [{name: value for name, value in feed.items() if name in taken}]

    def get_next(self) -> dict[str, IntArray] | None:
        return self._left.pop() if self._left else None
