"""Norm + linear layer + rotary embeddings or gated activation of a pre-norm layer, for small batches.

The residual stays in fp32 and in place: the other kernels of a layer accumulate into it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.ops.glu import gate
from hasten.kernels.ops.glu import reference as glu_reference
from hasten.kernels.ops.pdl import pdl_options, wait_for_previous_kernel
from hasten.kernels.ops.quantize import ActivationQuant, clamp_to_range, load_inverse_scale
from hasten.kernels.ops.rotary import Rotation, rotate_pairs
from hasten.kernels.ops.rotary import reference as rotary_reference
from hasten.kernels.ops.small_batch import Tile, weight_options

_TILE = Tile(16, 64, 8)


def reference(
    x: Any, eps: float | None, weight: Any, rotation: Rotation | None = None, glu_kind: str | None = None
) -> Any:
    """Compute the linear layer with its norm, and rotation or gated activation, in plain PyTorch."""
    if eps is not None:
        x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps)
    y = x.float() @ weight.float().T
    if rotation is not None:
        return rotary_reference(y, rotation)
    return y if glu_kind is None else glu_reference(y, glu_kind)


def rms_linear(
    x: Any,
    eps: float | None,
    weight: Any,
    out: Any,
    rotation: Rotation | None = None,
    glu_kind: str | None = None,
    scale: Any | None = None,
    quant: ActivationQuant | None = None,
    *,
    tile: Tile = _TILE,
    use_pdl: bool = False,
) -> None:
    """Write the layer's outputs for x (tokens, width) in fp32, divided by its root mean square unless `eps` is None.

    The tile's columns must divide those of the weight. See `small_batch` for `scale` and `quant`.
    """
    tokens, width = x.shape
    columns = weight.shape[0]
    rotary = None if rotation is None else rotation.rotary
    _rms_linear[(columns // tile.columns, triton.cdiv(tokens, tile.rows))](
        x, weight, out, tokens, columns, 0.0 if eps is None else eps,
        None if rotation is None else rotation.positions,
        None if rotary is None else rotary.table,
        head_size=0 if rotary is None else rotary.head_size, glu_kind=glu_kind, has_norm=eps is not None,
        width=width, block=triton.next_power_of_2(width), block_rows=tile.rows, block_columns=tile.columns,
        num_warps=tile.warps, **weight_options(scale, quant), **pdl_options(use_pdl),
    )  # fmt: skip


@triton.jit
def _rms_linear(
    x, weight, out, tokens, columns, eps, positions, table,
    scale, inverse_scales, has_channel_scales: tl.constexpr, max_value: tl.constexpr, is_per_tensor: tl.constexpr,
    head_size: tl.constexpr, glu_kind: tl.constexpr, has_norm: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr, use_pdl: tl.constexpr,
):  # fmt: skip
    first_column = tl.program_id(0) * block_columns
    column = first_column + tl.arange(0, block_columns)
    k = tl.arange(0, block)
    is_k = k < width
    weights = tl.load(weight + column[None, :] * width + k[:, None], mask=is_k[:, None], other=0.0)
    if max_value > 0:
        inverse_scale = load_inverse_scale(inverse_scales, k[None, :], is_k[None, :], is_per_tensor)
        scales = tl.load(scale + column)[None, :] if has_channel_scales else tl.load(scale)
    wait_for_previous_kernel(use_pdl)
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    is_row = row < tokens
    value = tl.load(x + row[:, None] * width + k[None, :], mask=is_row[:, None] & is_k[None, :], other=0.0)
    if has_norm:
        value *= tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]
    if max_value > 0:
        compute_dtype: tl.constexpr = out.dtype.element_ty
        clamped = clamp_to_range(value, inverse_scale, max_value)
        y = tl.dot(clamped.to(compute_dtype), weights.to(compute_dtype)) * scales
    else:
        y = tl.dot(value.to(weights.dtype), weights)
    if positions is not None:
        rotated_columns = columns // 3 * 2
        if first_column < rotated_columns:
            y = rotate_pairs(
                y, tl.where(is_row, row, 0), column, rotated_columns, positions, table,
                True, head_size, block_rows, block_columns,
            )  # fmt: skip
    if glu_kind is not None:
        gated = gate(y, glu_kind, block_rows, block_columns)
        half = first_column // 2 + tl.arange(0, block_columns // 2)
        at = out + row[:, None] * (columns // 2) + half[None, :]
        tl.store(at, gated.to(out.dtype.element_ty), mask=is_row[:, None])
    else:
        tl.store(out + row[:, None] * columns + column[None, :], y.to(out.dtype.element_ty), mask=is_row[:, None])
