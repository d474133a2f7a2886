"""Replace operators that TensorRT's parser rejects by others that compute the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

_ZERO, _ONE, _ROWS, _COLUMNS = (f"hasten/eye_like/{name}" for name in ("zero", "one", "rows", "columns"))


def replace_eye_like(graph: GraphProto) -> None:
    """Compare row and column indices instead of EyeLike, whose input must have fixed sizes for the parser (XLNet).

    The graph must have the types of all tensors.
    """
    from onnx import numpy_helper

    types = {entry.name: entry.type.tensor_type.elem_type for entry in graph.value_info}
    nodes: list[NodeProto] = []
    for node in graph.node:
        has_main_diagonal = all(attribute.name != "k" or attribute.i == 0 for attribute in node.attribute)
        if node.op_type == "EyeLike" and has_main_diagonal:
            nodes += _compare_indices(node, types[node.output[0]])
        else:
            nodes.append(node)
    if len(nodes) == len(graph.node):
        return
    constants = {_ZERO: np.int64(0), _ONE: np.int64(1), _ROWS: np.array([1]), _COLUMNS: np.array([0])}
    graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items())
    del graph.node[:]
    graph.node.extend(nodes)


def _compare_indices(node: NodeProto, data_type: int) -> list[NodeProto]:
    """Return nodes with the same output: row index = column index, in the output's type."""
    from onnx import helper

    name = node.output[0]
    steps = [
        ("Shape", [node.input[0]], "shape"),
        ("Gather", [f"{name}/shape", _ZERO], "height"),
        ("Gather", [f"{name}/shape", _ONE], "width"),
        ("Range", [_ZERO, f"{name}/height", _ONE], "row"),
        ("Range", [_ZERO, f"{name}/width", _ONE], "column"),
        ("Unsqueeze", [f"{name}/row", _ROWS], "rows"),
        ("Unsqueeze", [f"{name}/column", _COLUMNS], "columns"),
        ("Equal", [f"{name}/rows", f"{name}/columns"], "is_equal"),
    ]
    nodes = [
        helper.make_node(operator, inputs, [f"{name}/{output}"], name=f"{name}/{output}")
        for operator, inputs, output in steps
    ]
    return [*nodes, helper.make_node("Cast", [f"{name}/is_equal"], [name], name=node.name, to=data_type)]
