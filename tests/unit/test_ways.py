"""The words in a variant's name that say how it was quantized."""

from __future__ import annotations

import pytest

from hasten.core.errors import PlanError
from hasten.core.variant import Variant
from hasten.quantize.recipe import Calibrator, Method, Recipe
from hasten.quantize.ways import (
    calibrator_of,
    check_recipe,
    check_ways,
    kept_products,
    method_of,
    needs_calibration,
    with_kept,
    without_kept,
)


@pytest.mark.parametrize(
    ("name", "method", "needs_rows"),
    [
        ("onnxruntime-fp32", Method.DYNAMIC, False),
        ("onnxruntime-int8", Method.DYNAMIC, False),
        ("onnxruntime-int8+attention+gelu", Method.DYNAMIC, False),
        ("onnxruntime-int8+attention+smooth", Method.DYNAMIC, True),
        ("onnxruntime-int8+keep3", Method.DYNAMIC, True),
        ("onnxruntime-int8+percentile", Method.STATIC, True),
        ("onnxruntime-int4+blocks", Method.BLOCKS, False),
        ("openvino-int8", Method.NNCF, True),
        ("openvino-int8+keep2", Method.NNCF, True),
        ("openvino-bf16", Method.NNCF, False),
        ("fused-fp16+gelu@cuda", Method.DYNAMIC, False),
        ("fused-fp8@cuda", Method.DYNAMIC, True),
        ("fused-fp8+gelu+keep3@cuda", Method.DYNAMIC, True),
    ],
)
def test_what_a_name_means(name: str, method: Method, needs_rows: bool) -> None:
    variant = Variant.parse(name)
    check_ways(variant)
    assert variant.name == name
    assert needs_calibration(variant) is needs_rows
    if variant.precision in ("int8", "int4"):
        assert method_of(variant) is method


def test_products_left_in_float() -> None:
    variant = Variant.parse("onnxruntime-int8+attention")
    assert (kept_products(variant), with_kept(variant, 4).name) == (0, "onnxruntime-int8+attention+keep4")
    assert kept_products(with_kept(variant, 12)) == 12
    assert with_kept(with_kept(variant, 4), 2).name == "onnxruntime-int8+attention+keep2"
    assert without_kept(with_kept(variant, 4)) == variant
    assert calibrator_of(Variant.parse("onnxruntime-int8+entropy")) is Calibrator.ENTROPY


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("onnxruntime-int8+smoth", "did you mean 'smooth'"),
        ("onnxruntime-int8+keep0", "nobody knows"),
        ("fused-fp8+smooth@cuda", "smooth is nothing that fused can do"),
        ("fused-fp16+keep2@cuda", "fp16 is not quantized"),
        ("onnxruntime-fp32+smooth", "fp32 is not"),
        ("onnxruntime-int8+minmax+blocks", "more than one method"),
        ("onnxruntime-int4", "four bits"),
        ("onnxruntime-int8+smooth+split+smooth", "says smooth twice"),
        ("onnxruntime-int8+keep2+keep3", "says keepN twice"),
        ("openvino-int8+smooth", "smooth is nothing that NNCF"),
        ("openvino-int8+minmax", "minmax is nothing that NNCF"),
        ("onnxruntime-int8+qdq+gelu", "quantizers in a module make onnxruntime-int8\\+qdq, fused"),
        ("openvino-int8+qdq", "and nothing else"),
        ("tensorrt-int8+qdq", "and nothing else"),
        ("tensorrt-int8+qdq+keep2@cuda", "and nothing else"),
        ("tensorrt-fp16+qdq@cuda", "and nothing else"),
        ("tensorrt-fp8+qdq@cuda", "and nothing else"),
        ("fused-fp16+qdq@cuda", "and nothing else"),
        ("fused-int8+gelu+qdq@cuda", "and nothing else"),
        ("fused-int8+smooth@cuda", "smooth is nothing that fused can do"),
        ("onnxruntime-fp32+qdq", "and nothing else"),
        ("onnxruntime-int8+attention+blocks", "attention is nothing that quantizing weights in blocks"),
    ],
)
def test_words_that_make_no_sense(name: str, what: str) -> None:
    with pytest.raises(PlanError, match=what):
        check_ways(Variant.parse(name))


@pytest.mark.parametrize("name", ["onnxruntime-int4", "onnxruntime-int4+minmax"])
def test_what_is_hinted_at_can_be_asked_for(name: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_ways(Variant.parse(name))
    check_ways(Variant.parse(caught.value.hint or ""))


@pytest.mark.parametrize(
    ("recipe", "what"),
    [
        (Recipe(variant="onnxruntime-fp32", method=Method.DYNAMIC, target="amx"), "which is not quantized"),
        (Recipe(variant="fused-fp8@cuda", method=Method.DYNAMIC, target="amx"), "which is made without one"),
        (Recipe(variant="onnxruntime-int8+qdq", method=Method.STATIC, target="amx"), "which is made without one"),
        (Recipe(variant="tensorrt-int8+qdq@cuda", method=Method.STATIC, target="amx"), "which is made without one"),
        (Recipe(variant="onnxruntime-int8", method=Method.NNCF, target="amx"), "method is nncf, and .* by dynamic"),
        (Recipe(variant="onnxruntime-int8", method=Method.DYNAMIC, target="avx"), "nobody knows, 'avx'"),
        (Recipe(variant="onnxruntime-int8+smoth", method=Method.DYNAMIC, target="amx"), "did you mean 'smooth'"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused(recipe: Recipe, what: str) -> None:
    with pytest.raises(PlanError, match=what):
        check_recipe(recipe)
