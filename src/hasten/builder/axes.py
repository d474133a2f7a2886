"""How operators treat the axes of what they take: which axis of each input carries an axis of the output.

Along such an axis places are apart: one place of the output needs that place of the input and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from hasten.core.tensors import IntArray
from hasten.graph import attribute

Shape: TypeAlias = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A node, with the shapes of what it takes and gives, and the values of inputs that are small constants."""

    node: Any
    inputs: Sequence[Shape]
    output: Shape
    values: Sequence[IntArray | None]


# Which axis of each input carries an axis of the output; None in the list for an input that is needed whole, None
# instead of the list where the operator mixes places.
Axes: TypeAlias = list[int | None] | None


def _broadcast(call: Call, axis: int) -> Axes:
    """Place by place: an input that is one place wide there, or has no such axis, serves every place.

    One of unknown width is cut: of one place that leaves it as it is.
    """
    result: list[int | None] = []
    for shape in call.inputs:
        own = axis - (len(call.output) - len(shape))
        result.append(own if own >= 0 and shape[own] != 1 else None)
    return result


def _first_only(call: Call, axis: int) -> Axes:
    """The first input place by place; the others (a minimum, a type) are for all."""
    return [axis, *[None] * (len(call.inputs) - 1)]


def _along_other_axis(call: Call, axis: int) -> Axes:
    """Softmax and its like: each place by itself, unless the axis is the one it works along."""
    default = 0 if call.node.op_type == "Split" else -1
    works_along = attribute(call.node, "axis", default) % len(call.output)
    return _first_only(call, axis) if axis != works_along else None


def _rounding(call: Call, axis: int) -> Axes:
    """To eight bits and back: each place by itself, unless each has a scale of its own."""
    has_one_scale = len(call.inputs[1]) == 0
    is_apart = has_one_scale or axis != attribute(call.node, "axis", 1) % len(call.output)
    return _first_only(call, axis) if is_apart else None


def _norm(call: Call, axis: int) -> Axes:
    return _first_only(call, axis) if axis < attribute(call.node, "axis", -1) % len(call.output) else None


def _reduce(call: Call, axis: int) -> Axes:
    axes = attribute(call.node, "axes", None)
    if axes is None and len(call.values) > 1:
        axes = call.values[1]
    is_apart = axes is not None and axis not in {int(value) % len(call.inputs[0]) for value in axes}
    return _first_only(call, axis) if is_apart and attribute(call.node, "keepdims", 1) else None


def _matmul(call: Call, axis: int) -> Axes:
    """The rows of the left side are apart, and so are the columns of the right one."""
    left, right = call.inputs
    rank = len(call.output)
    if len(left) < 2 or len(right) < 2:
        return None
    if axis == rank - 2:
        return [len(left) - 2, None]
    if axis == rank - 1:
        return [None, len(right) - 1]
    return _broadcast(call, axis)


def _gemm(call: Call, axis: int) -> Axes:
    if axis != 0 or attribute(call.node, "transA", 0):
        return None
    bias = [] if len(call.inputs) < 3 else [0 if len(call.inputs[2]) == 2 and call.inputs[2][0] != 1 else None]
    return [0, None, *bias]


def _transpose(call: Call, axis: int) -> Axes:
    order = attribute(call.node, "perm", None) or list(range(len(call.output)))[::-1]
    return [order[axis]]


def _reshape(call: Call, axis: int) -> Axes:
    """An axis that is the same before and after: as long, and with as many places in front of it."""
    given, before = call.inputs[0], _product(call.output[:axis])
    for own, size in enumerate(given):
        if size is not None and size == call.output[axis] and before is not None and _product(given[:own]) == before:
            return [own, None]
    return None


def _product(sizes: Shape) -> int | None:
    known = [size for size in sizes if size is not None]
    return prod(known) if len(known) == len(sizes) else None


