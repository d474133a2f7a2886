"""Recognize attention masks by running the part of the graph that computes them.

transformers builds masks from some forty operators that differ between its versions. Their values say what they are: a
key is visible if it is no padding and within a window around the query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hasten.builder.passes.rewriter import GraphRewriter, sort_nodes
from hasten.onnx_graph import opset_version

MASK_INPUT = "attention_mask"
# Larger windows are not recognized: the mask of twice their length would take gigabytes.
_MAX_WINDOW = 1024
_SHORT = 5
_MAX_MASKED = -1e4
_MAX_INTEGER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Window:
    """The numbers of keys before and after a query that it attends to; None for all."""

    before: int | None
    after: int | None


def recognize(rewriter: GraphRewriter, model: Any, masks: Sequence[str]) -> dict[str, Window]:
    """Return the window of each additive mask that is recognized."""
    return {name: window for name in masks if (window := _recognize(rewriter, model, name)) is not None}


def _recognize(rewriter: GraphRewriter, model: Any, name: str) -> Window | None:
    import onnxruntime

    part = _extract(rewriter, model, name)
    if part is None:
        return None
    subgraph, largest = part
    if largest > _MAX_WINDOW:
        return None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(
            subgraph.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        length = 2 * largest + 9
        windows = [_probe(session, size) for size in (length, _SHORT)]
    except Exception:  # the binding's own classes; a mask that does not run by itself is not one of ours
        return None
    if windows[0] is None or windows[1] is None:
        return None
    found = windows[0]
    # A short text shows only the part of a window that it covers.
    clipped = [None if side is None or side >= _SHORT // 2 else side for side in (found.before, found.after)]
    return found if windows[1] == Window(*clipped) else None


def _probe(session: Any, length: int) -> Window | None:
    """Return the window for texts of one length, among them padded ones, or None if the mask is not a window."""
    is_real = np.ones((4, length), bool)
    is_real[1, length // 2 + 1 :] = False
    is_real[2, : length // 2 - 1] = False
    is_real[3, 1:] = False
    feeds = {}
    for entry in session.get_inputs():
        dtype = np.int32 if "int32" in entry.type else np.int64
        feeds[entry.name] = is_real.astype(dtype) if entry.name == MASK_INPUT else np.zeros(is_real.shape, dtype)
    mask = session.run(None, feeds)[0]
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.dtype != np.float32:
        return None
    visible = np.broadcast_to(mask == 0, (4, 1, length, length))[:, 0]
    if not ((mask == 0) | (mask < _MAX_MASKED)).all():
        return None
    middle = length // 2
    keys = np.flatnonzero(visible[0, middle])
    if not len(keys):
        return None
    before, after = int(middle - keys[0]), int(keys[-1] - middle)
    window = Window(None if before == middle else before, None if after == length - 1 - middle else after)
    offsets = np.arange(length)[None, :] - np.arange(length)[:, None]
    is_near = (offsets >= -(length if window.before is None else before)) & (
        offsets <= (length if window.after is None else after)
    )
    expected = is_near[None] & is_real[:, None, :]
    # Outputs of padding are dropped, so its queries may see anything.
    return window if (visible == expected)[is_real].all() else None


def _extract(rewriter: GraphRewriter, model: Any, name: str) -> tuple[Any, int] | None:
    """Return the graph that computes a mask, and its largest constant; None if it depends on weights."""
    from onnx import TensorProto, helper, numpy_helper

    nodes, weights, largest = [], {}, 1
    inputs = {entry.name: entry for entry in model.graph.input}
    used: set[str] = set()
    pending, seen = [name], {name}
    while pending:
        current = pending.pop()
        node = rewriter.producer(current)
        if current in inputs:
            used.add(current)
        elif node is None or node.op_type == "Constant":
            value = rewriter.constant(current)
            if value is None:
                return None
            weights[current] = value
            if value.dtype.kind == "i" and value.size:
                largest = max([largest, *(int(item) for item in np.abs(value).reshape(-1) if item <= _MAX_INTEGER)])
        elif node.op_type == "Gather" and (table := rewriter.weight(node.input[0])) is not None and len(table.dims) > 1:
            # Only the shape of embeddings matters here.
            shape, width = f"{current}/ids", f"{current}/width"
            weights[width] = np.array([1], np.int64)
            weights[f"{current}/zero"] = np.zeros((), np.float32)
            nodes += [
                helper.make_node("Shape", [node.input[1]], [shape]),
                helper.make_node("Concat", [shape, width], [f"{current}/shape"], axis=0),
                helper.make_node("Expand", [f"{current}/zero", f"{current}/shape"], [current]),
            ]
            pending += {node.input[1]} - seen
            seen.add(node.input[1])
        elif node.op_type == "LayerNormalization":
            nodes.append(helper.make_node("Identity", [node.input[0]], [current]))
            pending += {node.input[0]} - seen
            seen.add(node.input[0])
        else:
            nodes.append(node)
            pending += {entry for entry in node.input if entry} - seen
            seen.update(node.input)
    graph = helper.make_graph(
        sort_nodes(nodes),
        "mask",
        [inputs[entry] for entry in sorted(used)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, key) for key, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", opset_version(model)), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=model.ir_version), largest
