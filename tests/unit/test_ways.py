"""The words in a variant's name that say how it was quantized."""

from __future__ import annotations

import pytest

from hasten.core.errors import PlanError
from hasten.core.variant import Variant
from hasten.quantize.recipe import Calibrator, Method
from hasten.quantize.ways import (
    calibrator_of,
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
        ("openvino-bf16", Method.NNCF, False),
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
        ("onnxruntime-fp32+smooth", "fp32 is not"),
        ("onnxruntime-int8+minmax+blocks", "more than one method"),
        ("onnxruntime-int4", "four bits"),
    ],
)
def test_words_that_make_no_sense(name: str, what: str) -> None:
    with pytest.raises(PlanError, match=what):
        check_ways(Variant.parse(name))
