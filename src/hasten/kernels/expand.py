"""For few tokens: LayerNorm, the product it feeds, bias and GELU; and the start of the next sum, which it alone knows.

A block in BERT's order is LayerNorm(x + f(x)), and x is itself a LayerNorm's result that nobody has stored. Whoever
computes it anew for its product also writes x + bias of f, and the kernels that compute f add to that.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.activation import EXACT, TANH, gelu
from hasten.kernels.dependent import launching, let_next_start, wait_for_previous
from hasten.kernels.squeeze import Squeeze, factor_of, fitted, settings


def reference(
    total: Any, scale: Any, shift: Any, eps: float, weight: Any, bias: Any, next_bias: Any, kind: str | None = None
) -> tuple[Any, Any]:
    x = torch.nn.functional.layer_norm(total.float(), total.shape[-1:], scale.float(), shift.float(), eps)
    y = torch.nn.functional.linear(x, weight.float(), bias.float())
    if kind is not None:
        y = torch.nn.functional.gelu(y, approximate="tanh" if kind == TANH else "none")
    return y, x + next_bias.float()


def expand(
    total: Any,
    scale: Any,
    shift: Any,
    eps: float,
    weight: Any,
    bias: Any,
    next_bias: Any,
    out: Any,
    next_total: Any,
    kind: str | None = None,
    step: Any | None = None,
    squeeze: Squeeze | None = None,
    *,
    rows: int = 16,
    columns: int = 64,
    warps: int = 8,
    is_dependent: bool = False,
) -> None:
    """`total` (tokens, width) in fp32 is what was summed up; weight (out, width); `columns` must divide its rows.

    A weight of eight bits has a `step`, and is for values that the squeeze has fitted: not rounded, since few values
    are multiplied as they are.
    """
    tokens, width = total.shape
    count = weight.shape[0] // columns
    _expand[(count, triton.cdiv(tokens, rows))](
        total,
        scale,
        shift,
        weight,
        bias,
        next_bias,
        weight if step is None else step,
        weight if squeeze is None else squeeze.factors,
        out,
        next_total,
        tokens,
        weight.shape[0],
        eps,
        width=width,
        block=triton.next_power_of_2(width),
        rows=rows,
        columns=columns,
        share=triton.cdiv(width, count),
        has_gelu=kind is not None,
        is_tanh=kind not in (None, EXACT),
        has_steps=step is not None and step.numel() > 1,
        is_dependent=is_dependent,
        num_warps=warps,
        **settings(squeeze),
        **launching(is_dependent),
    )


@triton.jit
def _expand(
    total,
    scale,
    shift,
    weight,
    bias,
    next_bias,
    step,
    factors,
    out,
    next_total,
    tokens,
    out_width,
    eps,
    width: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    share: tl.constexpr,
    has_gelu: tl.constexpr,
    is_tanh: tl.constexpr,
    has_steps: tl.constexpr,
    largest: tl.constexpr,
    is_uniform: tl.constexpr,
    is_dependent: tl.constexpr,
):
    place = tl.program_id(0)
    column = place * columns + tl.arange(0, columns)
    k = tl.arange(0, block)
    is_k = k < width
    weights = tl.load(weight + column[None, :] * width + k[:, None], mask=is_k[:, None], other=0.0)
    biases = tl.load(bias + column).to(tl.float32)
    scales = tl.load(scale + k, mask=is_k, other=0.0).to(tl.float32)
    shifts = tl.load(shift + k, mask=is_k, other=0.0).to(tl.float32)
    # Of the next sum every program starts its share of the columns.
    is_own = (k >= place * share) & (k < (place + 1) * share) & is_k
    next_biases = tl.load(next_bias + k, mask=is_own, other=0.0).to(tl.float32)
    if largest > 0:
        factor = factor_of(factors, k[None, :], is_k[None, :], is_uniform)
        steps = tl.load(step + column)[None, :] if has_steps else tl.load(step)
    if is_dependent:
        let_next_start()
        wait_for_previous()
    row = tl.program_id(1) * rows + tl.arange(0, rows)
    is_row = row < tokens
    is_inside = is_row[:, None] & is_k[None, :]
    value = tl.load(total + row[:, None] * width + k[None, :], mask=is_inside, other=0.0)
    mean = tl.sum(value, 1) / width
    centred = tl.where(is_inside, value - mean[:, None], 0.0)
    normal = centred * tl.rsqrt(tl.sum(centred * centred, 1) / width + eps)[:, None]
    x = normal * scales[None, :] + shifts[None, :]
    if largest > 0:
        half: tl.constexpr = out.dtype.element_ty
        taken = fitted(x, factor, largest)
        y = tl.dot(taken.to(half), weights.to(half)) * steps + biases[None, :]
    else:
        y = tl.dot(x.to(weights.dtype), weights) + biases[None, :]
    if has_gelu:
        y = gelu(y, is_tanh)
    tl.store(out + row[:, None] * out_width + column[None, :], y.to(out.dtype.element_ty), mask=is_row[:, None])
    at = next_total + row[:, None] * width + k[None, :]
    tl.store(at, x + next_biases[None, :], mask=is_row[:, None] & is_own[None, :])
