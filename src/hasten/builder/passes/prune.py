"""Lossless pruning: if the head reads one token, compute the last layer for that token only.

The graph shows it: somewhere it selects one row of a tensor (`hidden[:, 0]`). The selection propagates upstream through
every operator that treats rows independently (matmuls, norms, activations, residuals, the queries of an attention), and
stops where all rows are needed: keys and values, and everything before them. The operators in between then compute one
row instead of all. Nothing is approximated, and the pass does not depend on the architecture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from hasten.builder.passes.axes import AxisShape, NodeCall, map_axis
from hasten.core.tensors import IntArray
from hasten.onnx_graph import attribute, copy_graph, has_external_data, opset_version, read_graph, write_graph

# Sizes for shape inference: primes that divide no width of a model, so that axes can be distinguished.
ROWS, TOKENS = 1013, 1009
# A larger constant is a weight: shape inference needs its size, not its values.
_MAX_CONSTANT_SIZE = 64
_SLICE_END = 2**63 - 1
# Heads read the first token or the last; both exist even if the axis has size one.
_SELECTABLE_POSITIONS = (0, -1)
# Before it, operators take their axes as attributes, and a softmax covers all axes from its own on.
_MIN_OPSET = 13


@dataclass(frozen=True, slots=True)
class _Selection:
    """One position of an axis, which is all that is needed of a tensor."""

    axis: int
    position: int


@dataclass(frozen=True, slots=True)
class Pruning:
    """The number of operators that compute one row instead of all, by name."""

    operators: Mapping[str, int]
    # Why the graph was not searched.
    reason: str = ""

    @property
    def matmuls(self) -> int:
        """Return the number of matmuls on one row."""
        return self.operators.get("MatMul", 0) + self.operators.get("Gemm", 0)

    def notes(self) -> tuple[str, ...]:
        """Return the lines for the report."""
        if not self.matmuls:
            return (self.reason or "not pruned: the head reads more than the first or the last token",)
        return (f"last layer pruned to the token that the head reads: {self.matmuls} matmuls on one row",)


def prune(graph: Path, file: Path, *, plain: Path | None = None) -> Pruning:
    """Write the pruned graph; copy the graph if the head reads all tokens.

    The shapes of a graph with ONNX Runtime's fused operators are inferred from the `plain` graph it was fused from.
    """
    model = read_graph(graph, with_weights=False)
    opset = opset_version(model)
    if opset < _MIN_OPSET:
        copy_graph(graph, file)
        return Pruning({}, f"not pruned: opset {opset} is older than {_MIN_OPSET}")
    shapes = infer_shapes(model if plain is None else read_graph(plain, with_weights=False))
    operators = _Pruner(model, shapes).find()
    if not operators:
        copy_graph(graph, file)
        return Pruning(operators)
    model = read_graph(graph)
    _Pruner(model, shapes).run()
    write_graph(model, file, external_data=has_external_data(graph))
    return Pruning(operators)


def infer_shapes(model: Any) -> dict[str, AxisShape]:
    """Infer the shapes of all tensors for a batch of known size; None for unknown sizes."""
    import onnx
    import onnx.shape_inference

    # Pass weights as inputs of their size: inference does not need their values, and copies its whole input.
    skeleton = onnx.ModelProto()
    skeleton.ir_version = model.ir_version
    skeleton.opset_import.extend(model.opset_import)
    skeleton.graph.name = model.graph.name
    skeleton.graph.node.extend(model.graph.node)
    skeleton.graph.input.extend(model.graph.input)
    for entry in skeleton.graph.input:
        for dim, size in zip(entry.type.tensor_type.shape.dim, (ROWS, TOKENS), strict=False):
            dim.dim_value = size
    for tensor in model.graph.initializer:
        if prod(tensor.dims) <= _MAX_CONSTANT_SIZE:
            skeleton.graph.initializer.append(tensor)
        else:
            skeleton.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    for entry in model.graph.output:
        tensor_type = onnx.helper.make_tensor_type_proto(entry.type.tensor_type.elem_type, None)
        skeleton.graph.output.append(onnx.helper.make_value_info(entry.name, tensor_type))
    inferred = onnx.shape_inference.infer_shapes(skeleton, data_prop=True).graph
    shapes: dict[str, AxisShape] = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    for entry in (*inferred.input, *inferred.value_info, *inferred.output):
        if entry.type.tensor_type.HasField("shape"):
            dims = entry.type.tensor_type.shape.dim
            shapes[entry.name] = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in dims)
    return shapes


class _Pruner:
    def __init__(self, model: Any, shapes: Mapping[str, AxisShape]) -> None:
        self._graph = model.graph
        self._shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer} | dict(shapes)
        self._producers = {output: node for node in model.graph.node for output in node.output}
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        # The part of each tensor that is needed: one position, or everything (None).
        self._selections: dict[str, _Selection | None] = {}
        # The nodes that will compute one position, by index, and the part of each input that they need.
        self._changes: dict[int, tuple[_Selection | None, ...]] = {}
        self._gathers: list[Any] = []
        # Nodes to insert before others, by index.
        self._added: dict[int, list[Any]] = {}
        self._slices: dict[tuple[str, _Selection], str] = {}

    def find(self) -> Counter[str]:
        """Return the number of nodes that can compute one position, by operator. Does not need weights."""
        nodes = self._graph.node
        if any(attribute.HasField("g") for node in nodes for attribute in node.attribute):
            return Counter()  # subgraphs may read any tensor without listing it as an input
        self._propagate()
        operators = Counter(nodes[index].op_type for index in self._changes)
        # Without a matmul, the selected tensor is not the output of a layer.
        return operators if operators["MatMul"] + operators["Gemm"] else Counter()

    def run(self) -> None:
        self.find()
        nodes = self._graph.node
        pruned = {output for node_index in self._changes for output in nodes[node_index].output}
        for node_index in sorted(self._changes):
            self._change(node_index, pruned)
        for node in self._gathers:
            if node.input[0] in pruned:
                rank = len(self._shapes[node.input[1]])
                node.input[1] = self._constant(np.zeros((1,) * rank, np.int64))
        changed = [new for index, node in enumerate(nodes) for new in (*self._added.get(index, ()), node)]
        del self._graph.node[:]
        self._graph.node.extend(changed)
        del self._graph.value_info[:]  # their sizes may have changed

    def _propagate(self) -> None:
        """Propagate selections from the outputs to the inputs: all readers of a tensor precede its producer."""
        for entry in self._graph.output:
            self._select(entry.name, None)
        for node_index in range(len(self._graph.node) - 1, -1, -1):
            node = self._graph.node[node_index]
            needed = {self._selections[output] for output in node.output if output in self._selections}
            needs: Sequence[_Selection | None] | None = None
            if (selected := self._selected(node)) is not None:
                self._gathers.append(node)
                needs = (selected, None)
            elif len(needed) == 1 and (selection := needed.pop()) is not None:
                needs = self._needs(node, selection)
                if needs is not None:
                    self._changes[node_index] = tuple(needs)
            for name, need in zip(node.input, needs or [None] * len(node.input), strict=True):
                self._select(name, need)

    def _select(self, name: str, selection: _Selection | None) -> None:
        self._selections[name] = selection if self._selections.get(name, selection) == selection else None

    def _selected(self, node: Any) -> _Selection | None:
        """Return the token that a node selects, as `hidden[:, 0]` does; None for other nodes."""
        if node.op_type != "Gather":
            return None
        axis, shape = attribute(node, "axis", 0), self._shapes.get(node.input[0])
        positions = self._values(node.input[1])
        is_of_tokens = shape is not None and len(shape) >= 3 and shape[axis] == TOKENS
        if not is_of_tokens or positions is None or len(positions) != 1 or positions[0] not in _SELECTABLE_POSITIONS:
            return None
        return _Selection(axis % len(shape or ()), int(positions[0]))

    def _needs(self, node: Any, selection: _Selection) -> list[_Selection | None] | None:
        """Return the part of each input that one position of the outputs needs; None if the node must compute all."""
        names = (*node.input, node.output[0])
        shapes = [self._shapes.get(name, ()) for name in names]
        if not node.domain and any(name and name not in self._shapes for name in names):
            return None
        call = NodeCall(node, shapes[:-1], shapes[-1], [self._values(name) for name in node.input])
        if (axes := map_axis(call, selection.axis)) is None:
            return None
        return [None if axis is None else _Selection(axis, selection.position) for axis in axes]

    def _change(self, node_index: int, pruned: Container[str]) -> None:
        node = self._graph.node[node_index]
        for index, need in enumerate(self._changes[node_index]):
            if need is not None and node.input[index] not in pruned:
                node.input[index] = self._slice(node_index, node.input[index], need)
        if node.op_type == "Attention":
            self._split_attention(node_index)
        elif node.op_type == "Reshape":
            selection = self._selections[node.output[0]]
            assert selection is not None
            rank = len(self._shapes[node.output[0]])
            node.input[1] = self._shape_with_one(node_index, node.input[1], selection.axis, rank)

    def _split_attention(self, node_index: int) -> None:
        """Split fused attention, which computes queries, keys and values for the same rows in one matmul."""
        from onnx import numpy_helper

        node = self._graph.node[node_index]
        hidden, packed, bias, mask = (*node.input, "")[:4]
        selection = self._selections[node.output[0]]
        assert selection is not None
        parts = np.split(numpy_helper.to_array(self._constants[packed]), 3, axis=1)
        projected = []
        for name, weight in zip(("query", "key", "value"), parts, strict=True):
            self._graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(weight), f"{packed}_{name}"))
            source = self._slice(node_index, hidden, selection) if name == "query" else hidden
            self._add(node_index, "MatMul", [source, f"{packed}_{name}"], f"{node.output[0]}_{name}")
            projected.append(f"{node.output[0]}_{name}")
        node.op_type = "MultiHeadAttention"
        del node.input[:]
        node.input.extend([*projected, bias, *([mask] if mask else [])])
        attributes = [entry for entry in node.attribute if entry.name in ("mask_filter_value", "num_heads", "scale")]
        del node.attribute[:]
        node.attribute.extend(attributes)

    def _slice(self, node_index: int, name: str, need: _Selection) -> str:
        """Return one position of a tensor that is computed for all."""
        key = (name, need)
        if key not in self._slices:
            self._slices[key] = f"{name}_{need.position}_of_{need.axis}"
            end = _SLICE_END if need.position == -1 else need.position + 1
            bounds = [self._constant(np.array([value], np.int64)) for value in (need.position, end, need.axis)]
            self._add(node_index, "Slice", [name, *bounds], self._slices[key])
        return self._slices[key]

    def _shape_with_one(self, node_index: int, shape: str, axis: int, rank: int) -> str:
        """Return the target shape of a Reshape with size one in one axis."""
        values, producer = self._values(shape), self._producers.get(shape)
        size_one = np.array([1], np.int64)
        if values is not None:
            return self._constant(np.concatenate([values[:axis], size_one, values[axis + 1 :]]))
        result = f"{shape}_one_{axis}"
        if producer is not None and producer.op_type == "Concat" and len(producer.input) == rank:
            parts = [self._constant(size_one) if index == axis else part for index, part in enumerate(producer.input)]
        else:
            parts = [f"{result}_before", self._constant(size_one), f"{result}_after"]
            for part, start, end in ((parts[0], 0, axis), (parts[2], axis + 1, rank)):
                bounds = [self._constant(np.array([value], np.int64)) for value in (start, end)]
                self._add(node_index, "Slice", [shape, *bounds], part)
        self._add(node_index, "Concat", parts, result, axis=0)
        return result

    def _add(self, node_index: int, kind: str, inputs: Sequence[str], output: str, **attributes: int) -> None:
        from onnx import helper

        node = helper.make_node(kind, inputs, [output], name=f"pruned_{output}", **attributes)
        self._added.setdefault(node_index, []).append(node)

    def _constant(self, values: IntArray) -> str:
        from onnx import numpy_helper

        name = f"pruned_{'_'.join(map(str, values.flatten()))}_{values.ndim}"
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(values, name)
            self._graph.initializer.append(self._constants[name])
        return name

    def _values(self, name: str) -> IntArray | None:
        """Return the flat values of a small constant, or None for other tensors."""
        from onnx import numpy_helper

        tensor, producer = self._constants.get(name), self._producers.get(name)
        if producer is not None and producer.op_type == "Constant":
            tensor = attribute(producer, "value", None)
        if tensor is None or prod(tensor.dims) > _MAX_CONSTANT_SIZE:
            return None
        values: IntArray = numpy_helper.to_array(tensor).reshape(-1)
        return values
