"""Rewrite operations that OpenVINO's Arm kernels compute incorrectly (2026.4, Neoverse-N1)."""

from __future__ import annotations

from typing import Any

import numpy as np

_LEVELS = 256
# The zero point of a symmetric signed range.
_SYMMETRIC_ZERO = 128


def work_around_arm_bugs(model: Any) -> Any:
    """Apply all workarounds to the model in place and return it."""
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        if kind == "Convert":
            _truncate_before_cast(node)
        elif kind == "FakeQuantize":
            _add_zero_point(node)
    return model


def _truncate_before_cast(node: Any) -> None:
    """Truncate floats before they are cast to integers.

    Fused into the arithmetic around it, a cast rounds instead of truncating: MPNet's distant tokens fell into wrong
    position buckets.
    """
    from openvino import opset13 as ops

    value = node.input_value(0)
    if node.get_output_element_type(0).is_integral_number() and value.get_element_type().is_real():
        truncated = ops.multiply(ops.sign(value), ops.floor(ops.absolute(value)))
        node.input(0).replace_source_output(truncated.output(0))


def _add_zero_point(node: Any) -> None:
    """Shift ranges that begin at zero or are symmetric by one level, so that they have a zero point.

    Without one, an int8 matmul uses the scale of one channel for all of its weights; the error was half the output.
    """
    from openvino import opset13 as ops

    bounds = [node.input_value(index).get_node() for index in range(1, 5)]
    if node.get_attributes()["levels"] != _LEVELS or any(bound.get_type_name() != "Constant" for bound in bounds):
        return
    low, high = (np.asarray(bound.data, np.float32) for bound in bounds[:2])
    if low.size != 1 or node.input_value(0).get_node().get_type_name() == "Constant":
        return
    zero_point = round(float(-low.item() / ((high.item() - low.item()) / (_LEVELS - 1))))
    if zero_point not in (0, _SYMMETRIC_ZERO):
        return
    step = high / (_LEVELS - 2 - zero_point)
    shifted = (-(zero_point + 1) * step).reshape(low.shape), high
    for index, bound in enumerate((*shifted, *shifted), 1):
        node.input(index).replace_source_output(ops.constant(bound).output(0))
