"""For few tokens: the product back to the model's width, in slices of its depth, added to a sum that was started."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from hasten.kernels.dependent import launching, let_next_start, wait_for_previous
from hasten.kernels.squeeze import Squeeze, factor_of, fitted, settings


def reference(x: Any, weight: Any, total: Any) -> Any:
    return total + x.float() @ weight.float().T


def contract(
    x: Any,
    weight: Any,
    total: Any,
    step: Any | None = None,
    squeeze: Squeeze | None = None,
    *,
    rows: int = 16,
    columns: int = 64,
    depth: int = 512,
    warps: int = 4,
    is_dependent: bool = False,
) -> None:
    """total (tokens, width) in fp32 += x · weightᵀ; `columns` and `depth` must divide the weight's sides.

    See expand for a weight of eight bits.
    """
    tokens, inner = x.shape
    width = weight.shape[0]
    _contract[(width // columns, inner // depth, triton.cdiv(tokens, rows))](
        x,
        weight,
        weight if step is None else step,
        weight if squeeze is None else squeeze.factors,
        total,
        tokens,
        inner,
        width,
        has_steps=step is not None and step.numel() > 1,
        rows=rows,
        columns=columns,
        depth=depth,
        is_dependent=is_dependent,
        num_warps=warps,
        **settings(squeeze),
        **launching(is_dependent),
    )


@triton.jit
def _contract(
    x,
    weight,
    step,
    factors,
    total,
    tokens,
    inner,
    width,
    has_steps: tl.constexpr,
    largest: tl.constexpr,
    is_uniform: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    is_dependent: tl.constexpr,
):
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    k = tl.program_id(1) * depth + tl.arange(0, depth)
    weights = tl.load(weight + column[None, :] * inner + k[:, None])
    if largest > 0:
        factor = factor_of(factors, k[None, :], (k < inner)[None, :], is_uniform)
        steps = tl.load(step + column)[None, :] if has_steps else tl.load(step)
    if is_dependent:
        let_next_start()
        wait_for_previous()
    row = tl.program_id(2) * rows + tl.arange(0, rows)
    is_row = (row < tokens)[:, None]
    values = tl.load(x + row[:, None] * inner + k[None, :], mask=is_row, other=0.0)
    if largest > 0:
        taken = fitted(values.to(tl.float32), factor, largest)
        part = tl.dot(taken.to(values.dtype), weights.to(values.dtype)) * steps
    else:
        part = tl.dot(values, weights)
    tl.atomic_add(total + row[:, None] * width + column[None, :], part, mask=is_row, sem="relaxed")
