"""What stands at a tensor: it rounds to what eight bits hold and goes on in float, so that the model stays trainable.

Until it knows the largest value (`amax`) it lets everything through, and so does one that is switched off.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hasten.core.variant import Precision

# The largest number each can hold. -128 is used too, as runtimes do: a symmetric range of 255 steps, and one to spare.
LIMITS = {Precision.INT8: 127.0, Precision.FP8: 448.0}
# A channel of zeros would have a scale of zero.
_SMALLEST = 1e-12


class Observer(Protocol):
    """Looks at what passes while the model is calibrated."""

    def see(self, values: Tensor) -> None: ...


class Quantizer(nn.Module):
    """One scale for the whole tensor or, with `channels`, one for each entry of its first axis."""

    amax: Tensor

    def __init__(self, precision: Precision, channels: int | None = None) -> None:
        super().__init__()
        self.precision = precision
        self.channels = channels
        self.is_enabled = True
        self.observer: Observer | None = None
        self.register_buffer("amax", self._unknown())
        self._checked: Tensor | None = None
        self._is_known = False

    def forward(self, values: Tensor) -> Tensor:
        if self.observer is not None:
            self.observer.see(values.detach())
            return values
        if not self.is_enabled or not self.is_calibrated:
            return values
        rounded: Tensor = Rounded.apply(values, self.amax / LIMITS[self.precision], self.precision, self.channels)
        return rounded

    @property
    def is_calibrated(self) -> bool:
        # Asked of the numbers once for each tensor: on a GPU every look at them waits for all that was launched.
        if self._checked is not self.amax:
            self._checked = self.amax
            self._is_known = not (self.amax.is_meta or bool(self.amax.isnan().any()))
        return self._is_known

    @property
    def is_active(self) -> bool:
        return self.is_enabled and self.is_calibrated

    def set_range(self, amax: Tensor | float) -> None:
        """A new tensor: changed in place, it would not be looked at again."""
        values = torch.as_tensor(amax, dtype=torch.float32).detach()
        self.amax = values.to(self.amax.device).clamp_min(_SMALLEST).clone()
        self._checked, self._is_known = self.amax, not self.amax.is_meta

    def forget(self) -> None:
        self.amax = self._unknown().to(self.amax.device)

    def _unknown(self) -> Tensor:
        return torch.full(() if self.channels is None else (self.channels,), math.nan, dtype=torch.float32)

    def _apply(self, change: Any, recurse: bool = True) -> Quantizer:
        """Moved with the model, but never to half precision: in fp16 the range of a channel of zeros would be zero."""
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
    """A product of eight bits by eight: its input with one scale, its weights with one for each output."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, precision: Precision, **where: Any
    ) -> None:
        super().__init__(in_features, out_features, bias, **where)
        self.input_quantizer = Quantizer(precision)
        self.weight_quantizer = Quantizer(precision, out_features)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- torch's own name for it, which callers may use
        if self.training and self.weight_quantizer.is_active:
            self.measure_weight()  # it has moved since the last step
        return nn.functional.linear(self.input_quantizer(input), self.weight_quantizer(self.weight), self.bias)

    def train(self, mode: bool = True) -> QuantizedLinear:
        if self.training and not mode and self.weight_quantizer.is_active:
            self.measure_weight()  # the last step came after the last look
        super().train(mode)
        return self

    def measure_weight(self) -> None:
        self.weight_quantizer.set_range(self.weight.detach().abs().amax(dim=1))


class Rounded(torch.autograd.Function):
    """Rounding that gradients pass straight through where nothing was cut off; in graphs, a pair of nodes."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, scale: Tensor, precision: Precision, _: int | None) -> Tensor:
        ctx.limit = LIMITS[precision]
        ctx.save_for_backward(values, scale)
        return rounded(values, scale, precision)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        values, scale = ctx.saved_tensors
        inside = values.abs() <= _spread(scale * ctx.limit, values)
        return gradient * inside, None, None, None

    @staticmethod
    def symbolic(g: Any, values: Any, scale: Any, precision: Precision, channels: int | None) -> Any:
        kind = torch.int8 if precision is Precision.INT8 else torch.float8_e4m3fn
        zeros = torch.zeros(() if channels is None else (channels,), dtype=kind)
        axis = {} if channels is None else {"axis_i": 0}
        zero_point = g.op("Constant", value_t=zeros)
        eight_bits = g.op("QuantizeLinear", values, scale, zero_point, **axis)
        back = g.op("DequantizeLinear", eight_bits, scale, zero_point, **axis)
        back.setType(values.type())
        return back


def rounded(values: Tensor, scale: Tensor, precision: Precision) -> Tensor:
    """To the nearest number that eight bits hold, ties to even, and back; in fp32, whatever the values are in.

    Divided by the scale, as QuantizeLinear is defined. torch's own fake_quantize multiplies by its inverse: that is
    another number in the last digit, here and there another step, and layer by layer more of them.
    """
    spread, limit = _spread(scale, values), LIMITS[precision]
    divided = values.float() / spread
    if precision is Precision.FP8:
        # Cut off by hand: what is too large becomes NaN in float8.
        divided = divided.clamp_(-limit, limit).to(torch.float8_e4m3fn).float()
    else:
        divided = divided.round_().clamp_(-limit - 1, limit)
    return divided.mul_(spread).to(values.dtype)


def _spread(scale: Tensor, values: Tensor) -> Tensor:
    return scale.view(-1, *(1,) * (values.dim() - 1)) if scale.dim() else scale
