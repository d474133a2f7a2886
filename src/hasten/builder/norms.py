"""ONNX Runtime's SkipLayerNormalization taken apart again: an addition and a norm are faster than the two in one.

Its CPU kernel sums a row number by number, where the plain LayerNormalization uses vectors: five times slower
(1.4 against 0.3 ms at 8×128, width 384, the additions included; onnxruntime 1.31). The fusions before it are found by
it, so that it is made first and undone last.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hasten.graph import attribute, copy_graph, read_graph, write_graph

_FUSED = "SkipLayerNormalization"
_PLACES = 5  # input, skip, scale, shift, bias


def split_norms(graph: Path, file: Path, *, external_data: bool) -> int:
    """Write the graph without them, and tell how many there were."""
    if not any(_can_split(node) for node in read_graph(graph, with_weights=False).graph.node):
        copy_graph(graph, file)
        return 0
    model = read_graph(graph)
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for node in nodes:
        model.graph.node.extend(_apart(node) if _can_split(node) else [node])
    write_graph(model, file, external_data=external_data)
    return sum(map(_can_split, nodes))


def _can_split(node: Any) -> bool:
    """Its other outputs are sums and statistics, which nobody reads in an encoder."""
    return node.op_type == _FUSED and not any(node.output[1:]) and all(node.input[:4])


def _apart(node: Any) -> list[Any]:
    from onnx import helper

    name = node.name or node.output[0]
    inputs = list(node.input) + [""] * (_PLACES - len(node.input))
    value, skip, scale, shift, bias = inputs
    nodes = []
    for part, term in (("bias", bias), ("skip", skip)):
        if term:
            nodes.append(helper.make_node("Add", [value, term], [f"{name}/{part}"], f"{name}/{part}"))
            value = f"{name}/{part}"
    epsilon = attribute(node, "epsilon", 1e-12)
    norm = helper.make_node(
        "LayerNormalization", [value, scale, shift], [node.output[0]], f"{name}/norm", axis=-1, epsilon=epsilon
    )
    return [*nodes, norm]
