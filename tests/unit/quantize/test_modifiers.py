"""The modifiers in a variant's name."""

from __future__ import annotations

import pytest

from hasten.core.errors import PlanError
from hasten.core.variant import Variant
from hasten.quantize.modifiers import (
    calibrator_of,
    check_modifiers,
    check_recipe,
    kept_matmuls,
    method_of,
    needs_calibration,
    with_kept,
    without_kept,
)
from hasten.quantize.recipe import Calibrator, Method, Recipe


@pytest.mark.parametrize(
    ("name", "method", "needs_rows"),
    [
        ("onnxruntime-fp32", Method.DYNAMIC, False),
        ("onnxruntime-int8", Method.DYNAMIC, False),
        ("onnxruntime-int8+attention+tanhgelu", Method.DYNAMIC, False),
        ("onnxruntime-int8+attention+smooth", Method.DYNAMIC, True),
        ("onnxruntime-int8+keep3", Method.DYNAMIC, True),
        ("onnxruntime-int8+percentile", Method.STATIC, True),
        ("onnxruntime-int4+blocks", Method.BLOCKS, False),
        ("openvino-int8", Method.NNCF, True),
        ("openvino-int8+keep2", Method.NNCF, True),
        ("openvino-int8+dynamic", Method.WEIGHTS, False),
        ("openvino-int8+dynamic+keep2", Method.WEIGHTS, True),
        ("openvino-bf16", Method.NNCF, False),
        ("fused-fp16+tanhgelu@cuda", Method.DYNAMIC, False),
        ("fused-fp8@cuda", Method.DYNAMIC, True),
        ("fused-fp8+tanhgelu+keep3@cuda", Method.DYNAMIC, True),
    ],
)
def test_modifiers_determine_method_and_calibration(name: str, method: Method, needs_rows: bool) -> None:
    variant = Variant.parse(name)
    check_modifiers(variant)
    assert variant.name == name
    assert needs_calibration(variant) is needs_rows
    if variant.precision in ("int8", "int4"):
        assert method_of(variant) is method


def test_kept_matmuls_are_read_from_and_written_to_names() -> None:
    variant = Variant.parse("onnxruntime-int8+attention")
    assert (kept_matmuls(variant), with_kept(variant, 4).name) == (0, "onnxruntime-int8+attention+keep4")
    assert kept_matmuls(with_kept(variant, 12)) == 12
    assert with_kept(with_kept(variant, 4), 2).name == "onnxruntime-int8+attention+keep2"
    assert without_kept(with_kept(variant, 4)) == variant
    assert calibrator_of(Variant.parse("onnxruntime-int8+entropy")) is Calibrator.ENTROPY


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("onnxruntime-int8+smoth", "did you mean 'smooth'"),
        ("onnxruntime-int8+keep0", "unknown modifier"),
        ("fused-fp8+smooth@cuda", "smooth is not supported by fused"),
        ("fused-fp16+keep2@cuda", "fp16 is not quantized"),
        ("onnxruntime-fp32+smooth", "fp32 is not"),
        ("onnxruntime-int8+minmax+blocks", "more than one method"),
        ("onnxruntime-int4", "int4 is supported only with block-wise"),
        ("onnxruntime-int8+smooth+split+smooth", "repeats the modifier smooth"),
        ("onnxruntime-int8+keep2+keep3", "repeats the modifier keepN"),
        ("openvino-int8+smooth", "smooth is not supported by NNCF"),
        ("openvino-int8+dynamic+smooth", "smooth is not supported by OpenVINO's dynamic quantization"),
        ("onnxruntime-int8+dynamic", "dynamic is not supported by ONNX Runtime"),
        ("openvino-int8+minmax", "minmax is not supported by NNCF"),
        ("onnxruntime-int8+qdq+tanhgelu", r"\+qdq exists only as onnxruntime-int8\+qdq, fused"),
        ("openvino-int8+qdq", r"\+qdq exists only as"),
        ("tensorrt-int8+qdq", r"\+qdq exists only as"),
        ("tensorrt-int8+qdq+keep2@cuda", r"\+qdq exists only as"),
        ("tensorrt-fp16+qdq@cuda", r"\+qdq exists only as"),
        ("tensorrt-fp8+qdq@cuda", r"\+qdq exists only as"),
        ("fused-fp16+qdq@cuda", r"\+qdq exists only as"),
        ("fused-int8+tanhgelu+qdq@cuda", r"\+qdq exists only as"),
        ("fused-int8+smooth@cuda", "smooth is not supported by fused"),
        ("onnxruntime-fp32+qdq", r"\+qdq exists only as"),
        ("onnxruntime-int8+attention+blocks", "attention is not supported by block-wise quantization"),
    ],
)
def test_unsupported_modifiers_are_rejected(name: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_modifiers(Variant.parse(name))


@pytest.mark.parametrize("name", ["onnxruntime-int4", "onnxruntime-int4+minmax"])
def test_hint_is_a_valid_variant(name: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_modifiers(Variant.parse(name))
    check_modifiers(Variant.parse(caught.value.hint or ""))


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe(variant="onnxruntime-fp32", method=Method.DYNAMIC, target="amx"), "which is not quantized"),
        (Recipe(variant="fused-fp8@cuda", method=Method.DYNAMIC, target="amx"), "which does not take a recipe"),
        (Recipe(variant="onnxruntime-int8+qdq", method=Method.STATIC, target="amx"), "which does not take a recipe"),
        (Recipe(variant="tensorrt-int8+qdq@cuda", method=Method.STATIC, target="amx"), "which does not take a recipe"),
        (Recipe(variant="onnxruntime-int8", method=Method.NNCF, target="amx"), "method is nncf, but .* is dynamic"),
        (Recipe(variant="onnxruntime-int8", method=Method.DYNAMIC, target="avx"), "unknown target 'avx'"),
        (Recipe(variant="onnxruntime-int8+smoth", method=Method.DYNAMIC, target="amx"), "did you mean 'smooth'"),
    ],
)
def test_contradictory_recipe_is_rejected(recipe: Recipe, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_recipe(recipe)
