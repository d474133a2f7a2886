"""A layer behind the encoder: some rows of its states through a product, bias and activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.activation import gelu


@dataclass(frozen=True, slots=True)
class _Cut:
    """What a program computes, how much of the depth it takes at once (all, where none is said), and its warps."""

    rows: int
    columns: int
    depth: int | None
    warps: int


# Found by measuring on an H200. States come in halves, which tensor cores multiply with weights of full precision in
# three parts; what a layer before gives is in full precision too, and goes without them.
_ROW = _Cut(1, 16, None, 4)
_ROWS, _MORE, _FULL = _Cut(16, 32, 64, 4), _Cut(64, 32, 64, 4), _Cut(32, 64, 32, 2)


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
    cut = _cut(count, columns, is_full=x.dtype == torch.float32)
    _dense[(triton.cdiv(columns, cut.columns), triton.cdiv(count, cut.rows))](
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
        depth=cut.depth or triton.next_power_of_2(width),
        columns_at_once=cut.columns,
        rows_at_once=cut.rows,
        num_warps=cut.warps,
    )
    return out


def _cut(count: int, columns: int, *, is_full: bool) -> _Cut:
    """One row at a time as long as programs are few: those of few columns are."""
    is_narrow = columns <= _ROW.columns
    if is_full:
        return _ROW if is_narrow or count <= 128 else _FULL
    if count <= (1024 if is_narrow else 16):
        return _ROW
    return _ROWS if count <= 128 else _MORE


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
    depth: tl.constexpr,
    columns_at_once: tl.constexpr,
    rows_at_once: tl.constexpr,
):
    """A row at a time, all of its depth at once; or many rows, some of it at a time, by the tensor cores."""
    column = tl.program_id(0) * columns_at_once + tl.arange(0, columns_at_once)
    row = tl.program_id(1) * rows_at_once + tl.arange(0, rows_at_once)
    is_column, is_row = column < columns, row < count
    place = row
    if has_rows:
        place = tl.minimum(tl.load(rows + row, mask=is_row, other=0), tokens - 1)
    total = tl.zeros((rows_at_once, columns_at_once), tl.float32)
    for start in range(0, width, depth):
        k = start + tl.arange(0, depth)
        is_k = k < width
        at = x + place[:, None].to(tl.int64) * width + k[None, :]
        values = tl.load(at, mask=is_row[:, None] & is_k[None, :], other=0.0)
        there = weight + column[:, None].to(tl.int64) * width + k[None, :]
        weights = tl.load(there, mask=is_column[:, None] & is_k[None, :], other=0.0)
        # Halves are multiplied exactly in both ways; what comes in full precision, from a layer before, keeps it.
        if rows_at_once == 1:
            total += tl.sum(values.to(tl.float32) * weights.to(tl.float32), 1)[None, :]
        elif values.dtype == weights.dtype:
            total = tl.dot(values, weights.T, total, input_precision="ieee")
        else:
            total = tl.dot(values.to(tl.float32), weights.to(tl.float32).T, total, input_precision="tf32x3")
    total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if activation == "tanh":
        total = 2.0 * tl.sigmoid(2.0 * total) - 1.0
    elif activation == "relu":
        total = tl.maximum(total, 0.0)
    elif activation == "gelu":
        total = gelu(total, False)
    at = out + row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(at, total, mask=is_row[:, None] & is_column[None, :])
