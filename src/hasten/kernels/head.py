"""A layer behind the encoder: some rows of its states through a product, bias and activation."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.activation import gelu

_DEPTH = 128


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
    _dense[(triton.cdiv(columns, 16), triton.cdiv(count, 16))](
        x,
        x if rows is None else rows,
        weight,
        bias,
        out,
        count,
        columns,
        x.shape[0],
        width=width,
        has_rows=rows is not None,
        activation=activation,
        depth=min(_DEPTH, triton.next_power_of_2(width)),
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
    width: tl.constexpr,
    has_rows: tl.constexpr,
    activation: tl.constexpr,
    depth: tl.constexpr,
):
    column = tl.program_id(0) * 16 + tl.arange(0, 16)
    row = tl.program_id(1) * 16 + tl.arange(0, 16)
    is_column, is_row = column < columns, row < count
    place = row
    if has_rows:
        place = tl.minimum(tl.load(rows + row, mask=is_row, other=0), tokens - 1)
    total = tl.zeros((16, 16), tl.float32)
    for start in range(0, width, depth):
        k = start + tl.arange(0, depth)
        is_k = k < width
        values = tl.load(x + place[:, None] * width + k[None, :], mask=is_row[:, None] & is_k[None, :], other=0.0)
        weights = tl.load(
            weight + column[None, :] * width + k[:, None], mask=is_column[None, :] & is_k[:, None], other=0.0
        )
        # In full precision: this is little work, and it decides.
        total = tl.dot(values.to(tl.float32), weights.to(tl.float32), total, input_precision="ieee")
    total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if activation == "tanh":
        total = 2.0 * tl.sigmoid(2.0 * total) - 1.0
    elif activation == "relu":
        total = tl.maximum(total, 0.0)
    elif activation == "gelu":
        total = gelu(total, False)
    tl.store(out + row[:, None] * columns + column[None, :], total, mask=is_row[:, None] & is_column[None, :])
