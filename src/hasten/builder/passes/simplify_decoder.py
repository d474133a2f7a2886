"""Simplify traced decoder graphs: at one token per run, the nodes that tracing leaves around matmuls cost much.

Exact: shapes computed at every run become constants, transposes and reshapes that cancel are removed, and the matmuls
for queries, keys and values are merged into one.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from onnx import helper, numpy_helper
from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

from hasten.onnx_graph import attribute, drop_unused

_ATTENTION = "GroupQueryAttention"


def simplify_decoder(model: Any) -> Any:
    """Return a smaller graph that computes the same."""
    try:
        inferred = SymbolicShapeInference.infer_shapes(model, auto_merge=True)
    except Exception:  # it asserts properties that not every graph has; the traced graph is correct too
        return model
    values = (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output)
    types = {value.name: value.type.tensor_type for value in values}
    shapes = {name: tuple(dim.dim_param or dim.dim_value for dim in kind.shape.dim) for name, kind in types.items()}
    shapes |= {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    _remove_redundant(model.graph, shapes, {name: kind.elem_type for name, kind in types.items()})
    _fix_reshapes(model.graph, shapes)
    drop_unused(model.graph)
    _merge_qkv(model.graph)
    drop_unused(model.graph)
    return model


def _remove_redundant(graph: Any, shapes: dict[str, tuple[int | str, ...]], kinds: dict[str, int]) -> None:
    """Replace transposes, reshapes, casts and expansions that return their source unchanged by the source."""
    producers = {output: node for node in graph.node for output in node.output}
    same: dict[str, str] = {}
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = same.get(name, name)
        output = node.output[0]
        match node.op_type:
            case "Identity":
                same[output] = node.input[0]
            case "Cast" if kinds.get(node.input[0]) == attribute(node, "to", None):
                same[output] = node.input[0]
            case "Transpose" if (inner := producers.get(node.input[0])) is not None and inner.op_type == "Transpose":
                permutation = [inner.attribute[0].ints[axis] for axis in node.attribute[0].ints]
                if permutation == sorted(permutation):
                    same[output] = inner.input[0]
            case "Reshape":
                source = node.input[0]
                while (inner := producers.get(source)) is not None and inner.op_type == "Reshape":
                    source = inner.input[0]
                if output in shapes and shapes.get(source) == shapes[output]:
                    same[output] = source
            case "Expand" if output in shapes and shapes.get(node.input[0]) == shapes[output]:
                same[output] = node.input[0]
    for value in graph.output:  # an output keeps its name
        if value.name in same:
            producers[value.name].CopyFrom(helper.make_node("Identity", [same[value.name]], [value.name]))


def _fix_reshapes(graph: Any, shapes: dict[str, tuple[int | str, ...]]) -> None:
    """Make the shape of a Reshape constant if at most one size is neither known nor copied from the input."""
    constants: dict[tuple[int, ...], str] = {}
    for node in graph.node:
        if node.op_type != "Reshape" or node.output[0] not in shapes or node.input[0] not in shapes:
            continue
        before, after = shapes[node.input[0]], shapes[node.output[0]]
        sizes = tuple(
            size if isinstance(size, int) else (0 if axis < len(before) and before[axis] == size else -1)
            for axis, size in enumerate(after)
        )
        if sizes.count(-1) > 1 or 0 in [size for size in after if isinstance(size, int)]:
            continue
        if sizes not in constants:
            constants[sizes] = f"shape_{'_'.join(map(str, sizes))}"
            graph.initializer.append(numpy_helper.from_array(np.array(sizes, np.int64), constants[sizes]))
        node.input[1] = constants[sizes]


def _merge_qkv(graph: Any) -> None:
    """Merge the matmuls of queries, keys and values into one, whose packed output the attention operator accepts."""
    producers = {output: node for node in graph.node for output in node.output}
    readers = Counter(name for node in graph.node for name in node.input)
    weights = {tensor.name: tensor for tensor in graph.initializer}
    for node in [node for node in graph.node if node.op_type == _ATTENTION]:
        parts = [_find_linear(producers.get(name), producers, weights, readers) for name in node.input[:3]]
        linears = [part for part in parts if part is not None]
        if len(linears) < len(parts) or len({matmul.input[0] for matmul, _ in linears}) > 1:
            continue
        matmuls, biases = [matmul for matmul, _ in linears], [bias for _, bias in linears]
        if len({bias is None for bias in biases}) > 1:
            continue
        base = matmuls[0].output[0]
        merged: list[Any] = []
        for kind, all_names in (("MatMul", [matmul.input[1] for matmul in matmuls]), ("Add", biases)):
            names = [name for name in all_names if name is not None]
            if not names:
                continue
            joined = np.concatenate([numpy_helper.to_array(weights[name]) for name in names], axis=-1)
            graph.initializer.append(numpy_helper.from_array(joined, f"{names[0]}_joined"))
            source = merged[-1].output[0] if merged else matmuls[0].input[0]
            name = f"{matmuls[0].name}_{kind}_joined"
            merged.append(helper.make_node(kind, [source, f"{names[0]}_joined"], [f"{base}_{kind}_joined"], name))
        index = list(graph.node).index(matmuls[0])
        for offset, new_node in enumerate(merged):
            graph.node.insert(index + offset, new_node)
        node.input[0], node.input[1], node.input[2] = merged[-1].output[0], "", ""


def _find_linear(node: Any, producers: Any, weights: Any, readers: Any) -> tuple[Any, str | None] | None:
    """Return the matmul and the bias that compute a tensor, or None if their results or weights are read elsewhere."""
    bias = None
    if node is not None and node.op_type == "Add":
        names = [name for name in node.input if name in weights]
        rest = [name for name in node.input if name not in weights]
        if len(names) != 1 or readers[node.output[0]] != 1 or readers[names[0]] != 1:
            return None
        bias, node = names[0], producers.get(rest[0])
    if node is None or node.op_type != "MatMul" or node.input[1] not in weights:
        return None
    if readers[node.output[0]] != 1 or readers[node.input[1]] != 1:
        return None
    return node, bias