def _unsqueeze(call: Call, axis: int) -> Axes:
    if len(call.values) < 2 or call.values[1] is None:
        return None
    added = {int(value) % len(call.output) for value in call.values[1]}
    return None if axis in added else [axis - sum(value < axis for value in added), None]


def _squeeze(call: Call, axis: int) -> Axes:
    if len(call.values) < 2 or call.values[1] is None:
        return None
    rank = len(call.inputs[0])
    gone = {int(value) % rank for value in call.values[1]}
    return [[own for own in range(rank) if own not in gone][axis], None]


def _slice(call: Call, axis: int) -> Axes:
    axes = call.values[3] if len(call.values) > 3 else None
    if axes is None or axis in {int(value) % len(call.output) for value in axes}:
        return None
    return _first_only(call, axis)


def _gather(call: Call, axis: int) -> Axes:
    along, rank = attribute(call.node, "axis", 0) % len(call.inputs[0]), len(call.inputs[1])
    if axis < along:
        return [axis, None]
    return [axis - rank + 1, None] if axis >= along + rank else [None, axis - along]


def _gather_elements(call: Call, axis: int) -> Axes:
    along = attribute(call.node, "axis", 0) % len(call.output)
    if axis == along:
        return [None, axis]
    sizes = (call.inputs[0][axis], call.inputs[1][axis])
    return [axis, axis] if sizes[0] is not None and sizes[0] == sizes[1] else None


def _concat(call: Call, axis: int) -> Axes:
    is_apart = axis != attribute(call.node, "axis", 0) % len(call.output)
    return [axis] * len(call.inputs) if is_apart else None


def _skip_norm(call: Call, axis: int) -> Axes:
    ranks = {len(shape) for shape in call.inputs[:2] if shape}
    # What is added may have fewer axes, which are then others.
    return [axis, axis, *[None] * (len(call.inputs) - 2)] if len(ranks) < 2 else None


def _attention(call: Call, axis: int) -> Axes:
    """Rows of the queries are apart; keys and values need the input whole, and so it is asked for whole."""
    is_plain = len(call.inputs) <= 4 and axis == 1 and attribute(call.node, "qkv_hidden_sizes", None) is None
    is_plain = is_plain and not attribute(call.node, "unidirectional", 0) and not attribute(call.node, "do_rotary", 0)
    return [None] * len(call.inputs) if is_plain else None


_PLACE_BY_PLACE = (
    "Abs Add And Cast Clip Div Equal Erf Exp Gelu Greater GreaterOrEqual Identity IsNaN Less LessOrEqual Log Max Min "
    "Mul Neg Not Or Pow Reciprocal Relu Sigmoid Softplus Sqrt Sub Tanh Where"
)
_RULES: dict[str, Callable[[Call, int], Axes]] = {
    **dict.fromkeys(_PLACE_BY_PLACE.split(), _broadcast),
    **dict.fromkeys(("LogSoftmax", "Softmax", "Split"), _along_other_axis),
    **dict.fromkeys(("DequantizeLinear", "QuantizeLinear"), _rounding),
    **dict.fromkeys(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"), _reduce),
    "Concat": _concat,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "Gemm": _gemm,
    "LayerNormalization": _norm,
    "MatMul": _matmul,
    "Reshape": _reshape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}

_FUSED = "com.microsoft"
_FUSED_RULES: dict[str, Callable[[Call, int], Axes]] = {
    **dict.fromkeys(("BiasGelu", "FastGelu", "Gelu", "QuickGelu"), _first_only),
    "Attention": _attention,
    "SkipLayerNormalization": _skip_norm,
}


def carrying(call: Call, axis: int) -> Axes:
    """The axes of the inputs that carry this one of the output; None where nobody knows, or places are mixed."""
    rules = _FUSED_RULES if call.node.domain == _FUSED else _RULES
    rule = rules.get(call.node.op_type)
    return rule(call, axis) if rule is not None else None
