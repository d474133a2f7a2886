"""A graph of a few operators every transformer has, written without the onnx package: to see who executes it."""

from __future__ import annotations

from itertools import pairwise

from hasten.core import onnx_wire

INPUT, OUTPUT = "x", "y"
WIDTH = 16
OPERATORS = ("MatMul", "Add", "LayerNormalization", "Softmax")


def probe_graph() -> bytes:
    """y = Softmax(LayerNormalization(x · weight + bias)), x of any number of rows, as a serialized ONNX model."""
    places = [INPUT, *(f"{operator}_out" for operator in OPERATORS[:-1]), OUTPUT]
    given = {"MatMul": ("weight",), "Add": ("bias",), "LayerNormalization": ("scale", "bias")}
    nodes = [
        onnx_wire.node(operator, (source, *given.get(operator, ())), target)
        for operator, (source, target) in zip(OPERATORS, pairwise(places), strict=True)
    ]
    # Numbers that differ, so that no runtime folds them away.
    weight = [((7 * index) % 13 - 6) / 13 for index in range(WIDTH * WIDTH)]
    tensors = [
        onnx_wire.tensor("weight", (WIDTH, WIDTH), weight),
        onnx_wire.tensor("bias", (WIDTH,), [index / WIDTH for index in range(WIDTH)]),
        onnx_wire.tensor("scale", (WIDTH,), [1 + index / WIDTH for index in range(WIDTH)]),
    ]
    ends = [[onnx_wire.value(name, ("rows", WIDTH))] for name in (INPUT, OUTPUT)]
    return onnx_wire.model("probe", nodes, ends[0], ends[1], tensors)
