"""Fused attention + output projection for small batches: each head accumulates its part of the projection."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.ops.attention import reference as attention_reference
from hasten.kernels.ops.pdl import pdl_options, wait_for_previous_kernel
from hasten.kernels.ops.quantize import ActivationQuant, clamp_to_range, load_inverse_scale
from hasten.kernels.ops.small_batch import Tile, weight_options

_TILE = Tile(16, 128, 4)


def reference(qkv: Any, sequence: Any, weight: Any, total: Any, heads: int, bias: Any | None = None) -> Any:
    """Compute attention and its output projection in plain PyTorch."""
    starts = torch.nn.functional.pad(torch.bincount(sequence).cumsum(0), (1, 0))
    return total + attention_reference(qkv, starts, heads, bias) @ weight.float().T


def attention_out_proj(
    qkv: Any,
    sequence: Any,
    weight: Any,
    total: Any,
    heads: int,
    bias: Any | None = None,
    scale: Any | None = None,
    quant: ActivationQuant | None = None,
    *,
    tile: Tile = _TILE,
    use_pdl: bool = False,
) -> None:
    """Add the projected attention output to `total` (tokens, width) in fp32.

    Every program loads all tokens as keys, so the batch must be small; `sequence` maps tokens to sequences. See
    `attention` for `bias`, and `small_batch` for `scale` and `quant`.
    """
    tokens, width = total.shape
    size = width // heads
    _attention_out_proj[(heads, triton.cdiv(width, tile.columns), triton.cdiv(tokens, tile.rows))](
        qkv, sequence, weight, bias, total, tokens, size**-0.5, 0 if bias is None else bias.shape[1],
        width=width, size=size, rows=tile.rows, keys=max(16, triton.next_power_of_2(tokens)), columns=tile.columns,
        num_warps=tile.warps, **weight_options(scale, quant), **pdl_options(use_pdl),
    )  # fmt: skip


@triton.jit
def _attention_out_proj(
    qkv, sequence, weight, bias, total, tokens, softmax_scale, distance_count, scale, inverse_scales,
    has_channel_scales: tl.constexpr, max_value: tl.constexpr, is_per_tensor: tl.constexpr,
    width: tl.constexpr, size: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr, columns: tl.constexpr,
    use_pdl: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * size + tl.arange(0, size)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    is_column = (column < width)[None, :]
    weights = tl.load(weight + column[None, :] * width + channel[:, None], mask=is_column, other=0.0)
    if max_value > 0:
        inverse_scale = load_inverse_scale(inverse_scales, channel[None, :], (channel < width)[None, :], is_per_tensor)
        scales = tl.load(scale + column[None, :], mask=is_column, other=0.0) if has_channel_scales else tl.load(scale)
    wait_for_previous_kernel(use_pdl)
    row = tl.program_id(2) * rows + tl.arange(0, rows)
    key = tl.arange(0, keys)
    is_row, is_key = row < tokens, key < tokens
    q = tl.load(qkv + row[:, None] * 3 * width + channel[None, :], mask=is_row[:, None], other=0.0)
    k = tl.load(qkv + width + key[None, :] * 3 * width + channel[:, None], mask=is_key[None, :], other=0.0)
    v = tl.load(qkv + 2 * width + key[:, None] * 3 * width + channel[None, :], mask=is_key[:, None], other=0.0)
    query_sequence = tl.load(sequence + row, mask=is_row, other=-1)
    key_sequence = tl.load(sequence + key, mask=is_key, other=-2)
    scores = tl.dot(q, k) * (softmax_scale * 1.4426950408889634)
    if bias is not None:
        distance = key[None, :] - row[:, None] + distance_count // 2
        is_near = (distance >= 0) & (distance < distance_count)
        at = bias + tl.program_id(0) * distance_count + distance
        scores += tl.load(at, mask=is_near, other=0.0).to(tl.float32) * 1.4426950408889634
    is_same_sequence = query_sequence[:, None] == key_sequence[None, :]
    # Finite instead of −inf: rows past the end have no keys, and must not become NaN.
    scores = tl.where(is_same_sequence, scores, -1.0e30)
    probabilities = tl.where(is_same_sequence, tl.math.exp2(scores - tl.max(scores, 1)[:, None]), 0.0)
    context = tl.dot(probabilities.to(v.dtype), v) / tl.maximum(tl.sum(probabilities, 1), 1e-30)[:, None]
    if max_value > 0:
        context = clamp_to_range(context, inverse_scale, max_value)
        part = tl.dot(context.to(v.dtype), weights.to(v.dtype)) * scales
    else:
        part = tl.dot(context.to(weights.dtype), weights)
    is_inside = is_row[:, None] & is_column
    tl.atomic_add(total + row[:, None] * width + column[None, :], part, mask=is_inside, sem="relaxed")
