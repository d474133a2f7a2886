"""Fuse rotary embeddings and attention for ONNX Runtime on CPUs, and compute sliding windows as windows.

Rotary embeddings become RotaryEmbedding, attention becomes MultiHeadAttention, and a packed projection becomes a matmul
for each part. Memory is linear in the length: for layers that attend to all keys, the kernel computes softmax block by
block; layers with a window compute blocks of queries with the keys around them. docs/decisions/windowed-attention.md
compares the forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hasten.builder.passes.attention_masks import MASK_INPUT, Window, recognize
from hasten.builder.passes.prune import infer_shapes
from hasten.builder.passes.rewriter import MICROSOFT, GraphRewriter
from hasten.builder.passes.rotary import fuse_rotary
from hasten.builder.passes.split_projections import split_projections
from hasten.onnx_graph import attribute, copy_graph, has_external_data, read_graph, write_graph

# Queries of a block of windowed attention.
_BLOCK = 128
# What masked keys add to their scores: exp() of it is zero.
_MASKED = -1e9
_HEADS_FIRST = [0, 2, 1, 3]
_ALL_KEYS = Window(None, None)


@dataclass(frozen=True, slots=True)
class Attending:
    """The number of fused parts."""

    projections: int = 0
    rotary: int = 0
    attention: int = 0
    windows: int = 0

    def notes(self) -> tuple[str, ...]:
        """Return the lines for the report."""
        if not self.projections + self.rotary + self.attention:
            return ()
        return (
            f"attention fused in {self.attention} layers, in {self.windows} of them within a window; "
            f"{self.rotary} rotary embeddings fused, {self.projections} packed projections split",
        )


def attend(graph: Path, file: Path, *, plain: Path) -> Attending:
    """Write the graph with fused attention; copy a graph without rotary embeddings or with subgraphs.

    Shapes are inferred from the `plain` graph it was fused from.
    """
    nodes = read_graph(graph, with_weights=False).graph.node
    # Subgraphs may read any tensor without listing it as an input.
    has_subgraphs = any(entry.HasField("g") or entry.graphs for node in nodes for entry in node.attribute)
    if has_subgraphs or not any(node.op_type == "Cos" for node in nodes):
        copy_graph(graph, file)
        return Attending()
    shapes = infer_shapes(read_graph(plain, with_weights=False))
    model = read_graph(graph)
    rewriter = GraphRewriter(model, shapes)
    rotary_count = fuse_rotary(rewriter)
    cores = [core for node in rewriter.graph.node if (core := _match(rewriter, node)) is not None]
    masks = recognize(rewriter, model, sorted({core.mask for core in cores}))
    writer = _AttentionWriter(rewriter)
    windows = [masks[core.mask] for core in cores if core.mask in masks and writer.write(core, masks[core.mask])]
    result = Attending(
        projections=split_projections(rewriter),
        rotary=rotary_count,
        attention=len(windows),
        windows=len(windows) - windows.count(_ALL_KEYS),
    )
    if not result.notes():
        copy_graph(graph, file)
        return result
    rewriter.finish()
    write_graph(model, file, external_data=has_external_data(graph))
    return result


@dataclass(frozen=True, slots=True)
class _Core:
    """The attention of a layer between its projections; tensors have the shape (rows, heads, tokens, head size)."""

    query: str
    key: str
    value: str
    mask: str
    scale: float
    heads: int
    head_size: int
    # (rows, tokens, heads, head size)
    output: str


def _match(rewriter: GraphRewriter, softmax: Any) -> _Core | None:
    """Return the attention around a softmax: scale and mask are applied to the scores."""
    masked = rewriter.producer(softmax.input[0], "Add") if softmax.op_type == "Softmax" else None
    if masked is None or attribute(softmax, "axis", -1) not in (-1, 3):
        return None
    scaled = rewriter.producer(masked.input[0], "Mul", "Div", "MatMul")
    scale = 1.0
    if scaled is not None and scaled.op_type != "MatMul":
        factor = rewriter.scalar(scaled.input[1])
        if not factor:
            return None
        scale = factor if scaled.op_type == "Mul" else 1 / factor
        scaled = rewriter.producer(scaled.input[0], "MatMul")
    transposed = rewriter.producer(scaled.input[1], "Transpose") if scaled is not None else None
    if scaled is None or transposed is None or attribute(transposed, "perm", None) != [0, 1, 3, 2]:
        return None
    product = rewriter.only_reader(softmax.output[0], "MatMul")
    if product is None or product.input[0] != softmax.output[0]:
        return None
    merged = rewriter.only_reader(product.output[0], "Transpose")
    if merged is None or attribute(merged, "perm", None) != _HEADS_FIRST:
        return None
    query, key, value = scaled.input[0], transposed.input[0], product.input[1]
    shapes = [rewriter.shape(name) for name in (query, key, value)]
    sizes = {(shape[1], shape[3]) for shape in shapes if shape is not None and len(shape) == 4}
    if len(sizes) != 1 or None in shapes:
        return None
    heads, head_size = sizes.pop()
    if heads is None or head_size is None:
        return None
    return _Core(query, key, value, masked.input[1], scale, heads, head_size, merged.output[0])


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Tensors that all layers with the same window share."""

    # Positions of the queries and keys of each block.
    queries: str
    keys: str
    mask: str


