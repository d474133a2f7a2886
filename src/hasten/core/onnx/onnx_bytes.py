"""Serialize small ONNX models without the onnx package, which bundles do not need to run."""

from __future__ import annotations

import struct
from collections.abc import Sequence

FLOAT, FLOAT16 = 1, 10
# Old enough for every runtime that we support.
_IR_VERSION, _OPSET = 8, 17


def model(name: str, nodes: Sequence[bytes], inputs: Sequence[bytes], outputs: Sequence[bytes],
          tensors: Sequence[bytes] = ()) -> bytes:  # fmt: skip
    """Return a serialized model from messages that the functions below return."""
    graph = b"".join(
        [
            *(_bytes(1, node) for node in nodes),
            _text(2, name),
            *(_bytes(5, tensor) for tensor in tensors),
            *(_bytes(11, value) for value in inputs),
            *(_bytes(12, value) for value in outputs),
        ]
    )
    return _number(1, _IR_VERSION) + _bytes(7, graph) + _bytes(8, _text(1, "") + _number(2, _OPSET))


def node(operator: str, inputs: Sequence[str], output: str) -> bytes:
    """Return the message of an operator with one output and no attributes."""
    return b"".join(
        [*(_text(1, name) for name in inputs), _text(2, output), _text(3, f"{operator}_{output}"), _text(4, operator)]
    )


def tensor(name: str, shape: Sequence[int], values: Sequence[float]) -> bytes:
    """Return the message of an fp32 constant."""
    sizes = b"".join(_number(1, size) for size in shape)
    return sizes + _number(2, FLOAT) + _text(8, name) + _bytes(9, struct.pack(f"<{len(values)}f", *values))


def value(name: str, shape: Sequence[int | str], kind: int = FLOAT) -> bytes:
    """Return the message of an input or output; a dynamic axis is a string."""
    sizes = b"".join(_bytes(1, _text(2, size) if isinstance(size, str) else _number(1, size)) for size in shape)
    return _text(1, name) + _bytes(2, _bytes(1, _number(1, kind) + _bytes(2, sizes)))


# Protobuf's wire format: field number and wire type, then a varint, or a length followed by as many bytes.


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
