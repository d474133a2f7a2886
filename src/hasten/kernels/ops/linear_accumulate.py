"""Split-K linear layer for small batches: accumulates into a sum that already holds the residual and the bias."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from hasten.kernels.ops.pdl import pdl_options, wait_for_previous_kernel
from hasten.kernels.ops.quantize import ActivationQuant, clamp_to_range, load_inverse_scale
from hasten.kernels.ops.small_batch import Tile, weight_options

_TILE = Tile(16, 64, 4, 512)


def reference(x: Any, weight: Any, total: Any) -> Any:
    """Compute the linear layer and the sum in plain PyTorch."""
    return total + x.float() @ weight.float().T


def linear_accumulate(
    x: Any,
    weight: Any,
    total: Any,
    scale: Any | None = None,
    quant: ActivationQuant | None = None,
    *,
    tile: Tile = _TILE,
    use_pdl: bool = False,
) -> None:
    """Add x · weightᵀ to `total` (tokens, width) in fp32; see `small_batch` for `scale` and `quant`.

    The tile's columns and depth must divide the weight's sides.
    """
    tokens, inner = x.shape
    width = weight.shape[0]
    _linear_accumulate[(width // tile.columns, inner // tile.depth, triton.cdiv(tokens, tile.rows))](
        x, weight, total, tokens, inner, width,
        rows=tile.rows, columns=tile.columns, depth=tile.depth, num_warps=tile.warps,
        **weight_options(scale, quant), **pdl_options(use_pdl),
    )  # fmt: skip


@triton.jit
def _linear_accumulate(
    x, weight, total, tokens, inner, width, scale, inverse_scales,
    has_channel_scales: tl.constexpr, max_value: tl.constexpr, is_per_tensor: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr, use_pdl: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    k = tl.program_id(1) * depth + tl.arange(0, depth)
    weights = tl.load(weight + column[None, :] * inner + k[:, None])
    if max_value > 0:
        inverse_scale = load_inverse_scale(inverse_scales, k[None, :], (k < inner)[None, :], is_per_tensor)
        scales = tl.load(scale + column)[None, :] if has_channel_scales else tl.load(scale)
    wait_for_previous_kernel(use_pdl)
    row = tl.program_id(2) * rows + tl.arange(0, rows)
    is_row = (row < tokens)[:, None]
    values = tl.load(x + row[:, None] * inner + k[None, :], mask=is_row, other=0.0)
    if max_value > 0:
        clamped = clamp_to_range(values.to(tl.float32), inverse_scale, max_value)
        part = tl.dot(clamped.to(values.dtype), weights.to(values.dtype)) * scales
    else:
        part = tl.dot(values, weights)
    tl.atomic_add(total + row[:, None] * width + column[None, :], part, mask=is_row, sem="relaxed")
