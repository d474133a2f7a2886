"""A graph of a few operators every transformer has, written without the onnx package: to see who executes it."""

from __future__ import annotations

import struct
from itertools import pairwise

INPUT, OUTPUT = "x", "y"
WIDTH = 16
OPERATORS = ("MatMul", "Add", "LayerNormalization", "Softmax")

# What any runtime we support reads.
_IR_VERSION, _OPSET = 8, 17
_FLOAT = 1


def probe_graph() -> bytes:
    """y = Softmax(LayerNormalization(x · weight + bias)), x of any number of rows, as a serialized ONNX model."""
    places = [INPUT, *(f"{operator}_out" for operator in OPERATORS[:-1]), OUTPUT]
    given = {"MatMul": ("weight",), "Add": ("bias",), "LayerNormalization": ("scale", "bias")}
    nodes = [
        _node(operator, (source, *given.get(operator, ())), target)
        for operator, (source, target) in zip(OPERATORS, pairwise(places), strict=True)
    ]
    # Numbers that differ, so that no runtime folds them away.
    weight = [((7 * index) % 13 - 6) / 13 for index in range(WIDTH * WIDTH)]
    tensors = [
        _tensor("weight", (WIDTH, WIDTH), weight),
        _tensor("bias", (WIDTH,), [index / WIDTH for index in range(WIDTH)]),
        _tensor("scale", (WIDTH,), [1 + index / WIDTH for index in range(WIDTH)]),
    ]
    graph = b"".join(
        [
            *(_bytes(1, node) for node in nodes),
            _text(2, "probe"),
            *(_bytes(5, tensor) for tensor in tensors),
            _bytes(11, _value(INPUT)),
            _bytes(12, _value(OUTPUT)),
        ]
    )
    return _number(1, _IR_VERSION) + _bytes(7, graph) + _bytes(8, _text(1, "") + _number(2, _OPSET))


def _node(operator: str, inputs: tuple[str, ...], output: str) -> bytes:
    return b"".join(
        [*(_text(1, name) for name in inputs), _text(2, output), _text(3, operator.lower()), _text(4, operator)]
    )


def _tensor(name: str, shape: tuple[int, ...], values: list[float]) -> bytes:
    sizes = b"".join(_number(1, size) for size in shape)
    return sizes + _number(2, _FLOAT) + _text(8, name) + _bytes(9, struct.pack(f"<{len(values)}f", *values))


def _value(name: str) -> bytes:
    rows, width = _text(2, "rows"), _number(1, WIDTH)
    shape = _bytes(1, rows) + _bytes(1, width)
    return _text(1, name) + _bytes(2, _bytes(1, _number(1, _FLOAT) + _bytes(2, shape)))


# Protobuf's wire format: a field's number and kind, then a number, or a length and that many bytes.


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
