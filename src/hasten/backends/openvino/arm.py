"""What OpenVINO's kernels for Arm compute wrongly (2026.4, Neoverse-N1), put so that they compute it right."""

from __future__ import annotations

from typing import Any

_LEVELS = 256
# Of them, how many lie below zero where bytes are signed and there is no zero point.
_HALF = 128


def repaired(model: Any) -> Any:
    """The same model, in place."""
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        if kind == "Convert":
            _cut_first(node)
        elif kind == "FakeQuantize":
            _give_zero_point(node)
    return model


def _cut_first(node: Any) -> None:
    """Integers are made of real numbers that are whole by then.

    Merged into the arithmetic around it, a conversion rounds what it should cut off: MPNet's far tokens fell into wrong
    buckets.
    """
    from openvino import opset13 as ops

    value = node.input_value(0)
    if node.get_output_element_type(0).is_integral_number() and value.get_element_type().is_real():
        whole = ops.multiply(ops.sign(value), ops.floor(ops.absolute(value)))
        node.input(0).replace_source_output(whole.output(0))


def _give_zero_point(node: Any) -> None:
    """A product with bytes whose zero is none of its own takes one channel's scale for all of its weights.

    So ranges that begin at zero, or lie evenly around it, are moved by one level; the error was half of the output.
    """
    import numpy as np
    from openvino import opset13 as ops

    ends = [node.input_value(place).get_node() for place in range(1, 5)]
    if node.get_attributes()["levels"] != _LEVELS or any(end.get_type_name() != "Constant" for end in ends):
        return
    low, high = (np.asarray(end.data, np.float32) for end in ends[:2])
    if low.size != 1 or node.input_value(0).get_node().get_type_name() == "Constant":
        return
    zero = round(float(-low.item() / ((high.item() - low.item()) / (_LEVELS - 1))))
    if zero not in (0, _HALF):
        return
    step = high / (_LEVELS - 2 - zero)
    moved = (-(zero + 1) * step).reshape(low.shape), high
    for place, end in enumerate((*moved, *moved), 1):
        node.input(place).replace_source_output(ops.constant(end).output(0))
