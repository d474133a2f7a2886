"""Outlier split: compute the few channels of a feed-forward layer with extreme values in float, in a side branch.

All input channels of a quantized matmul share one range, so a few extreme channels leave little resolution to the rest.
Between two matmuls that are connected elementwise each channel is independent, and so is its part of the second one's
sum: a side branch computes the outliers' part, and the two parts are added. The result is exact but for the order of
additions; weights are sliced at build time, nothing is gathered at run time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hasten.core.errors import PlanError
from hasten.core.tensors import FloatArray, IntArray
from hasten.quantize.analysis.matmuls import FeedForwardPair, GraphIndex, MatMul, find_feed_forward_pairs, find_matmuls
from hasten.quantize.recipe import Recipe

# Four channels bring nearly all of the gain; sixteen are one full vector of the widest SIMD instructions.
OUTLIER_CHANNELS = 16
# Below this ratio of the largest to the median channel, eight bits have enough resolution for all channels.
OUTLIER_RATIO = 6.0
# A branch with more than one in these many channels would cost more than it saves.
_MIN_CHANNELS_PER_OUTLIER = 8


def find_splits(
    maxima: Mapping[str, FloatArray], *, channels: int = OUTLIER_CHANNELS, ratio: float = OUTLIER_RATIO
) -> dict[str, list[int]]:
    """Return the channels with the largest maxima of each second matmul that has outliers."""
    splits = {}
    for name, values in maxima.items():
        is_wide_enough = len(values) >= channels * _MIN_CHANNELS_PER_OUTLIER
        if is_wide_enough and values.max() > ratio * np.median(values):
            splits[name] = sorted(np.argsort(-values, kind="stable")[:channels].tolist())
    return splits


def float_nodes(recipe: Recipe) -> list[str]:
    """Return the nodes of the rewritten graph that stay in float: those the recipe keeps, and its side branches.

    ONNX Runtime's dynamic quantizer splits a Gemm, and renames it, before it looks at the excluded names.
    """
    names = [*recipe.keep, *(_side_name(name, part) for name in recipe.split for part in ("first", "second"))]
    return [*names, *(f"{name}_MatMul" for name in names)]


def _side_name(matmul: str, part: str) -> str:
    return f"{matmul}/outliers/{part}"


def split(model: Any, splits: Mapping[str, Sequence[int]]) -> None:
    """Split the graph in place: by second matmul, compute these channels of its input in a side branch."""
    pairs = {pair.second.name: pair for pair in find_feed_forward_pairs(model, find_matmuls(model))}
    splitter = _Splitter(model)
    for name, channels in splits.items():
        if name not in pairs:
            raise PlanError(
                f"the recipe splits '{name}', which is not the second matmul of a feed-forward layer in this graph",
                hint="a recipe fits only the graph it was made for",
            )
        splitter.split(pairs[name], _check_channels(name, channels, pairs[name].second))
    splitter.index.insert_nodes(splitter.before, splitter.after)
    del model.graph.value_info[:]  # the shapes have changed


def _check_channels(name: str, channels: Sequence[int], matmul: MatMul) -> IntArray:
    unique = np.array(sorted(set(channels)), np.int64)
    if not 0 < len(unique) < matmul.inputs or unique[0] < 0 or unique[-1] >= matmul.inputs:
        raise PlanError(f"the recipe splits off channels that '{name}' does not have: it has {matmul.inputs}")
    return unique


class _Splitter:
    def __init__(self, model: Any) -> None:
        self.index = GraphIndex(model)
        self._nodes = {node.name: node for node in model.graph.node if node.name}
        # The nodes to insert before and after a node, by its name.
        self.before: dict[str, list[Any]] = {}
        self.after: dict[str, list[Any]] = {}
        # Matmuls may share weights, and then they share the slices too.
        self._slices: dict[tuple[str, int, bytes], str] = {}

    def split(self, pair: FeedForwardPair, outliers: IntArray) -> None:
        from onnx import helper

        name = pair.second.name
        between = map(self.index.producers.__getitem__, pair.between)
        branch = [self._nodes[pair.first.name], *between, self._nodes[name]]
        side = self._copy(branch, name)
        self._keep_channels(pair, np.delete(np.arange(pair.second.inputs), outliers), branch)
        self._keep_channels(pair, outliers, side)
        del side[-1].input[2:]  # the bias of a Gemm is added once
        last = self._bias_of(branch[-1]) or branch[-1]
        result = last.output[0]
        last.output[0] = f"{result}/ordinary"
        parts = [last.output[0], side[-1].output[0]]
        self.before[name] = side
        self.after[last.name] = [helper.make_node("Add", parts, [result], name=_side_name(name, "sum"))]

    def _bias_of(self, matmul: Any) -> Any | None:
        """Return the addition of a bias right after a matmul: a quantized matmul fuses both."""
        consumers = self.index.consumers(matmul.output[0])
        if len(consumers) != 1 or consumers[0].op_type != "Add" or matmul.output[0] in self.index.outputs:
            return None
        others = [name for name in consumers[0].input if name != matmul.output[0]]
        is_bias = len(others) == 1 and len(self.index.constant_shape(others[0]) or ()) == 1
        return consumers[0] if is_bias else None

    def _copy(self, branch: Sequence[Any], name: str) -> list[Any]:
        from onnx import NodeProto

        parts = ["first", *(f"{number}_{node.op_type}" for number, node in enumerate(branch[1:-1])), "second"]
        within = {node.output[0] for node in branch}
        side = []
        for node, part in zip(branch, parts, strict=True):
            copy = NodeProto()
            copy.CopyFrom(node)
            copy.name = _side_name(name, part)
            copy.output[0] = f"{node.output[0]}/outliers"
            for index, operand in enumerate(node.input):
                if operand in within:
                    copy.input[index] = f"{operand}/outliers"
            side.append(copy)
        return side

    def _keep_channels(self, pair: FeedForwardPair, channels: IntArray, nodes: Sequence[Any]) -> None:
        """Slice the constants of a branch to these channels."""
        first, *between, second = nodes
        first.input[1] = self._slice(first.input[1], 0 if pair.first.is_transposed else 1, channels)
        if len(first.input) > 2 and first.input[2]:
            first.input[2] = self._slice(first.input[2], -1, channels)
        for node in between:
            for index, name in enumerate(node.input):
                if self.index.constant_shape(name):
                    node.input[index] = self._slice(name, -1, channels)
        second.input[1] = self._slice(second.input[1], 1 if pair.second.is_transposed else 0, channels)

    def _slice(self, name: str, axis: int, channels: IntArray) -> str:
        shape = self.index.constant_shape(name)
        assert shape is not None
        if shape[axis] == 1:
            return name  # one value for all channels
        name = self.index.resolve_alias(name)
        key = (name, axis, channels.tobytes())
        if key not in self._slices:
            values = np.take(self.index.constant_values(name), channels, axis=axis)
            self._slices[key] = self.index.add_constant(f"{name}/{len(channels)}", values)
        return self._slices[key]
