"""Graphs of models that write, without what tracing leaves around their products: at one token a run, that is much.

Exact: shapes that were computed at every run are written down, what only turns a tensor back and forth goes, and the
products for queries, keys and values are one.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from hasten.graph import attribute, drop_unread

_ATTENTION = "GroupQueryAttention"


def straighten(model: Any) -> Any:
    """A graph that computes the same."""
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    try:
        known = SymbolicShapeInference.infer_shapes(model, auto_merge=True)
    except Exception:  # it asserts what not every graph fulfils, and a graph as it was traced is right too
        return model
    values = (*known.graph.value_info, *known.graph.input, *known.graph.output)
    shapes = {value.name: _dimensions(value) for value in values}
    shapes |= {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    _cancel(model.graph, shapes, {value.name: value.type.tensor_type.elem_type for value in values})
    _write_down(model.graph, shapes)
    drop_unread(model.graph)
    _join_products(model.graph)
    drop_unread(model.graph)
    return model


def _dimensions(value: Any) -> tuple[int | str, ...]:
    return tuple(entry.dim_param or entry.dim_value for entry in value.type.tensor_type.shape.dim)


def _cancel(graph: Any, shapes: dict[str, tuple[int | str, ...]], kinds: dict[str, int]) -> None:
    """Whatever comes to the same tensor in the same shape, by turning and folding alone, is that tensor."""
    makers = {output: node for node in graph.node for output in node.output}
    same: dict[str, str] = {}
    for node in graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = same.get(name, name)
        output = node.output[0]
        match node.op_type:
            case "Identity":
                same[output] = node.input[0]
            case "Cast" if kinds.get(node.input[0]) == attribute(node, "to", None):
                same[output] = node.input[0]
            case "Transpose" if (inner := makers.get(node.input[0])) is not None and inner.op_type == "Transpose":
                turned = [_permutation(inner)[axis] for axis in _permutation(node)]
                if turned == sorted(turned):
                    same[output] = inner.input[0]
            case "Reshape":
                source = node.input[0]
                while (inner := makers.get(source)) is not None and inner.op_type == "Reshape":
                    source = inner.input[0]
                if output in shapes and shapes.get(source) == shapes[output]:
                    same[output] = source
            case "Expand" if output in shapes and shapes.get(node.input[0]) == shapes[output]:
                same[output] = node.input[0]
    for value in graph.output:  # an output keeps its name
        if value.name in same:
            maker = makers[value.name]
            maker.CopyFrom(_node("Identity", [same[value.name]], [value.name]))


def _permutation(node: Any) -> list[int]:
    return list(node.attribute[0].ints)


def _write_down(graph: Any, shapes: dict[str, tuple[int | str, ...]]) -> None:
    """The shape of a Reshape as a constant, where at most one size is neither known nor taken over."""
    from onnx import numpy_helper

    written: dict[tuple[int, ...], str] = {}
    for node in graph.node:
        if node.op_type != "Reshape" or node.output[0] not in shapes or node.input[0] not in shapes:
            continue
        before, after = shapes[node.input[0]], shapes[node.output[0]]
        sizes = tuple(
            size if isinstance(size, int) else (0 if place < len(before) and before[place] == size else -1)
            for place, size in enumerate(after)
        )
        if sizes.count(-1) > 1 or 0 in [size for size in after if isinstance(size, int)]:
            continue
        if sizes not in written:
            written[sizes] = f"shape_{'_'.join(map(str, sizes))}"
            graph.initializer.append(numpy_helper.from_array(np.array(sizes, np.int64), written[sizes]))
        node.input[1] = written[sizes]


def _join_products(graph: Any) -> None:
    """Queries, keys and values of one attention in one product, which the operator takes as it is."""
    from onnx import numpy_helper

    makers = {output: node for node in graph.node for output in node.output}
    readers = Counter(name for node in graph.node for name in node.input)
    weights = {tensor.name: tensor for tensor in graph.initializer}
    for node in [node for node in graph.node if node.op_type == _ATTENTION]:
        parts = [_product(makers.get(name), makers, weights, readers) for name in node.input[:3]]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts) or len({product.input[0] for product, _ in found}) > 1:
            continue
        products, biases = [product for product, _ in found], [bias for _, bias in found]
        if len({bias is None for bias in biases}) > 1:
            continue
        base = products[0].output[0]
        made: list[Any] = []
        for kind, all_names in (("MatMul", [one.input[1] for one in products]), ("Add", biases)):
            names = [name for name in all_names if name is not None]
            if not names:
                continue
            joined = np.concatenate([numpy_helper.to_array(weights[name]) for name in names], axis=-1)
            graph.initializer.append(numpy_helper.from_array(joined, f"{names[0]}_joined"))
            source = made[-1].output[0] if made else products[0].input[0]
            name = f"{products[0].name}_{kind}_joined"
            made.append(_node(kind, [source, f"{names[0]}_joined"], [f"{base}_{kind}_joined"], name))
        place = list(graph.node).index(products[0])
        for offset, one in enumerate(made):
            graph.node.insert(place + offset, one)
        node.input[0], node.input[1], node.input[2] = made[-1].output[0], "", ""


def _product(node: Any, makers: Any, weights: Any, readers: Any) -> tuple[Any, str | None] | None:
    """The product that a tensor comes from and the bias that is added to it, where nobody else reads them."""
    bias = None
    if node is not None and node.op_type == "Add":
        names = [name for name in node.input if name in weights]
        rest = [name for name in node.input if name not in weights]
        if len(names) != 1 or readers[node.output[0]] != 1 or readers[names[0]] != 1:
            return None
        bias, node = names[0], makers.get(rest[0])
    if node is None or node.op_type != "MatMul" or node.input[1] not in weights:
        return None
    if readers[node.output[0]] != 1 or readers[node.input[1]] != 1:
        return None
    return node, bias


def _node(kind: str, inputs: list[str], outputs: list[str], name: str | None = None) -> Any:
    from onnx import helper

    return helper.make_node(kind, inputs, outputs, name=name)
