"""LayerNorm of each token, with what is added in front of it; for the next product in eight bits too."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.dependent import launching, let_next_start, wait_for_previous
from hasten.kernels.squeeze import Squeeze, factor_of, settings, squeezed


def reference(x: Any, scale: Any, shift: Any, eps: float, bias: Any | None = None, residual: Any | None = None) -> Any:
    total = x.float()
    if bias is not None:
        total = total + bias.float()
    if residual is not None:
        total = total + residual.float()
    return torch.nn.functional.layer_norm(total, total.shape[-1:], scale.float(), shift.float(), eps)


def layer_norm(
    x: Any,
    scale: Any,
    shift: Any,
    eps: float,
    bias: Any | None = None,
    residual: Any | None = None,
    *,
    is_dependent: bool = False,
) -> Any:
    """Of x + bias + residual: what a product leaves to be done rides along."""
    return layer_norms(x, scale, shift, eps, bias, residual, is_dependent=is_dependent)[0]


def layer_norms(
    x: Any,
    scale: Any,
    shift: Any,
    eps: float,
    bias: Any | None = None,
    residual: Any | None = None,
    squeeze: Squeeze | None = None,
    *,
    is_dependent: bool = False,
) -> tuple[Any, Any]:
    """The same twice: for who adds to it, and for who multiplies, squeezed where that is asked for."""
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=scale.dtype, device=x.device)
    narrow = out if squeeze is None else squeeze.empty(rows, width)
    block = triton.next_power_of_2(width)
    # A few rows a program: one alone is over before it is launched, unless it has twice to write.
    per_program = 1 if squeeze is not None and block > 512 else max(1, min(4, 4096 // block))
    _norm[(triton.cdiv(rows, per_program),)](
        x,
        x if bias is None else bias,
        x if residual is None else residual,
        scale,
        shift,
        x if squeeze is None else squeeze.factors,
        out,
        narrow,
        rows,
        width,
        eps,
        has_bias=bias is not None,
        has_residual=residual is not None,
        block=block,
        per_program=per_program,
        is_dependent=is_dependent,
        num_warps=2 if block <= 512 else 4,
        **settings(squeeze),
        **launching(is_dependent),
    )
    return out, narrow


@triton.jit
def _norm(
    x,
    bias,
    residual,
    scale,
    shift,
    factors,
    out,
    narrow,
    rows,
    width,
    eps,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    largest: tl.constexpr,
    is_uniform: tl.constexpr,
    block: tl.constexpr,
    per_program: tl.constexpr,
    is_dependent: tl.constexpr,
):
    row = tl.program_id(0) * per_program + tl.arange(0, per_program)
    column = tl.arange(0, block)
    is_column = column < width
    is_inside = (row < rows)[:, None] & is_column[None, :]
    at = row[:, None] * width + column[None, :]
    scales = tl.load(scale + column, mask=is_column, other=0.0).to(tl.float32)
    shifts = tl.load(shift + column, mask=is_column, other=0.0).to(tl.float32)
    if largest > 0:
        factor = factor_of(factors, column[None, :], is_column[None, :], is_uniform)
    if is_dependent:
        let_next_start()
        wait_for_previous()
    value = tl.load(x + at, mask=is_inside, other=0.0).to(tl.float32)
    if has_bias:
        value += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if has_residual:
        value += tl.load(residual + at, mask=is_inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, axis=1) / width
    centred = tl.where(is_inside, value - mean[:, None], 0.0)
    normal = centred * tl.rsqrt(tl.sum(centred * centred, axis=1) / width + eps)[:, None]
    value = normal * scales[None, :] + shifts[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=is_inside)
    if largest > 0:
        value = squeezed(value, factor, largest)
        tl.store(narrow + at, value.to(narrow.dtype.element_ty), mask=is_inside)
