"""Outlier split: the few channels of a feed-forward layer with extreme values are computed beside it, in float.

One range serves all channels of what a quantized product takes, so a few extreme ones leave the others few steps.
Between two products that are connected channel by channel each channel is independent, and so is its part of the
second one's sum: a side branch computes the outliers' part, and the two parts are added. Exact but for the order of
additions; weights are cut here, nothing is gathered when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hasten.core.errors import PlanError
from hasten.core.tensors import FloatArray, IntArray
from hasten.quantize.products import Pair, Product, Wires, find_pairs, find_products
from hasten.quantize.recipe import Recipe

# Four of them hold nearly all there is to gain; sixteen are one full vector of the widest arithmetic.
CHANNELS = 16
# Below this ratio of the largest to the median channel a byte has steps enough for all.
RATIO = 6.0
# A branch of more than this part of the channels would cost more than it saves.
_LARGEST_PART = 8


def find_splits(
    maxima: Mapping[str, FloatArray], *, channels: int = CHANNELS, ratio: float = RATIO
) -> dict[str, list[int]]:
    """The channels with the largest maxima of each second product that has outliers at all."""
    found = {}
    for name, values in maxima.items():
        has_room = len(values) >= channels * _LARGEST_PART
        if has_room and values.max() > ratio * np.median(values):
            found[name] = sorted(np.argsort(-values, kind="stable")[:channels].tolist())
    return found


def kept(recipe: Recipe) -> list[str]:
    """The nodes to leave in float, in the rewritten graph: those the recipe names, and the side branches it implies.

    ONNX Runtime's dynamic quantizer takes a Gemm apart before it asks.
    """
    names = [*recipe.keep, *(side_name(name, part) for name in recipe.split for part in ("first", "second"))]
    return [*names, *(f"{name}_MatMul" for name in names)]


def side_name(product: str, part: str) -> str:
    return f"{product}/outliers/{part}"


def split(model: Any, splits: Mapping[str, Sequence[int]]) -> None:
    """Change the graph: by second product, the channels of its input that go beside it."""
    pairs = {pair.second.name: pair for pair in find_pairs(model, find_products(model))}
    cutter = _Cutter(model)
    for name, channels in splits.items():
        if name not in pairs:
            raise PlanError(
                f"the recipe splits '{name}', which is not the second product of a feed-forward layer of this graph",
                hint="a recipe fits the graph it was made for",
            )
        cutter.run(pairs[name], _checked(name, channels, pairs[name].second))
    cutter.write()


def _checked(name: str, channels: Sequence[int], product: Product) -> IntArray:
    chosen = np.array(sorted(set(channels)), np.int64)
    if not 0 < len(chosen) < product.inputs or chosen[0] < 0 or chosen[-1] >= product.inputs:
        raise PlanError(f"the recipe splits channels off '{name}' that it does not have: it has {product.inputs}")
    return chosen


class _Cutter:
    def __init__(self, model: Any) -> None:
        self._wires = Wires(model)
        self._nodes = {node.name: node for node in model.graph.node if node.name}
        # What goes before and behind a second product, by its name.
        self._before: dict[str, list[Any]] = {}
        self._behind: dict[str, list[Any]] = {}
        # Products may share weights, and then they share their parts.
        self._parts: dict[tuple[str, int, bytes], str] = {}

    def run(self, pair: Pair, outliers: IntArray) -> None:
        from onnx import helper

        name = pair.second.name
        branch = [self._nodes[pair.first.name], *map(self._wires.makers.__getitem__, pair.between), self._nodes[name]]
        side = self._copy(branch, name)
        self._cut(pair, np.delete(np.arange(pair.second.inputs), outliers), branch)
        self._cut(pair, outliers, side)
        del side[-1].input[2:]  # the addend of a Gemm: once is enough
        last = self._bias_of(branch[-1]) or branch[-1]
        result = last.output[0]
        last.output[0] = f"{result}/ordinary"
        parts = [last.output[0], side[-1].output[0]]
        self._before[name] = side
        self._behind[last.name] = [helper.make_node("Add", parts, [result], name=side_name(name, "sum"))]

    def _bias_of(self, product: Any) -> Any | None:
        """The addition of a bias straight behind a product: a quantized product does both in one."""
        readers = self._wires.readers(product.output[0])
        if len(readers) != 1 or readers[0].op_type != "Add" or product.output[0] in self._wires.outputs:
            return None
        others = [name for name in readers[0].input if name != product.output[0]]
        return readers[0] if len(others) == 1 and len(self._wires.shape(others[0]) or ()) == 1 else None

    def _copy(self, branch: Sequence[Any], name: str) -> list[Any]:
        from onnx import NodeProto

        parts = ["first", *(f"{number}_{node.op_type}" for number, node in enumerate(branch[1:-1])), "second"]
        within = {node.output[0] for node in branch}
        side = []
        for node, part in zip(branch, parts, strict=True):
            copy = NodeProto()
            copy.CopyFrom(node)
            copy.name = side_name(name, part)
            copy.output[0] = f"{node.output[0]}/outliers"
            for place, taken in enumerate(node.input):
                if taken in within:
                    copy.input[place] = f"{taken}/outliers"
            side.append(copy)
        return side

    def _cut(self, pair: Pair, channels: IntArray, nodes: Sequence[Any]) -> None:
        """Leave these channels alone in what a branch has constants for."""
        first, *between, second = nodes
        first.input[1] = self._part(first.input[1], 0 if pair.first.is_transposed else 1, channels)
        if len(first.input) > 2 and first.input[2]:
            first.input[2] = self._part(first.input[2], -1, channels)
        for node in between:
            for place, name in enumerate(node.input):
                if self._wires.shape(name):
                    node.input[place] = self._part(name, -1, channels)
        second.input[1] = self._part(second.input[1], 1 if pair.second.is_transposed else 0, channels)

    def _part(self, name: str, axis: int, channels: IntArray) -> str:
        shape = self._wires.shape(name)
        assert shape is not None
        if shape[axis] == 1:
            return name  # one for all channels
        name = self._wires.original(name)
        key = (name, axis, channels.tobytes())
        if key not in self._parts:
            values = np.take(self._wires.values(name), channels, axis=axis)
            self._parts[key] = self._wires.add_constant(f"{name}/{len(channels)}", values)
        return self._parts[key]

    def write(self) -> None:
        graph = self._wires.graph
        nodes = [
            placed
            for node in graph.node
            for placed in (*self._before.get(node.name, ()), node, *self._behind.get(node.name, ()))
        ]
        del graph.node[:]
        graph.node.extend(nodes)
        del graph.value_info[:]  # of sizes that have changed
