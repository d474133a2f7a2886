"""Lossless pruning: where a head reads one token, the last layer is computed for that token alone.

A graph says so by itself: somewhere it takes one row of a tensor (`hidden[:, 0]`). That wish travels upstream, through
every operator that treats rows apart (products, norms, activations, residuals, the queries of an attention), and stops
where all rows are needed: keys and values, and with them everything below. What is upstream of the wish then computes
one row instead of all. Nothing is approximated, and no architecture has to be known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from hasten.builder.axes import Call, Shape, carrying
from hasten.core.tensors import IntArray
from hasten.graph import attribute, copy_graph, read_graph, write_graph

# Sizes to infer shapes with: primes that no width of a model is a multiple of, so that axes can be told apart.
_ROWS, _TOKENS = 1013, 1009
# Above this a constant is a weight: shape inference needs its size, not its values.
_SMALL = 64
_LAST = 2**63 - 1
# Heads read the first token or the last; either is also there where an axis is one place long.
_ENDS = (0, -1)
# Operators before it take what they work along as attributes, and a softmax goes along all axes behind its own.
_OLDEST_OPSET = 13


@dataclass(frozen=True, slots=True)
class _Wish:
    """Of this axis, one place is enough."""

    axis: int
    place: int


@dataclass(frozen=True, slots=True)
class Pruning:
    """How many operators compute one row instead of all, by name."""

    operators: Mapping[str, int]
    # Why there was no looking for any.
    reason: str = ""

    @property
    def products(self) -> int:
        return self.operators.get("MatMul", 0) + self.operators.get("Gemm", 0)

    def notes(self) -> tuple[str, ...]:
        if not self.products:
            return (self.reason or "not pruned: no head that reads the first or the last token alone",)
        return (f"last layer pruned to the token that the head reads: {self.products} products on one row",)


def prune(graph: Path, file: Path, *, external_data: bool, plain: Path | None = None) -> Pruning:
    """Write the pruned graph; the same graph where the head reads all tokens.

    Of a graph with ONNX Runtime's fused operators, shapes are known only through the `plain` one it was made from.
    """
    model = read_graph(graph, with_weights=False)
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    if opset < _OLDEST_OPSET:
        copy_graph(graph, file)
        return Pruning({}, f"not pruned: opset {opset} is older than {_OLDEST_OPSET}")
    shapes = infer_shapes(model if plain is None else read_graph(plain, with_weights=False))
    done = _Pruner(model, shapes).find()
    if not done:
        copy_graph(graph, file)
        return Pruning(done)
    model = read_graph(graph)
    _Pruner(model, shapes).run()
    write_graph(model, file, external_data=external_data)
    return Pruning(done)


def infer_shapes(model: Any) -> dict[str, Shape]:
    """Shapes of all tensors for a batch of known size; None for what cannot be told."""
    import onnx
    import onnx.shape_inference

    # Weights as inputs of their size: inference does not need their values, and copies everything it gets.
    skeleton = onnx.ModelProto()
    skeleton.ir_version = model.ir_version
    skeleton.opset_import.extend(model.opset_import)
    skeleton.graph.name = model.graph.name
    skeleton.graph.node.extend(model.graph.node)
    for entry in model.graph.input:
        skeleton.graph.input.append(entry)
        sizes = (_ROWS, _TOKENS)
        for dim, size in zip(skeleton.graph.input[-1].type.tensor_type.shape.dim, sizes, strict=False):
            dim.dim_value = size
    for tensor in model.graph.initializer:
        if prod(tensor.dims) <= _SMALL:
            skeleton.graph.initializer.append(tensor)
        else:
            skeleton.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    for entry in model.graph.output:
        kind = onnx.helper.make_tensor_type_proto(entry.type.tensor_type.elem_type, None)
        skeleton.graph.output.append(onnx.helper.make_value_info(entry.name, kind))
    inferred = onnx.shape_inference.infer_shapes(skeleton, data_prop=True).graph
    shapes: dict[str, Shape] = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    for entry in (*inferred.input, *inferred.value_info, *inferred.output):
        if entry.type.tensor_type.HasField("shape"):
            dims = entry.type.tensor_type.shape.dim
            shapes[entry.name] = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in dims)
    return shapes


class _Pruner:
    def __init__(self, model: Any, shapes: Mapping[str, Shape]) -> None:
        self._graph = model.graph
        self._shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer} | dict(shapes)
        self._makers = {output: node for node in model.graph.node for output in node.output}
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        # What is wanted of each tensor: one place, or everything (None).
        self._wishes: dict[str, _Wish | None] = {}
        # The nodes that will compute one place alone, by number, and what they need of each input for it.
        self._changes: dict[int, tuple[_Wish | None, ...]] = {}
        self._picks: list[Any] = []
        # Nodes to go in front of others, by number.
        self._added: dict[int, list[Any]] = {}
        self._cuts: dict[tuple[str, _Wish], str] = {}

    def find(self) -> Counter[str]:
        """What could compute one place alone, by operator; needs no weights."""
        nodes = self._graph.node
        if any(attribute.HasField("g") for node in nodes for attribute in node.attribute):
            return Counter()  # branches may read any tensor without saying so
        self._spread_wishes()
        done = Counter(nodes[number].op_type for number in self._changes)
        return done if done["MatMul"] + done["Gemm"] else Counter()  # else a pick of what is no layer's output

    def run(self) -> None:
        self.find()
        nodes = self._graph.node
        small = {output for number in self._changes for output in nodes[number].output}
        for number in sorted(self._changes):
            self._change(number, small)
        for node in self._picks:
            if node.input[0] in small:
                rank = len(self._shapes[node.input[1]])
                node.input[1] = self._constant(np.zeros((1,) * rank, np.int64))
        self._write()

    def _spread_wishes(self) -> None:
        """From the outputs to the inputs: each consumer of a tensor has spoken before its maker is asked."""
        for entry in self._graph.output:
            self._wish(entry.name, None)
        for number in range(len(self._graph.node) - 1, -1, -1):
            node = self._graph.node[number]
            needs: Sequence[_Wish | None] | None = None
            if (picked := self._picked(node)) is not None:
                self._picks.append(node)
                needs = (picked, None)
            else:
                wanted = {self._wishes[output] for output in node.output if output in self._wishes}
                if len(wanted) == 1 and (wish := wanted.pop()) is not None:
                    needs = self._needs(node, wish)
                    if needs is not None:
                        self._changes[number] = tuple(needs)
            for name, need in zip(node.input, needs or [None] * len(node.input), strict=True):
                self._wish(name, need)

    def _wish(self, name: str, wish: _Wish | None) -> None:
        self._wishes[name] = wish if self._wishes.get(name, wish) == wish else None

    def _picked(self, node: Any) -> _Wish | None:
        """The row of a text that a node takes, if that is what it does: `hidden[:, 0]`."""
        if node.op_type != "Gather":
            return None
        axis, shape, place = attribute(node, "axis", 0), self._shapes.get(node.input[0]), self._values(node.input[1])
        is_of_tokens = shape is not None and len(shape) >= 3 and shape[axis] == _TOKENS
        if not is_of_tokens or place is None or len(place) != 1 or place[0] not in _ENDS:
            return None
        return _Wish(axis % len(shape or ()), int(place[0]))

    def _needs(self, node: Any, wish: _Wish) -> list[_Wish | None] | None:
        """What a node needs of each input to give one place of its outputs; None if it can only give all."""
        names = (*node.input, node.output[0])
        shapes = [self._shapes.get(name, ()) for name in names]
        if not node.domain and any(name and name not in self._shapes for name in names):
            return None
        call = Call(node, shapes[:-1], shapes[-1], [self._values(name) for name in node.input])
        axes = carrying(call, wish.axis)
        return None if axes is None else [None if axis is None else _Wish(axis, wish.place) for axis in axes]

    def _change(self, number: int, small: Container[str]) -> None:
        node = self._graph.node[number]
        for place, need in enumerate(self._changes[number]):
            if need is not None and node.input[place] not in small:
                node.input[place] = self._cut(number, node.input[place], need)
        if node.op_type == "Attention":
            self._split_attention(number)
        elif node.op_type == "Reshape":
            wish = self._wishes[node.output[0]]
            assert wish is not None
            node.input[1] = self._with_one(number, node.input[1], wish.axis, len(self._shapes[node.output[0]]))

    def _split_attention(self, number: int) -> None:
        """Fused attention computes queries, keys and values in one product, all for the same rows: take it apart."""
        from onnx import numpy_helper

        node = self._graph.node[number]
        hidden, packed, bias, mask = (*node.input, "")[:4]
        wish = self._wishes[node.output[0]]
        assert wish is not None
        parts = np.split(numpy_helper.to_array(self._constants[packed]), 3, axis=1)
        projected = []
        for name, weight in zip(("query", "key", "value"), parts, strict=True):
            self._graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(weight), f"{packed}_{name}"))
            source = self._cut(number, hidden, wish) if name == "query" else hidden
            self._add(number, "MatMul", [source, f"{packed}_{name}"], f"{node.output[0]}_{name}")
            projected.append(f"{node.output[0]}_{name}")
        node.op_type = "MultiHeadAttention"
        del node.input[:]
        node.input.extend([*projected, bias, *([mask] if mask else [])])
        kept = [entry for entry in node.attribute if entry.name in ("mask_filter_value", "num_heads", "scale")]
        del node.attribute[:]
        node.attribute.extend(kept)

    def _cut(self, number: int, name: str, need: _Wish) -> str:
        """One place of a tensor that exists whole."""
        key = (name, need)
        if key not in self._cuts:
            self._cuts[key] = f"{name}_{need.place}_of_{need.axis}"
            end = _LAST if need.place == -1 else need.place + 1
            bounds = [self._constant(np.array([value], np.int64)) for value in (need.place, end, need.axis)]
            self._add(number, "Slice", [name, *bounds], self._cuts[key])
        return self._cuts[key]

    def _with_one(self, number: int, shape: str, axis: int, rank: int) -> str:
        """The target of a Reshape, one place long in one axis."""
        values, maker = self._values(shape), self._makers.get(shape)
        one = np.array([1], np.int64)
        if values is not None:
            return self._constant(np.concatenate([values[:axis], one, values[axis + 1 :]]))
        result = f"{shape}_one_{axis}"
        if maker is not None and maker.op_type == "Concat" and len(maker.input) == rank:
            parts = [self._constant(one) if place == axis else part for place, part in enumerate(maker.input)]
        else:
            parts = [f"{result}_before", self._constant(one), f"{result}_after"]
            for part, start, end in ((parts[0], 0, axis), (parts[2], axis + 1, rank)):
                bounds = [self._constant(np.array([value], np.int64)) for value in (start, end)]
                self._add(number, "Slice", [shape, *bounds], part)
        self._add(number, "Concat", parts, result, axis=0)
        return result

    def _add(self, number: int, kind: str, inputs: Sequence[str], output: str, **attributes: int) -> None:
        from onnx import helper

        node = helper.make_node(kind, inputs, [output], name=f"pruned_{output}", **attributes)
        self._added.setdefault(number, []).append(node)

    def _constant(self, values: IntArray) -> str:
        from onnx import numpy_helper

        name = f"pruned_{'_'.join(map(str, values.flatten()))}_{values.ndim}"
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(values, name)
            self._graph.initializer.append(self._constants[name])
        return name

    def _values(self, name: str) -> IntArray | None:
        """What a small constant holds, flat."""
        from onnx import numpy_helper

        tensor, maker = self._constants.get(name), self._makers.get(name)
        if maker is not None and maker.op_type == "Constant":
            tensor = attribute(maker, "value", None)
        if tensor is None or prod(tensor.dims) > _SMALL:
            return None
        values: IntArray = numpy_helper.to_array(tensor).reshape(-1)
        return values

    def _write(self) -> None:
        """The new nodes in their places."""
        nodes = [node for number, old in enumerate(self._graph.node) for node in (*self._added.get(number, ()), old)]
        del self._graph.node[:]
        self._graph.node.extend(nodes)
        del self._graph.value_info[:]  # of sizes that may have changed