class _AttentionWriter:
    def __init__(self, rewriter: GraphRewriter) -> None:
        self._rewriter = rewriter
        self._blocks: dict[Window, _Blocks] = {}
        self._key_masks: dict[int, str] = {}

    def write(self, core: _Core, window: Window) -> bool:
        """Replace the attention of a layer; return False if there is no form for its window."""
        add = self._rewriter.add
        if window == _ALL_KEYS:
            merged = self._attend_to_all(core)
        elif window.before is not None and window.after is not None:
            merged = self._attend_within(core, window.before, window.after)
        else:
            return False
        shape = self._rewriter.add_constant([0, 0, core.heads, core.head_size])
        self._rewriter.replace(core.output, add("Reshape", [merged, shape]))
        return True

    def _attend_to_all(self, core: _Core) -> str:
        """Add the mask by one more channel of queries (one) and keys (the mask).

        With a mask as an input, the kernel stores the scores of all pairs; without, it computes softmax block by block.
        """
        add, constant = self._rewriter.add, self._rewriter.add_constant
        query, key = self._tokens_first(core.query), self._tokens_first(core.key)
        one_channel = constant([0, 0, 0, 0, 0, 0, 0, 1])
        query = add("Pad", [query, one_channel, constant(1, np.float32)])
        key = add("Concat", [key, self._key_mask(core.heads)], axis=3)
        inputs = [add("Reshape", [name, constant([0, 0, -1])]) for name in (query, key)]
        inputs.append(self._merged(core.value))
        options: dict[str, Any] = {"num_heads": core.heads, "scale": core.scale}
        return add("MultiHeadAttention", inputs, domain=MICROSOFT, **options)

    def _attend_within(self, core: _Core, before: int, after: int) -> str:
        """Attend in blocks of queries to the keys of a block and those within the window around it."""
        add, constant = self._rewriter.add, self._rewriter.add_constant
        window = Window(before, after)
        if window not in self._blocks:
            self._blocks[window] = self._make_blocks(before, after)
        blocks = self._blocks[window]
        width = core.heads * core.head_size
        parts = []
        for name, positions in ((core.query, blocks.queries), (core.key, blocks.keys), (core.value, blocks.keys)):
            gathered = add("Gather", [self._merged(name), positions], axis=1)
            size = add("Shape", [positions], start=1, end=2)
            shape = add("Concat", [constant([-1]), size, constant([width])], axis=0)
            parts.append(add("Reshape", [gathered, shape]))
        options: dict[str, Any] = {"num_heads": core.heads, "scale": core.scale}
        result = add("MultiHeadAttention", [*parts, "", "", blocks.mask], domain=MICROSOFT, **options)
        shape = add("Concat", [self._rows, constant([-1, width])], axis=0)
        return add("Slice", [add("Reshape", [result, shape]), constant([0]), self._tokens, constant([1])])

    def _make_blocks(self, before: int, after: int) -> _Blocks:
        """Compute positions and mask; texts that are no longer than the keys of a block are one block."""
        add, constant = self._rewriter.add, self._rewriter.add_constant
        zero, one = constant(0), constant(1)
        length = add("Squeeze", [self._tokens])
        is_short = add("LessOrEqual", [length, constant(_BLOCK + before + after)])
        block = add("Where", [is_short, length, constant(_BLOCK)])
        key_count = add("Where", [is_short, length, constant(_BLOCK + before + after)])
        offset = add("Where", [is_short, zero, constant(before)])
        count = add("Div", [add("Sub", [add("Add", [length, block]), one]), block])
        starts = add("Unsqueeze", [add("Mul", [add("Range", [zero, count, one]), block]), constant([1])])
        queries = add("Add", [starts, add("Range", [zero, block, one])])
        keys = add("Add", [add("Sub", [starts, offset]), add("Range", [zero, key_count, one])])
        last = add("Sub", [length, one])
        inside = add("And", [add("GreaterOrEqual", [keys, zero]), add("LessOrEqual", [keys, last])])
        queries_read = add("Min", [queries, last])
        keys_read = add("Max", [add("Min", [keys, last]), zero])
        is_real = add("And", [add("Gather", [self._is_real, keys_read], axis=1), inside])
        distance = add("Sub", [add("Unsqueeze", [keys, constant([1])]), add("Unsqueeze", [queries, constant([2])])])
        is_near = add(
            "And",
            [add("GreaterOrEqual", [distance, constant(-before)]), add("LessOrEqual", [distance, constant(after)])],
        )
        visible = add("And", [add("Unsqueeze", [is_real, constant([2])]), is_near])
        mask = add("Where", [visible, constant(0, np.float32), constant(_MASKED, np.float32)])
        sizes = [
            constant([-1, 1]),
            add("Unsqueeze", [block, constant([0])]),
            add("Unsqueeze", [key_count, constant([0])]),
        ]
        return _Blocks(queries_read, keys_read, add("Reshape", [mask, add("Concat", sizes, axis=0)]))

    def _key_mask(self, heads: int) -> str:
        """Return what each key adds to its scores, as one channel: (rows, tokens, heads, 1)."""
        if heads not in self._key_masks:
            add, constant = self._rewriter.add, self._rewriter.add_constant
            mask = add("Where", [self._is_real, constant(0, np.float32), constant(_MASKED, np.float32)])
            channel = add("Unsqueeze", [mask, constant([2, 3])])
            self._key_masks[heads] = add("Expand", [channel, constant([1, 1, heads, 1])])
        return self._key_masks[heads]

    @cached_property
    def _rows(self) -> str:
        return self._rewriter.add("Shape", [MASK_INPUT], start=0, end=1)

    @cached_property
    def _tokens(self) -> str:
        return self._rewriter.add("Shape", [MASK_INPUT], start=1, end=2)

    @cached_property
    def _is_real(self) -> str:
        from onnx import TensorProto

        return self._rewriter.add("Cast", [MASK_INPUT], to=TensorProto.BOOL)

    def _tokens_first(self, name: str) -> str:
        """Return a tensor with its tokens before its heads."""
        node = self._rewriter.producer(name, "Transpose")
        if node is not None and attribute(node, "perm", None) == _HEADS_FIRST:
            return str(node.input[0])
        return self._rewriter.add("Transpose", [name], perm=_HEADS_FIRST)

    def _merged(self, name: str) -> str:
        """Return a tensor with its heads side by side: (rows, tokens, heads × head size)."""
        return self._rewriter.add("Reshape", [self._tokens_first(name), self._rewriter.add_constant([0, 0, -1])])
