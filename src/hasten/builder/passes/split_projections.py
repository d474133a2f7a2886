"""Split matmuls whose output is cut into parts along its columns into a matmul for each part.

Exact, since columns are independent. It saves the copies of the parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hasten.builder.passes.rewriter import GraphRewriter
from hasten.onnx_graph import attribute


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor that consists of the columns from `start` to `end`."""

    output: str
    start: int
    end: int
    # The shape that its readers expect.
    shape: tuple[int, ...] | None = None


def split_projections(rewriter: GraphRewriter) -> int:
    """Split all such matmuls, and return their number."""
    return sum(_split(rewriter, node) for node in rewriter.graph.node if node.op_type == "MatMul")


def _split(rewriter: GraphRewriter, node: Any) -> bool:
    from onnx import numpy_helper

    weight = rewriter.weight(node.input[1])
    if weight is None or len(weight.dims) != 2 or len(rewriter.readers(node.input[1])) != 1:
        return False
    width = int(weight.dims[1])
    readers = [reader for reader in rewriter.readers(node.output[0]) if reader.op_type != "Shape"]
    find: Callable[..., list[_Part]] | None = {"Reshape": _heads, "Slice": _slices}.get(
        readers[0].op_type if readers else ""
    )
    parts = find(rewriter, node, readers, width) if find is not None else []
    edges = sorted((part.start, part.end) for part in parts)
    if len(parts) < 2 or [0, *(end for _, end in edges)] != [*(start for start, _ in edges), width]:
        return False
    values = numpy_helper.to_array(weight)
    for part in parts:
        name = rewriter.add_weight(values[:, part.start : part.end], f"{weight.name}_{part.start}_{part.end}")
        result = rewriter.add("MatMul", [node.input[0], name])
        if part.shape is not None:
            result = rewriter.add("Reshape", [result, rewriter.add_constant(part.shape)])
        rewriter.replace(part.output, result)
    return True


def _slices(rewriter: GraphRewriter, node: Any, readers: list[Any], width: int) -> list[_Part]:
    """Return the parts if all readers are slices of the last axis."""
    parts = []
    for reader in readers:
        if reader.op_type != "Slice" or len(reader.input) < 4:
            return []
        start, end, axis, *steps = map(rewriter.known_size, reader.input[1:])
        if start is None or end is None or axis not in (-1, 2) or steps not in ([], [1]):
            return []
        parts.append(_Part(reader.output[0], start, min(end, width)))
    return parts


def _heads(rewriter: GraphRewriter, node: Any, readers: list[Any], width: int) -> list[_Part]:
    """Return the parts of queries, keys and values: (rows, tokens, parts, heads, head size), split and squeezed."""
    shape = rewriter.shape(readers[0].output[0])
    split = rewriter.only_reader(readers[0].output[0], "Split")
    if len(readers) != 1 or split is None or shape is None or len(shape) != 5 or attribute(split, "axis", 0) not in (-3, 2):
        return []
    squeezed = [rewriter.only_reader(name, "Squeeze") for name in split.output]
    if None in squeezed or len(squeezed) != shape[2] or None in shape[3:]:
        return []
    if any(rewriter.known_size(entry.input[1]) not in (-3, 2) for entry in squeezed):
        return []
    size = width // len(squeezed)
    tail = (0, 0, int(shape[3] or 0), int(shape[4] or 0))
    return [
        _Part(entry.output[0], index * size, (index + 1) * size, tail) for index, entry in enumerate(squeezed)
    ]
