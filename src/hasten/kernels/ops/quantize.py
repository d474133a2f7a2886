"""Quantize activations to fp8 or int8 inside the kernels that compute them.

A value is multiplied by its inverse scale, clamped to the format's range and rounded. Inverse scales come from
calibration rows (`quantize_weights.py`); the scale of the GEMM undoes them together with the scale of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.ops.pdl import IS_INTERPRETED

FP8, INT8 = torch.float8_e4m3fn, torch.int8
MAX_VALUE = {FP8: 448.0, INT8: 127.0}


@dataclass(frozen=True, slots=True)
class ActivationQuant:
    """An 8-bit dtype and the fp32 inverse scales that map activations to it: one per tensor, or one per channel."""

    inverse_scales: Any
    dtype: Any

    @property
    def max_value(self) -> float:
        """Return the largest value of the dtype."""
        return MAX_VALUE[self.dtype]

    def empty(self, *shape: int) -> Any:
        """Return an uninitialized tensor of the dtype."""
        return torch.empty(shape, dtype=self.dtype, device=self.inverse_scales.device)


def quant_options(quant: ActivationQuant | None) -> dict[str, Any]:
    """Return a kernel's arguments for quantization; `max_value` is 0 without it."""
    if quant is None:
        return {"inverse_scales": None, "max_value": 0.0, "is_per_tensor": True}
    inverse_scales = quant.inverse_scales
    is_per_tensor = inverse_scales.numel() == 1
    return {"inverse_scales": inverse_scales, "max_value": quant.max_value, "is_per_tensor": is_per_tensor}


def reference(x: Any, quant: ActivationQuant) -> Any:
    """Quantize in plain PyTorch."""
    value = (x.float() * quant.inverse_scales).clamp(-quant.max_value, quant.max_value)
    return (value.round() if quant.dtype == INT8 else value).to(quant.dtype)


def quantize_weight(weight: Any, inverse_scales: Any, dtype: Any) -> tuple[Any, Any]:
    """Quantize a weight (columns, depth) for activations that `inverse_scales` maps; return it and the GEMM's scale.

    fp8 has one scale, which cuBLASLt's fastest GEMMs require, and its precision hardly depends on it; int8, whose
    precision does, has one scale per column.
    """
    scaled = weight.float() / inverse_scales
    max_abs = scaled.abs().amax().view(1) if dtype == FP8 else scaled.abs().amax(1)
    scale = torch.where(max_abs > 0, max_abs / MAX_VALUE[dtype], 1.0)
    return reference(scaled, ActivationQuant(1 / scale.view(-1, 1), dtype)), scale


@triton.jit
def load_inverse_scale(inverse_scales, column, is_column, is_per_tensor: tl.constexpr):
    """Load the inverse scales. Call it early in a kernel: loaded at the point of use, every program stalls on it."""
    return tl.load(inverse_scales) if is_per_tensor else tl.load(inverse_scales + column, mask=is_column, other=0.0)


@triton.jit
def clamp_to_range(value, inverse_scale, max_value: tl.constexpr):
    """Scale and clamp the value to the range of the 8-bit format, without rounding."""
    return tl.minimum(tl.maximum(value * inverse_scale, -max_value), max_value)


@triton.jit
def quantize_value(value, inverse_scale, max_value: tl.constexpr):
    """Scale, clamp and round the value, so that converting it to the 8-bit format is exact."""
    value = clamp_to_range(value, inverse_scale, max_value)
    # Conversion to integers truncates. Adding 1.5 · 2²³, where fp32 has no fraction bits, rounds half to even.
    return (value + 12582912.0) - 12582912.0 if max_value < 128.0 else _round_to_fp8(value)


if IS_INTERPRETED:

    @triton.jit
    def _round_to_fp8(value):
        """Round half to even: Triton's interpreter converts only exact fp8 values correctly."""
        bits = value.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        subnormal = ((value * 512.0 + 12582912.0) - 12582912.0) / 512.0
        return tl.where(tl.abs(value) < 0.015625, subnormal, normal)
else:

    @triton.jit
    def _round_to_fp8(value):
        return value
