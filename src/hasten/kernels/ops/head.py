"""A dense layer of the task head: linear, bias and activation over some or all tokens, in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.ops.activation import gelu


@dataclass(frozen=True, slots=True)
class _DenseTileConfig:
    """The output tile of a program, the depth it loads per iteration (None: all of it), and its warps."""

    rows: int
    columns: int
    depth: int | None
    warps: int


# Measured on an H200. Hidden states are in half precision; tensor cores multiply them with fp32 weights in three TF32
# passes. The outputs of a preceding dense layer are fp32, and are multiplied without tensor cores.
_SINGLE_ROW = _DenseTileConfig(1, 16, None, 4)
_FEW_ROWS = _DenseTileConfig(16, 32, 64, 4)
_MANY_ROWS = _DenseTileConfig(64, 32, 64, 4)
_FP32_ROWS = _DenseTileConfig(32, 64, 32, 2)


def reference(x: Any, rows: Any | None, weight: Any, bias: Any, activation: str = "") -> Any:
    """Compute the dense layer in plain PyTorch."""
    selected = x.float() if rows is None else x.float()[rows.clamp(max=len(x) - 1)]
    y = torch.nn.functional.linear(selected, weight.float(), bias.float())
    if activation == "tanh":
        return torch.tanh(y)
    return getattr(torch.nn.functional, activation)(y) if activation else y


def dense(x: Any, rows: Any | None, weight: Any, bias: Any, activation: str = "") -> Any:
    """Apply the layer in fp32 to the rows of x listed in `rows`, or to all; indices are clamped to the last row."""
    count = x.shape[0] if rows is None else rows.shape[0]
    columns, width = weight.shape
    out = torch.empty((count, columns), dtype=torch.float32, device=x.device)
    tile_config = _tile_config(count, columns, is_fp32=x.dtype == torch.float32)
    _dense[(triton.cdiv(columns, tile_config.columns), triton.cdiv(count, tile_config.rows))](
        x, rows, weight, bias, out, count, columns, x.shape[0], width,
        activation=activation, block_depth=tile_config.depth or triton.next_power_of_2(width),
        block_columns=tile_config.columns, block_rows=tile_config.rows, num_warps=tile_config.warps,
    )  # fmt: skip
    return out


def _tile_config(count: int, columns: int, *, is_fp32: bool) -> _DenseTileConfig:
    """Use one row per program while that makes few programs, as with few columns."""
    is_narrow = columns <= _SINGLE_ROW.columns
    if is_fp32:
        return _SINGLE_ROW if is_narrow or count <= 128 else _FP32_ROWS
    if count <= (1024 if is_narrow else 16):
        return _SINGLE_ROW
    return _FEW_ROWS if count <= 128 else _MANY_ROWS


@triton.jit
def _dense(
    x, rows, weight, bias, out, count, columns, tokens, width, activation: tl.constexpr,
    block_depth: tl.constexpr, block_columns: tl.constexpr, block_rows: tl.constexpr,
):  # fmt: skip
    """Multiply one row over its whole depth; or many rows on tensor cores, in blocks of the depth."""
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    is_column, is_row = column < columns, row < count
    token = row
    if rows is not None:
        token = tl.minimum(tl.load(rows + row, mask=is_row, other=0), tokens - 1)
    total = tl.zeros((block_rows, block_columns), tl.float32)
    for start in range(0, width, block_depth):
        k = start + tl.arange(0, block_depth)
        is_k = k < width
        at = x + token[:, None].to(tl.int64) * width + k[None, :]
        values = tl.load(at, mask=is_row[:, None] & is_k[None, :], other=0.0)
        weight_at = weight + column[:, None].to(tl.int64) * width + k[None, :]
        weights = tl.load(weight_at, mask=is_column[:, None] & is_k[None, :], other=0.0)
        # Products of half-precision values are exact in all branches; fp32 values keep their precision.
        if block_rows == 1:
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
        total = gelu(total, "gelu")
    at = out + row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(at, total, mask=is_row[:, None] & is_column[None, :])
