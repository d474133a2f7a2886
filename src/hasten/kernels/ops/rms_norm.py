"""The residual addition and the norm between two GEMMs of a pre-norm layer.

The residual has mean zero and the norm's weight is part of the next linear layer (see `modernbert.py`), so that a
LayerNorm is a division by the root mean square. Where the next GEMM divides by it, only the sum of squares is written.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.ops.quantize import ActivationQuant, load_inverse_scale, quant_options, quantize_value


def reference(x: Any, eps: float, residual: Any | None = None) -> tuple[Any, Any]:
    """Return the sum and the sum divided by its root mean square, in plain PyTorch."""
    total = x.float() if residual is None else x.float() + residual.float()
    return total, total * torch.rsqrt(total.square().mean(1, keepdim=True) + eps)


def rms_norm(x: Any, eps: float, residual: Any | None = None, quant: ActivationQuant | None = None) -> tuple[Any, Any]:
    """Return x + residual, and that divided by its root mean square: quantized, or in the dtype of x."""
    rows, width = x.shape
    total = x if residual is None else torch.empty_like(x)
    out = torch.empty_like(x) if quant is None else quant.empty(rows, width)
    _launch(x, residual, total, out, None, eps, quant)
    return total, out


def add_and_sum_squares(x: Any, residual: Any, square_sums: Any) -> Any:
    """Return x + residual, and write the sum of squares of each row to `square_sums` in fp32."""
    total = torch.empty_like(x)
    _launch(x, residual, total, None, square_sums, 0.0, None)
    return total


def _launch(
    x: Any, residual: Any | None, total: Any, out: Any | None, square_sums: Any | None, eps: float,
    quant: ActivationQuant | None,
) -> None:  # fmt: skip
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    rows_per_program = max(1, min(4, 4096 // block))
    _rms_norm[(triton.cdiv(rows, rows_per_program),)](
        x, residual, total, out, square_sums, rows, width, eps,
        block=block, rows_per_program=rows_per_program, num_warps=2 if block <= 512 else 4, **quant_options(quant),
    )  # fmt: skip


@triton.jit
def _rms_norm(
    x, residual, total, out, square_sums, rows, width, eps, inverse_scales,
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
    if residual is not None:
        value += tl.load(residual + at, mask=is_inside, other=0.0).to(tl.float32)
        tl.store(total + at, value.to(total.dtype.element_ty), mask=is_inside)
    square_sum = tl.sum(value * value, axis=1)
    if square_sums is not None:
        tl.store(square_sums + row, square_sum, mask=row < rows)
    if out is not None:
        value *= tl.rsqrt(square_sum / width + eps)[:, None]
        if max_value > 0:
            value = quantize_value(value, inverse_scale, max_value)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=is_inside)
