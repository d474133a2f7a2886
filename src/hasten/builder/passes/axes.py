"""Map an axis of an operator's output to the axes of its inputs.

Along a mapped axis positions are independent: a position of the output needs only that position of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from hasten.core.tensors import IntArray
from hasten.onnx_graph import attribute

AxisShape: TypeAlias = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class NodeCall:
    """A node with the shapes of its inputs and its output, and the values of inputs that are small constants."""

    node: Any
    inputs: Sequence[AxisShape]
    output: AxisShape
    values: Sequence[IntArray | None]


# For each input, the axis that corresponds to the output's axis; None in the list for an input that is needed entirely,
# None instead of the list if the operator mixes positions.
Axes: TypeAlias = list[int | None] | None


def _broadcast(call: NodeCall, axis: int) -> Axes:
    """Map the axis of each input; an input of size one there, or without that axis, is broadcast and needed entirely.

    An axis of unknown size is mapped: slicing one position of a single one changes nothing.
    """
    result: list[int | None] = []
    for shape in call.inputs:
        input_axis = axis - (len(call.output) - len(shape))
        result.append(input_axis if input_axis >= 0 and shape[input_axis] != 1 else None)
    return result


def _first_only(call: NodeCall, axis: int) -> Axes:
    """Map the axis of the first input; the others (a minimum, a type) are needed entirely."""
    return [axis, *[None] * (len(call.inputs) - 1)]


def _along_other_axis(call: NodeCall, axis: int) -> Axes:
    """Map the axis for Softmax and similar operators, unless it is the one they work along."""
    default = 0 if call.node.op_type == "Split" else -1
    works_along = attribute(call.node, "axis", default) % len(call.output)
    return _first_only(call, axis) if axis != works_along else None


def _quantize(call: NodeCall, axis: int) -> Axes:
    """Map the axis of a quantization, unless each of its positions has its own scale."""
    has_one_scale = len(call.inputs[1]) == 0
    is_independent = has_one_scale or axis != attribute(call.node, "axis", 1) % len(call.output)
    return _first_only(call, axis) if is_independent else None


def _norm(call: NodeCall, axis: int) -> Axes:
    return _first_only(call, axis) if axis < attribute(call.node, "axis", -1) % len(call.output) else None


def _reduce(call: NodeCall, axis: int) -> Axes:
    axes = attribute(call.node, "axes", None)
    if axes is None and len(call.values) > 1:
        axes = call.values[1]
    is_independent = axes is not None and axis not in {int(value) % len(call.inputs[0]) for value in axes}
    return _first_only(call, axis) if is_independent and attribute(call.node, "keepdims", 1) else None


def _matmul(call: NodeCall, axis: int) -> Axes:
    """Map rows to the left operand and columns to the right one; batch axes are broadcast."""
    left, right = call.inputs
    rank = len(call.output)
    if len(left) < 2 or len(right) < 2:
        return None
    if axis == rank - 2:
        return [len(left) - 2, None]
    if axis == rank - 1:
        return [None, len(right) - 1]
    return _broadcast(call, axis)


def _gemm(call: NodeCall, axis: int) -> Axes:
    if axis != 0 or attribute(call.node, "transA", 0):
        return None
    bias = [] if len(call.inputs) < 3 else [0 if len(call.inputs[2]) == 2 and call.inputs[2][0] != 1 else None]
    return [0, None, *bias]


def _transpose(call: NodeCall, axis: int) -> Axes:
    order = attribute(call.node, "perm", None) or list(range(len(call.output)))[::-1]
    return [order[axis]]


def _reshape(call: NodeCall, axis: int) -> Axes:
    """Map an axis that survives the reshape: of equal size, and with as many elements before it."""
    shape, before = call.inputs[0], _element_count(call.output[:axis])
    for input_axis, size in enumerate(shape):
        is_same_size = size is not None and size == call.output[axis]
        if is_same_size and before is not None and _element_count(shape[:input_axis]) == before:
            return [input_axis, None]
    return None


def _element_count(sizes: AxisShape) -> int | None:
    known = [size for size in sizes if size is not None]
    return prod(known) if len(known) == len(sizes) else None


def _unsqueeze(call: NodeCall, axis: int) -> Axes:
    if len(call.values) < 2 or call.values[1] is None:
        return None
    added = {int(value) % len(call.output) for value in call.values[1]}
    return None if axis in added else [axis - sum(value < axis for value in added), None]


def _squeeze(call: NodeCall, axis: int) -> Axes:
    if len(call.values) < 2 or call.values[1] is None:
        return None
    rank = len(call.inputs[0])
    removed = {int(value) % rank for value in call.values[1]}
    return [[input_axis for input_axis in range(rank) if input_axis not in removed][axis], None]


def _slice(call: NodeCall, axis: int) -> Axes:
    axes = call.values[3] if len(call.values) > 3 else None
    if axes is None or axis in {int(value) % len(call.output) for value in axes}:
        return None
    return _first_only(call, axis)


def _gather(call: NodeCall, axis: int) -> Axes:
    along, rank = attribute(call.node, "axis", 0) % len(call.inputs[0]), len(call.inputs[1])
    if axis < along:
        return [axis, None]
    return [axis - rank + 1, None] if axis >= along + rank else [None, axis - along]


def _gather_elements(call: NodeCall, axis: int) -> Axes:
    along = attribute(call.node, "axis", 0) % len(call.output)
    if axis == along:
        return [None, axis]
    sizes = (call.inputs[0][axis], call.inputs[1][axis])
    return [axis, axis] if sizes[0] is not None and sizes[0] == sizes[1] else None


def _concat(call: NodeCall, axis: int) -> Axes:
    is_independent = axis != attribute(call.node, "axis", 0) % len(call.output)
    return [axis] * len(call.inputs) if is_independent else None


def _skip_norm(call: NodeCall, axis: int) -> Axes:
    ranks = {len(shape) for shape in call.inputs[:2] if shape}
    # The added tensor may have fewer axes, which then do not correspond.
    return [axis, axis, *[None] * (len(call.inputs) - 2)] if len(ranks) < 2 else None


def _attention(call: NodeCall, axis: int) -> Axes:
    """Map no axis: rows of the queries are independent, but keys and values need the entire input."""
    is_plain = len(call.inputs) <= 4 and axis == 1 and attribute(call.node, "qkv_hidden_sizes", None) is None
    is_plain = is_plain and not attribute(call.node, "unidirectional", 0) and not attribute(call.node, "do_rotary", 0)
    return [None] * len(call.inputs) if is_plain else None


_ELEMENTWISE = (
    "Abs Add And Cast Clip Div Equal Erf Exp Gelu Greater GreaterOrEqual Identity IsNaN Less LessOrEqual Log Max Min "
    "Mul Neg Not Or Pow Reciprocal Relu Sigmoid Softplus Sqrt Sub Tanh Where"
)
_RULES: dict[str, Callable[[NodeCall, int], Axes]] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _broadcast),
    **dict.fromkeys(("LogSoftmax", "Softmax", "Split"), _along_other_axis),
    **dict.fromkeys(("DequantizeLinear", "QuantizeLinear"), _quantize),
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
_FUSED_RULES: dict[str, Callable[[NodeCall, int], Axes]] = {
    **dict.fromkeys(("BiasGelu", "FastGelu", "Gelu", "QuickGelu"), _first_only),
    "Attention": _attention,
    "SkipLayerNormalization": _skip_norm,
}


def map_axis(call: NodeCall, axis: int) -> Axes:
    """Return the input axes that correspond to an output axis; None if the operator is unknown or mixes positions."""
    rules = _FUSED_RULES if call.node.domain == _FUSED else _RULES
    rule = rules.get(call.node.op_type)
    return rule(call, axis) if rule is not None else None
