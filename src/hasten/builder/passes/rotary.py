"""Fuse rotary embeddings into ONNX Runtime's RotaryEmbedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hasten.builder.passes.rewriter import MICROSOFT, GraphRewriter
from hasten.onnx_graph import attribute

_HEADS_FIRST = [0, 2, 1, 3]


def fuse_rotary(rewriter: GraphRewriter) -> int:
    """Replace all rotary embeddings that rotate halves of a head, and return their number."""
    fuser = _Fuser(rewriter)
    return sum(map(fuser.fuse, [node for node in rewriter.graph.node if node.op_type == "Add"]))


@dataclass(frozen=True, slots=True)
class _Source:
    """Cosines or sines, (1 or rows, tokens, head size), and the angles they are computed from."""

    table: str
    angles: str


class _Fuser:
    def __init__(self, rewriter: GraphRewriter) -> None:
        self._rewriter = rewriter
        # Position ids and first halves, by the names of cosines and sines.
        self._tables: dict[tuple[str, str], tuple[str, str, str]] = {}

    def fuse(self, node: Any) -> bool:
        """Replace a sum, if it is x · cos + rotate_half(x) · sin."""
        straight, rotated = (self._rewriter.producer(name, "Mul") for name in node.input)
        if straight is None or rotated is None:
            return False
        source = straight.input[0]
        shape = self._rewriter.shape(source)
        head_size = shape[3] if shape is not None and len(shape) == 4 else None
        if head_size is None or not self._is_rotated(rotated.input[0], source, head_size):
            return False
        tables = self._read_tables(straight.input[1], rotated.input[1], head_size // 2)
        if tables is None:
            return False
        add, constant = self._rewriter.add, self._rewriter.add_constant
        positions, cosine, sine = tables
        transposed = self._rewriter.producer(source, "Transpose")
        if transposed is None or attribute(transposed, "perm", None) != _HEADS_FIRST:
            result = add("RotaryEmbedding", [source, positions, cosine, sine], domain=MICROSOFT)
        else:
            flat = add("Reshape", [transposed.input[0], constant([0, 0, -1])])
            result = add("RotaryEmbedding", [flat, positions, cosine, sine], domain=MICROSOFT)
            heads = add("Reshape", [result, constant([0, 0, -1, head_size])])
            result = add("Transpose", [heads], perm=_HEADS_FIRST)
        self._rewriter.replace(node.output[0], result)
        return True

    def _is_rotated(self, name: str, source: str, head_size: int) -> bool:
        """Return whether a tensor is the second half of a head, negated, before the first."""
        joined = self._rewriter.producer(name, "Concat")
        if joined is None or len(joined.input) != 2 or attribute(joined, "axis", 0) not in (-1, 3):
            return False
        negated, first = self._rewriter.producer(joined.input[0], "Neg"), joined.input[1]
        if negated is None:
            return False
        halves = self._rewriter.producer(first, "Slice"), self._rewriter.producer(negated.input[0], "Slice")
        if None in halves or any(part.input[0] != source for part in halves):
            return False
        half = head_size // 2
        return [self._rewriter.bounds(part) for part in halves] == [(0, half), (half, head_size)]

    def _read_tables(self, cosine: str, sine: str, half: int) -> tuple[str, str, str] | None:
        """Return position ids, and cosine and sine of the first half of a head by position."""
        sources = [source for pair in ((cosine, "Cos"), (sine, "Sin")) if (source := self._source(*pair)) is not None]
        if len(sources) != 2 or sources[0].angles != sources[1].angles:
            return None
        doubled = self._rewriter.producer(sources[0].angles, "Concat")
        if doubled is None or len(doubled.input) != 2 or len(set(doubled.input)) != 1:
            return None
        tables = sources[0].table, sources[1].table
        shape = self._rewriter.shape(tables[0])
        if shape is None or len(shape) != 3 or shape[2] != 2 * half:
            return None
        if tables not in self._tables:
            halves = [self._first_half(name, half) for name in tables]
            self._tables[tables] = (self._count_positions(tables[0]), halves[0], halves[1])
        return self._tables[tables]

    def _source(self, name: str, op_type: str) -> _Source | None:
        """Return the tensor of cosines or sines before an axis for heads is added, and the angles."""
        expanded = self._rewriter.producer(name, "Unsqueeze")
        if expanded is None or self._rewriter.known_size(expanded.input[1]) != 1:
            return None
        node = self._rewriter.producer(expanded.input[0], "Mul", op_type)
        if node is not None and node.op_type == "Mul" and self._rewriter.scalar(node.input[1]) is not None:
            node = self._rewriter.producer(node.input[0], op_type)
        return _Source(expanded.input[0], node.input[0]) if node is not None and node.op_type == op_type else None

    def _first_half(self, name: str, half: int) -> str:
        add, constant = self._rewriter.add, self._rewriter.add_constant
        first = add("Slice", [name, constant([0]), constant([half]), constant([2])])
        return add("Reshape", [first, constant([-1, half])])

    def _count_positions(self, table: str) -> str:
        """Return the index into the tables of each token: they have one row of positions, or one for each text."""
        add, constant = self._rewriter.add, self._rewriter.add_constant
        shape = add("Shape", [table], start=0, end=2)
        size = add("ReduceProd", [shape], keepdims=0)
        positions = add("Reshape", [add("Range", [constant(0), size, constant(1)]), shape])
        rows = add("Shape", [self._rewriter.graph.input[0].name], start=0, end=1)
        return add("Expand", [positions, add("Concat", [rows, constant([1])], axis=0)])
