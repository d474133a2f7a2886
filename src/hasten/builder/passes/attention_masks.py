"""Recognize attention masks by running the part of the graph that computes them.

transformers builds masks from some forty operators that differ between its versions. Their values say what they are: a
key is visible if it is no padding and within a window around the query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hasten.builder.passes.rewriter import Array, GraphRewriter, sort_nodes
from hasten.onnx_graph import opset_version

MASK_INPUT = "attention_mask"
# Larger windows are not recognized: the mask of twice their length would take gigabytes.
_MAX_WINDOW = 1024
_SHORT = (1, 2, 5)
_FATAL_ONLY = 4
_MAX_ID = 50
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
    options.log_severity_level = _FATAL_ONLY
    options.intra_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(
            subgraph.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        # Long enough that the window around the middle ends on both sides.
        probes = [_probe(session, length) for length in (2 * largest + 9, *_SHORT)]
    except Exception:  # the binding's own classes; a mask that does not run by itself is unknown
        return None
    if not all(probe.is_mask() for probe in probes):
        return None
    window = probes[0].window()
    return window if all(probe.shows(window) for probe in probes) else None


@dataclass(frozen=True, slots=True)
class _Probe:
    """The values of a mask for a batch, and which of its tokens are no padding."""

    mask: Array
    is_real: Array

    def is_mask(self) -> bool:
        """Return whether it can be added to scores, the same for all heads, and either hides a key or adds zero."""
        texts, length = self.is_real.shape
        sizes = ((1, texts), (1,), (1, length), (length,))
        is_broadcast = self.mask.ndim == 4 and all(
            size in allowed for size, allowed in zip(self.mask.shape, sizes, strict=True)
        )
        is_binary = bool(((self.mask == 0) | (self.mask < _MAX_MASKED)).all())
        return is_broadcast and is_binary and self.mask.dtype == np.float32

    def window(self) -> Window:
        """Return the window around the middle of the first text, which has no padding."""
        length = self.is_real.shape[1]
        middle = length // 2
        rows = np.broadcast_to(self.mask == 0, (*self.mask.shape[:2], length, length))
        keys = np.flatnonzero(rows[0, 0, middle])
        if not len(keys):
            return Window(0, 0)
        before, after = int(middle - keys[0]), int(keys[-1] - middle)
        return Window(None if before == middle else before, None if after == length - 1 - middle else after)

    def shows(self, window: Window) -> bool:
        """Return whether each query sees exactly the keys in its window that are no padding."""
        texts, length = self.is_real.shape
        offsets = np.arange(length)[None, :] - np.arange(length)[:, None]
        before = length if window.before is None else window.before
        after = length if window.after is None else window.after
        expected = (offsets >= -before) & (offsets <= after) & self.is_real[:, None, :]
        visible = np.broadcast_to(self.mask == 0, (texts, 1, length, length))[:, 0]
        # Outputs of padding are dropped, so its queries may see anything.
        return bool((visible == expected)[self.is_real].all())


def _probe(session: Any, length: int) -> _Probe:
    """Run a mask for texts without padding, padded on either side, and of one token."""
    is_real = np.ones((4, length), bool)
    is_real[1, length // 2 + 1 :] = False
    is_real[2, : length // 2 - 1] = False
    is_real[3, 1:] = False
    feeds = {}
    for entry in session.get_inputs():
        dtype = np.int32 if "int32" in entry.type else np.int64
        # A mask that depends on other inputs must not be taken for one that does not.
        others = np.random.default_rng(length).integers(0, _MAX_ID, is_real.shape)
        feeds[entry.name] = (is_real if entry.name == MASK_INPUT else others).astype(dtype)
    return _Probe(session.run(None, feeds)[0], is_real)


def _extract(rewriter: GraphRewriter, model: Any, name: str) -> tuple[Any, int] | None:
    """Return the graph that computes a mask, and its largest constant; None if it depends on weights."""
    from onnx import TensorProto, helper, numpy_helper

    nodes, largest = [], 1
    weights: dict[str, Array] = {}
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
            # Of embeddings, a mask reads the shape. One that reads their values (a relative bias) becomes NaN.
            ids, width, shape, unknown = (f"{current}/{part}" for part in ("ids", "width", "shape", "unknown"))
            weights |= {width: np.array([1], np.int64), unknown: np.array(np.nan, np.float32)}
            nodes += [
                helper.make_node("Shape", [node.input[1]], [ids]),
                helper.make_node("Concat", [ids, width], [shape], axis=0),
                helper.make_node("Expand", [unknown, shape], [current]),
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
