"""The residual addition and the norm between two GEMMs of a pre-norm layer.

The residual has mean zero and the norm's weight is part of the next linear layer (see `modernbert.py`), so that a
LayerNorm is a division by the root mean square.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.ops.quantize import ActivationQuant, load_inverse_scale, quant_options, quantize_value


def reference(x: Any, residual: Any, eps: float) -> tuple[Any, Any]:
    """Return the sum divided by its root mean square, and the sum, in plain PyTorch."""
    total = x.float() + residual.float()
    return total * torch.rsqrt(total.square().mean(1, keepdim=True) + eps), total


def rms_norm(x: Any, residual: Any, eps: float, quant: ActivationQuant | None = None) -> tuple[Any, Any]:
    """Return x + residual divided by its root mean square, quantized or in the dtype of x, and the sum itself."""
    rows, width = x.shape
    total = torch.empty_like(x)
    out = torch.empty_like(x) if quant is None else quant.empty(rows, width)
    block = triton.next_power_of_2(width)
    rows_per_program = max(1, min(4, 4096 // block))
    _rms_norm[(triton.cdiv(rows, rows_per_program),)](
        x, residual, total, out, rows, width, eps,
        block=block, rows_per_program=rows_per_program, num_warps=2 if block <= 512 else 4, **quant_options(quant),
    )  # fmt: skip
    return out, total


@triton.jit
def _rms_norm(
    x, residual, total, out, rows, width, eps, inverse_scales,
    max_value: tl.constexpr, is_per_tensor: tl.constexpr, block: tl.constexpr, rows_per_program: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows_per_program + tl.arange(0, rows_per_program)
    column = tl.arange(0, block)
    is_column = (column < width)[None, :]
    is_inside = (row < rows)[:, None] & is_column
    at = row[:, None].to(tl.int64) * width + column[None, :]
    if max_value > 0:
        inverse_scale = load_inverse_scale(inverse_scales, column[None, :], is_column, is_per_tensor)
    value = tl.load(x + at, mask=is_inside, other=0.0).to(tl.float32)
    value += tl.load(residual + at, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(total + at, value.to(total.dtype.element_ty), mask=is_inside)
    value *= tl.rsqrt(tl.sum(value * value, axis=1) / width + eps)[:, None]
    if max_value > 0:
        value = quantize_value(value, inverse_scale, max_value)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=is_inside)
