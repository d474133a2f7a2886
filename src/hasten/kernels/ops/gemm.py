"""8-bit GEMM in Triton with a fused epilogue: scale, bias, GELU, quantization.

It accumulates in fp32 or int32. It complements cuBLASLt, which has no exact GELU epilogue and no per-channel scales for
int8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.ops.activation import gelu
from hasten.kernels.ops.activation import reference as gelu_reference
from hasten.kernels.ops.quantize import FP8, ActivationQuant, load_inverse_scale, quant_options, quantize_value
from hasten.kernels.ops.quantize import reference as quantize_reference

# Rows of tiles that reuse the same weights while those are in the L2 cache.
_GROUP = 8


@dataclass(frozen=True, slots=True)
class TileConfig:
    """The output tile of a program, the depth it loads per iteration, its warps and its pipeline stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.depth}x{self.warps}x{self.stages}"

    @classmethod
    def parse(cls, text: str) -> TileConfig:
        """Parse the form that `str` gives."""
        return cls(*map(int, text.split("x")))


# Common configurations for tensor cores of Hopper, Ada and Ampere; tuning selects the fastest.
TILE_CONFIGS = (
    TileConfig(128, 256, 128, 8, 3),
    TileConfig(128, 128, 128, 8, 4),
    TileConfig(128, 128, 64, 4, 4),
    TileConfig(64, 256, 128, 8, 3),
    TileConfig(64, 128, 128, 4, 4),
    TileConfig(64, 64, 128, 4, 4),
)
# For shapes that were not tuned.
DEFAULT_TILES = TileConfig(128, 128, 64, 4, 4)


def reference(
    x: Any,
    weight: Any,
    scale: Any,
    bias: Any | None = None,
    gelu_kind: str | None = None,
    quant: ActivationQuant | None = None,
) -> Any:
    """Compute the linear layer in plain PyTorch."""
    # Accumulate in fp64, where sums of 8-bit products are exact.
    y = (x.double() @ weight.double().T).float() * scale
    if bias is not None:
        y = y + bias.float()
    if gelu_kind is not None:
        y = gelu_reference(y, gelu_kind)
    return y if quant is None else quantize_reference(y, quant)


def gemm(
    x: Any,
    weight: Any,
    scale: Any,
    bias: Any | None = None,
    *,
    dtype: Any,
    gelu_kind: str | None = None,
    quant: ActivationQuant | None = None,
    tile_config: TileConfig = DEFAULT_TILES,
    fast_accum: bool = False,
) -> Any:
    """Return x (rows, depth) · weight (columns, depth)ᵀ · scale + bias, and GELU of it, in `dtype` or quantized.

    `fast_accum` accumulates fp8 in Hopper's tensor cores, with fewer bits than fp32 (PyTorch's `use_fast_accum`).
    """
    (rows, depth), columns = x.shape, weight.shape[0]
    shape = (rows, columns)
    out = torch.empty(shape, dtype=dtype, device=x.device) if quant is None else quant.empty(*shape)
    _gemm[(triton.cdiv(rows, tile_config.rows) * triton.cdiv(columns, tile_config.columns),)](
        x, weight, scale, bias, out, rows, columns, depth,
        has_channel_scales=scale.numel() > 1, gelu_kind=gelu_kind, is_fp8=x.dtype == FP8, fast_accum=fast_accum,
        is_depth_divisible=depth % tile_config.depth == 0,
        block_rows=tile_config.rows, block_columns=tile_config.columns, block_depth=tile_config.depth,
        group_rows=_GROUP, num_warps=tile_config.warps, num_stages=tile_config.stages, **quant_options(quant),
    )  # fmt: skip
    return out


@triton.jit
def _gemm(
    x, weight, scale, bias, out, rows, columns, depth, inverse_scales,
    has_channel_scales: tl.constexpr, gelu_kind: tl.constexpr, is_fp8: tl.constexpr, fast_accum: tl.constexpr,
    is_depth_divisible: tl.constexpr, max_value: tl.constexpr, is_per_tensor: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr, block_depth: tl.constexpr, group_rows: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    column_tiles = tl.cdiv(columns, block_columns)
    first_group_row = tile // (group_rows * column_tiles) * group_rows
    group_size = tl.minimum(tl.cdiv(rows, block_rows) - first_group_row, group_rows)
    row = (first_group_row + tile % (group_rows * column_tiles) % group_size) * block_rows + tl.arange(0, block_rows)
    column = tile % (group_rows * column_tiles) // group_size * block_columns + tl.arange(0, block_columns)
    k = tl.arange(0, block_depth)
    # Indices past an end wrap around and are never stored: loads without masks are faster.
    x_at = x + (row % rows)[:, None].to(tl.int64) * depth + k[None, :]
    weight_at = weight + (column % columns)[None, :].to(tl.int64) * depth + k[:, None]
    total = tl.zeros((block_rows, block_columns), tl.float32 if is_fp8 else tl.int32)
    for start in range(0, depth, block_depth):
        if is_depth_divisible:
            values, weights = tl.load(x_at), tl.load(weight_at)
        else:
            values = tl.load(x_at, mask=(start + k < depth)[None, :], other=0.0)
            weights = tl.load(weight_at, mask=(start + k < depth)[:, None], other=0.0)
        if is_fp8 and fast_accum:
            total = tl.dot(values, weights, total)
        elif is_fp8:
            # Hopper's tensor cores accumulate fp8 with fewer bits than fp32: limit that to one block of the depth.
            total = tl.dot(values, weights, total, max_num_imprecise_acc=block_depth)
        else:
            total = tl.dot(values, weights, total, out_dtype=tl.int32)
        x_at += block_depth
        weight_at += block_depth
    is_column = column < columns
    y = total.to(tl.float32)
    if has_channel_scales:
        y *= tl.load(scale + column, mask=is_column, other=0.0)[None, :]
    else:
        y *= tl.load(scale)
    if bias is not None:
        y += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if gelu_kind is not None:
        y = gelu(y, gelu_kind)
    if max_value > 0:
        inverse_scale = load_inverse_scale(inverse_scales, column[None, :], is_column[None, :], is_per_tensor)
        y = quantize_value(y, inverse_scale, max_value)
    at = out + row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=(row < rows)[:, None] & is_column[None, :])
