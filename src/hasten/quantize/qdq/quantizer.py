"""Fake quantization of tensors: values are rounded to 8 bits and stay in float, so that the model stays trainable.

A quantizer passes values through unchanged until its range (`amax`) is known, and while it is disabled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hasten.core.variant import Precision

# The largest number of each precision. int8 also uses -128, as runtimes do: a symmetric range of 255 steps plus one.
LIMITS = {Precision.INT8: 127.0, Precision.FP8: 448.0}
# A channel of zeros would have a scale of zero.
_MIN_AMAX = 1e-12


class Quantizer(nn.Module):
    """A fake quantizer with one scale per tensor or, with `channels`, one per entry of the first axis."""

    amax: Tensor

    def __init__(self, precision: Precision, channels: int | None = None) -> None:
        super().__init__()
        self.precision = precision
        self.channels = channels
        self.is_enabled = True
        # Called with the input while the model is calibrated.
        self.observer: Callable[[Tensor], None] | None = None
        self.register_buffer("amax", self._unknown())
        self._checked: Tensor | None = None
        self._is_known = False

    def forward(self, values: Tensor) -> Tensor:
        if self.observer is not None:
            self.observer(values.detach())
            return values
        if not self.is_enabled or not self.is_calibrated:
            return values
        scale = self.amax / LIMITS[self.precision]
        rounded: Tensor = FakeQuantize.apply(values, scale, self.precision, self.channels)
        return rounded

    @property
    def is_calibrated(self) -> bool:
        """Return whether the range is known."""
        # Checked once for each tensor: on a GPU every read of a value synchronizes.
        if self._checked is not self.amax:
            self._checked = self.amax
            self._is_known = not (self.amax.is_meta or bool(self.amax.isnan().any()))
        return self._is_known

    @property
    def is_active(self) -> bool:
        """Return whether the quantizer rounds: it is enabled and calibrated."""
        return self.is_enabled and self.is_calibrated

    def set_range(self, amax: Tensor | float) -> None:
        """Set the range. `amax` becomes a new tensor: if it changed in place, `is_calibrated` would not notice."""
        values = torch.as_tensor(amax, dtype=torch.float32).detach()
        self.amax = values.to(self.amax.device).clamp_min(_MIN_AMAX).clone()
        self._checked, self._is_known = self.amax, not self.amax.is_meta

    def forget(self) -> None:
        """Reset the range to unknown."""
        self.amax = self._unknown().to(self.amax.device)

    def _unknown(self) -> Tensor:
        return torch.full(() if self.channels is None else (self.channels,), math.nan, dtype=torch.float32)

    def _apply(self, change: Any, recurse: bool = True) -> Quantizer:
        """Move with the model, but keep the range in fp32: in fp16 that of an all-zero channel would be zero."""
        before = self.amax
        super()._apply(change, recurse)
        if self.amax.dtype is not before.dtype:
            self.amax = before.to(self.amax.device)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.amax = self.amax.clone()

    def extra_repr(self) -> str:
        state = "" if self.is_enabled else ", off"
        return f"{self.precision}, {'per tensor' if self.channels is None else f'{self.channels} channels'}{state}"


class QuantizedLinear(nn.Linear):
    """A linear layer with a quantized input (one scale) and quantized weights (one scale per output channel)."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, precision: Precision, **factory: Any
    ) -> None:
        super().__init__(in_features, out_features, bias, **factory)
        self.input_quantizer = Quantizer(precision)
        self.weight_quantizer = Quantizer(precision, out_features)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- torch's own name for it, which callers may use
        if self.training and self.weight_quantizer.is_active:
            self.measure_weight()  # the optimizer has changed the weights since
        return nn.functional.linear(self.input_quantizer(input), self.weight_quantizer(self.weight), self.bias)

    def train(self, mode: bool = True) -> QuantizedLinear:
        if self.training and not mode and self.weight_quantizer.is_active:
            self.measure_weight()  # the last optimizer step came after the last forward
        super().train(mode)
        return self

    def measure_weight(self) -> None:
        """Set the weight ranges to the largest magnitude of each output channel."""
        self.weight_quantizer.set_range(self.weight.detach().abs().amax(dim=1))


class FakeQuantize(torch.autograd.Function):
    """Fake quantization with a straight-through gradient where values are not clipped; exported as a QDQ pair."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, scale: Tensor, precision: Precision, _: int | None) -> Tensor:
        ctx.limit = LIMITS[precision]
        ctx.save_for_backward(values, scale)
        return fake_quantize(values, scale, precision)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        values, scale = ctx.saved_tensors
        inside = values.abs() <= _broadcast(scale * ctx.limit, values)
        return gradient * inside, None, None, None

    @staticmethod
    def symbolic(g: Any, values: Any, scale: Any, precision: Precision, channels: int | None) -> Any:
        kind = torch.int8 if precision is Precision.INT8 else torch.float8_e4m3fn
        zeros = torch.zeros(() if channels is None else (channels,), dtype=kind)
        axis = {} if channels is None else {"axis_i": 0}
        zero_point = g.op("Constant", value_t=zeros)
        quantized = g.op("QuantizeLinear", values, scale, zero_point, **axis)
        dequantized = g.op("DequantizeLinear", quantized, scale, zero_point, **axis)
        dequantized.setType(values.type())
        return dequantized


def fake_quantize(values: Tensor, scale: Tensor, precision: Precision) -> Tensor:
    """Quantize to the nearest 8-bit number, ties to even, and dequantize, computing in fp32 for any dtype.

    Values are divided by the scale, as QuantizeLinear is defined. torch's own fake_quantize multiplies by its inverse,
    which differs in the last digit: sometimes by a step, and more often layer by layer.
    """
    scales, limit = _broadcast(scale, values), LIMITS[precision]
    divided = values.float() / scales
    if precision is Precision.FP8:
        # Clamp explicitly: values beyond the limit become NaN in float8.
        divided = divided.clamp_(-limit, limit).to(torch.float8_e4m3fn).float()
    else:
        divided = divided.round_().clamp_(-limit - 1, limit)
    return divided.mul_(scales).to(values.dtype)


def _broadcast(scale: Tensor, values: Tensor) -> Tensor:
    return scale.view(-1, *(1,) * (values.dim() - 1)) if scale.dim() else scale
