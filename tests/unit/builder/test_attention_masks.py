"""Attention masks are recognized by their values, and no others are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from hasten.builder.passes.attention_masks import Window, recognize
from hasten.builder.passes.rewriter import GraphRewriter

MASK = "mask"


def graph_with_mask(condition: list[Any], constants: dict[str, Any]) -> Any:
    """Return a graph whose mask hides padding and the pairs for which `condition` of their distance is false."""
    nodes = [
        helper.make_node("Shape", ["attention_mask"], ["length"], start=1, end=2),
        helper.make_node("Squeeze", ["length"], ["count"]),
        helper.make_node("Range", ["zero", "count", "one"], ["positions"]),
        helper.make_node("Unsqueeze", ["positions", "axis_1"], ["queries"]),
        helper.make_node("Sub", ["positions", "queries"], ["distance"]),
        *condition,
        helper.make_node("Cast", ["attention_mask"], ["real"], to=TensorProto.BOOL),
        helper.make_node("Unsqueeze", ["real", "axes_12"], ["real_keys"]),
        helper.make_node("And", ["real_keys", "near"], ["visible"]),
        helper.make_node("Where", ["visible", "nothing", "lowest"], [MASK]),
    ]
    values = {"zero": 0, "one": 1, "axis_1": [1], "axes_12": [1, 2], **constants}
    weights = [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in values.items()]
    floats = {"nothing": 0, "lowest": np.finfo(np.float32).min}
    weights += [numpy_helper.from_array(np.array(value, np.float32), name) for name, value in floats.items()]
    ids = helper.make_tensor_value_info("attention_mask", TensorProto.INT32, ["batch", "sequence"])
    output = helper.make_tensor_value_info(MASK, TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "masks", [ids], [output], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def recognized(condition: list[Any], constants: dict[str, Any]) -> Window | None:
    model = graph_with_mask(condition, constants)
    return recognize(GraphRewriter(model, {}), model, [MASK]).get(MASK)


def near(before: int, after: int) -> tuple[list[Any], dict[str, Any]]:
    condition = [
        helper.make_node("GreaterOrEqual", ["distance", "first"], ["not_before"]),
        helper.make_node("LessOrEqual", ["distance", "last"], ["not_after"]),
        helper.make_node("And", ["not_before", "not_after"], ["near"]),
    ]
    return condition, {"first": -before, "last": after}


@pytest.mark.parametrize(("before", "after"), [(64, 64), (1, 1), (7, 0), (0, 30), (2, 65)])
def test_windows_are_recognized(before: int, after: int) -> None:
    assert recognized(*near(before, after)) == Window(before, after)


def test_causal_mask_is_unbounded_before_the_query() -> None:
    assert recognized([helper.make_node("LessOrEqual", ["distance", "zero"], ["near"])], {}) == Window(None, 0)


def test_padding_mask_is_unbounded() -> None:
    assert recognized([helper.make_node("Equal", ["distance", "distance"], ["near"])], {}) == Window(None, None)


@pytest.mark.parametrize(
    "operators",
    [
        # Every other key; all but the query itself; a block of absolute positions.
        ["Mod distance two -> rest", "Equal rest zero -> near"],
        ["Equal distance zero -> itself", "Not itself -> near"],
        ["LessOrEqual positions two -> near"],
    ],
)
def test_other_masks_are_not_recognized(operators: list[str]) -> None:
    condition = []
    for line in operators:
        (op_type, *inputs), (output,) = (part.split() for part in line.split("->"))
        condition.append(helper.make_node(op_type, inputs, [output]))
    assert recognized(condition, {"two": 2}) is None


def test_mask_with_a_relative_bias_is_not_recognized() -> None:
    condition, constants = near(2, 2)
    model = graph_with_mask(condition, constants)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((600, 1), np.float32), "table"))
    model.graph.node.extend(
        [
            helper.make_node("Gather", ["table", "positions"], ["bias"]),
            helper.make_node("Add", [MASK, "bias"], ["biased"]),
        ]
    )
    assert set(recognize(GraphRewriter(model, {}), model, [MASK, "biased"])) == {MASK}


def test_wide_window_is_not_recognized() -> None:
    """Running its mask would take gigabytes."""
    assert recognized(*near(4096, 4096)) is None
