"""A layer behind the encoder: some rows of its states through a product, bias and activation."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.activation import gelu

# Columns and rows of a program, which holds its weights while it goes through its rows.
_COLUMNS, _ROWS = 16, 8


def reference(x: Any, rows: Any | None, weight: Any, bias: Any, activation: str = "") -> Any:
    chosen = x.float() if rows is None else x.float()[rows.clamp(max=len(x) - 1)]
    y = torch.nn.functional.linear(chosen, weight.float(), bias.float())
    if activation == "tanh":
        return torch.tanh(y)
    return getattr(torch.nn.functional, activation)(y) if activation else y


def dense(x: Any, rows: Any | None, weight: Any, bias: Any, activation: str = "") -> Any:
    """In fp32 of the rows of x that `rows` names, or of all; a row behind the last is the last."""
    count = x.shape[0] if rows is None else rows.shape[0]
    columns, width = weight.shape
    out = torch.empty((count, columns), dtype=torch.float32, device=x.device)
    rows_at_once = min(_ROWS, triton.next_power_of_2(count))
    _dense[(triton.cdiv(columns, _COLUMNS), triton.cdiv(count, rows_at_once))](
        x,
        x if rows is None else rows,
        weight,
        bias,
        out,
        count,
        columns,
        x.shape[0],
        width,
        has_rows=rows is not None,
        activation=activation,
        block=triton.next_power_of_2(width),
        columns_at_once=_COLUMNS,
        rows_at_once=rows_at_once,
        num_warps=4,
    )
    return out


@triton.jit
def _dense(
    x,
    rows,
    weight,
    bias,
    out,
    count,
    columns,
    tokens,
    width,
    has_rows: tl.constexpr,
    activation: tl.constexpr,
    block: tl.constexpr,
    columns_at_once: tl.constexpr,
    rows_at_once: tl.constexpr,
):
    """Without the tensor cores: there are few rows, and what they decide is worth full precision."""
    column = tl.program_id(0) * columns_at_once + tl.arange(0, columns_at_once)
    k = tl.arange(0, block)
    is_column, is_k = column < columns, k < width
    at = weight + column[:, None] * width + k[None, :]
    weights = tl.load(at, mask=is_column[:, None] & is_k[None, :], other=0.0)
    biases = tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
    for step in tl.static_range(rows_at_once):
        # Behind the last one, the last once more.
        row = tl.minimum(tl.program_id(1) * rows_at_once + step, count - 1)
        place = row
        if has_rows:
            place = tl.minimum(tl.load(rows + row), tokens - 1)
        values = tl.load(x + place.to(tl.int64) * width + k, mask=is_k, other=0.0).to(tl.float32)
        total = tl.sum(weights.to(tl.float32) * values[None, :], 1) + biases
        if activation == "tanh":
            total = 2.0 * tl.sigmoid(2.0 * total) - 1.0
        elif activation == "relu":
            total = tl.maximum(total, 0.0)
        elif activation == "gelu":
            total = gelu(total, False)
        tl.store(out + row.to(tl.int64) * columns + column, total, mask=is_column)
