"""A graph of a few operators that every transformer has, to see which execution provider runs them."""

from __future__ import annotations

from itertools import pairwise

from hasten.core.onnx import onnx_bytes

INPUT, OUTPUT = "x", "y"
WIDTH = 16
OPERATORS = ("MatMul", "Add", "LayerNormalization", "Softmax")


def probe_graph() -> bytes:
    """Return y = Softmax(LayerNormalization(x · weight + bias)) with dynamic rows, as a serialized ONNX model."""
    names = [INPUT, *(f"{operator}_out" for operator in OPERATORS[:-1]), OUTPUT]
    constants = {"MatMul": ("weight",), "Add": ("bias",), "LayerNormalization": ("scale", "bias")}
    nodes = [
        onnx_bytes.node(operator, (source, *constants.get(operator, ())), target)
        for operator, (source, target) in zip(OPERATORS, pairwise(names), strict=True)
    ]
    # Different numbers, so that no runtime folds them away.
    weight = [((7 * index) % 13 - 6) / 13 for index in range(WIDTH * WIDTH)]
    tensors = [
        onnx_bytes.tensor("weight", (WIDTH, WIDTH), weight),
        onnx_bytes.tensor("bias", (WIDTH,), [index / WIDTH for index in range(WIDTH)]),
        onnx_bytes.tensor("scale", (WIDTH,), [1 + index / WIDTH for index in range(WIDTH)]),
    ]
    inputs, outputs = ([onnx_bytes.value(name, ("rows", WIDTH))] for name in (INPUT, OUTPUT))
    return onnx_bytes.model("probe", nodes, inputs, outputs, tensors)
