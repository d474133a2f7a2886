"""Split matmuls whose output is cut into parts along its columns into a matmul for each part.

Exact, since columns are independent. It saves the copies of the parts.
"""

from __future__ import annotations

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
    parts = _heads(rewriter, readers, width) or _slices(rewriter, readers)
    edges = sorted((part.start, part.end) for part in parts)
    # A reader that is no part would need the whole output as well.
    is_cut = len(parts) > 1 and (len(readers) == 1 or len(parts) == len(readers))
    if not is_cut or [0, *(end for _, end in edges)] != [*(start for start, _ in edges), width]:
        return False
    values = numpy_helper.to_array(weight)
    for part in parts:
        name = rewriter.add_weight(values[:, part.start : part.end], f"{weight.name}_{part.start}_{part.end}")
        result = rewriter.add("MatMul", [node.input[0], name], f"{node.output[0]}_{part.start}_{part.end}")
        if part.shape is not None:
            result = rewriter.add("Reshape", [result, rewriter.add_constant(part.shape)])
        rewriter.replace(part.output, result)
    return True


def _slices(rewriter: GraphRewriter, readers: list[Any]) -> list[_Part]:
    """Return the parts if all readers are slices of the last axis."""
    bounds = [rewriter.bounds(reader) for reader in readers]
    return [_Part(reader.output[0], *found) for reader, found in zip(readers, bounds, strict=True) if found is not None]


def _heads(rewriter: GraphRewriter, readers: list[Any], width: int) -> list[_Part]:
    """Return the parts of queries, keys and values: (rows, tokens, parts, heads, head size), split and squeezes."""
    reshaped = readers[0] if len(readers) == 1 and readers[0].op_type == "Reshape" else None
    shape = rewriter.shape(reshaped.output[0]) if reshaped is not None else None
    split = rewriter.only_reader(reshaped.output[0], "Split") if reshaped is not None else None
    if split is None or shape is None or len(shape) != 5 or attribute(split, "axis", 0) not in (-3, 2):
        return []
    squeezes = [rewriter.only_reader(name, "Squeeze") for name in split.output]
    if None in squeezes or len(squeezes) != shape[2] or shape[4] is None:
        return []
    if any(rewriter.known_size(entry.input[1]) not in (-3, 2) for entry in squeezes):
        return []
    size = width // len(squeezes)
    tail = (0, 0, -1, int(shape[4] or 0))
    return [_Part(entry.output[0], index * size, (index + 1) * size, tail) for index, entry in enumerate(squeezes)]
