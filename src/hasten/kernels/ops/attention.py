"""Self-attention over packed sequences of mixed lengths (varlen), all in one launch.

With a window, a query attends to the keys at most `window` positions away, and only their blocks are visited: time
grows linearly with the length.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.ops.quantize import ActivationQuant, load_inverse_scale, quant_options, quantize_value


@dataclass(frozen=True, slots=True)
class AttentionTileConfig:
    """Query rows per program, keys per iteration, warps, and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


# Keyed by the largest mean capacity per sequence of a bucket, which may hold half as many sequences, twice as long.
# Measured on an H200.
TILE_CONFIGS = {24: AttentionTileConfig(16, 16, 1, 3), 96: AttentionTileConfig(64, 16, 4, 4)}
LONG_TILE_CONFIG = AttentionTileConfig(64, 64, 4, 3)
# Beyond a mean capacity of 512 tokens per sequence, many keys reuse a query tile; within a window, few do.
VERY_LONG_TOKENS, VERY_LONG_TILE_CONFIG = 512, AttentionTileConfig(128, 64, 8, 3)
WINDOW_TILE_CONFIG = AttentionTileConfig(64, 32, 4, 3)
# For picked rows, each in its own tile: 16 rows are the fewest that tensor cores support.
SINGLE_ROW_TILE_CONFIG = AttentionTileConfig(16, 64, 4, 3)


def tile_config_for(tokens: int, sequences: int) -> AttentionTileConfig:
    """Return the tile configuration for a bucket; short sequences would leave most of a large tile empty."""
    fitting = (config for mean_tokens, config in TILE_CONFIGS.items() if tokens <= mean_tokens * sequences)
    is_very_long = tokens > VERY_LONG_TOKENS * sequences
    return next(fitting, VERY_LONG_TILE_CONFIG if is_very_long else LONG_TILE_CONFIG)


def windowed(tile_config: AttentionTileConfig) -> AttentionTileConfig:
    """Return the configuration for attention within a window: larger tiles would visit more keys in vain."""
    return WINDOW_TILE_CONFIG if tile_config.keys > WINDOW_TILE_CONFIG.keys else tile_config


def reference(qkv: Any, starts: Any, heads: int, bias: Any | None = None, window: int | None = None) -> Any:
    """Compute attention in plain PyTorch; `bias` (heads, distances) is indexed by key − query + distances // 2."""
    tokens, width = qkv.shape[0], qkv.shape[1] // 3
    out = torch.empty((tokens, width), dtype=torch.float32, device=qkv.device)
    bounds = starts.tolist()
    for first, last in pairwise(bounds):
        q, k, v = (
            part.reshape(last - first, heads, -1).transpose(0, 1).float() for part in qkv[first:last].split(width, 1)
        )
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        if bias is not None:
            position = torch.arange(last - first, device=qkv.device)
            scores = scores + bias.float()[:, position[None, :] - position[:, None] + bias.shape[1] // 2]
        if window is not None:
            position = torch.arange(last - first, device=qkv.device)
            scores = scores.masked_fill((position[None, :] - position[:, None]).abs() > window, -float("inf"))
        out[first:last] = (scores.softmax(-1) @ v).transpose(0, 1).reshape(last - first, width)
    return out


def query_tiles(lengths: Any, rows: int) -> Any:
    """Return per program (first query row, start of its sequence, end of its sequence), so that no program is idle."""
    import numpy as np

    ends = np.cumsum(lengths, dtype=np.int32)
    starts = ends - lengths
    counts = (lengths + (rows - 1)) // rows
    per_sequence = np.empty((len(lengths), 3), np.int32)
    # Minus the offset of the preceding tiles, so that one arange over all tiles gives the first rows.
    per_sequence[:, 0] = starts - (np.cumsum(counts) - counts) * rows
    per_sequence[:, 1] = starts
    per_sequence[:, 2] = ends
    tiles = np.repeat(per_sequence, counts, axis=0)
    tiles[:, 0] += np.arange(0, len(tiles) * rows, rows, dtype=np.int32)
    return tiles


def attention(
    qkv: Any,
    tiles: Any,
    heads: int,
    bias: Any | None = None,
    quant: ActivationQuant | None = None,
    *,
    window: int | None = None,
    tile_config: AttentionTileConfig = LONG_TILE_CONFIG,
    parts: int = 1,
) -> Any:
    """Attend within each sequence of qkv (tokens, 3 × width), to keys at most `window` positions away.

    `tiles` is from `query_tiles` with `parts` times the config's rows.
    """
    tokens, width = qkv.shape[0], qkv.shape[1] // 3
    shape = (tokens, width)
    out = torch.empty(shape, dtype=qkv.dtype, device=qkv.device) if quant is None else quant.empty(*shape)
    size = width // heads
    _attention[(tiles.shape[0] * parts, heads)](
        qkv, tiles, bias, out, size**-0.5, width, 0 if bias is None else bias.shape[1],
        size=size, block=max(16, triton.next_power_of_2(size)),  # tensor cores need at least 16
        window=-1 if window is None else window, parts=parts,
        rows=tile_config.rows, keys=tile_config.keys, num_warps=tile_config.warps, num_stages=tile_config.stages,
        **quant_options(quant),
    )  # fmt: skip
    return out


@triton.jit
def _attention(
    qkv, tiles, bias, out, softmax_scale, width, distance_count, inverse_scales,
    max_value: tl.constexpr, is_per_tensor: tl.constexpr, window: tl.constexpr, parts: tl.constexpr,
    size: tl.constexpr, block: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0) // parts, tl.program_id(1)
    first_row = tl.load(tiles + 3 * tile) + tl.program_id(0) % parts * rows
    first = tl.load(tiles + 3 * tile + 1)
    end = tl.load(tiles + 3 * tile + 2)
    row = first_row + tl.arange(0, rows)
    channel = tl.arange(0, block)
    is_channel = channel < size
    head_channel = head * size + channel
    is_row = (row < end)[:, None] & is_channel[None, :]
    q = tl.load(qkv + row[:, None] * (3 * width) + head_channel[None, :], mask=is_row, other=0.0)
    if max_value > 0:
        inverse_scale = load_inverse_scale(inverse_scales, head_channel[None, :], is_channel[None, :], is_per_tensor)
    # Times log₂ e: the hardware has an instruction for powers of two.
    log2_scale = softmax_scale * 1.4426950408889634
    row_max = tl.full((rows,), -float("inf"), tl.float32)
    row_sum = tl.zeros((rows,), tl.float32)
    acc = tl.zeros((rows, block), tl.float32)
    if window >= 0:
        # Every block that the window of a row reaches; the last part of a tile may have no row.
        first_key = tl.maximum(first, first_row - window)
        last_key = tl.where(first_row < end, tl.minimum(end, first_row + rows + window), first_key)
        for start in range(first_key, last_key, keys):
            acc, row_sum, row_max = _block(
                q, qkv, bias, head, row, start, end, head_channel, is_channel, width, distance_count, log2_scale,
                acc, row_sum, row_max, is_masked=True, window=window, keys=keys,
            )  # fmt: skip
    else:
        # Full blocks of keys need no mask; the remainder of the sequence does.
        masked_start = first + (end - first) // keys * keys
        for start in range(first, masked_start, keys):
            acc, row_sum, row_max = _block(
                q, qkv, bias, head, row, start, end, head_channel, is_channel, width, distance_count, log2_scale,
                acc, row_sum, row_max, is_masked=size != block, window=window, keys=keys,
            )  # fmt: skip
        if masked_start < end:
            acc, row_sum, row_max = _block(
                q, qkv, bias, head, row, masked_start, end, head_channel, is_channel, width, distance_count, log2_scale,
                acc, row_sum, row_max, is_masked=True, window=window, keys=keys,
            )  # fmt: skip
    at = out + row[:, None] * width + head_channel[None, :]
    value = acc / row_sum[:, None]
    if max_value > 0:
        value = quantize_value(value, inverse_scale, max_value)
    tl.store(at, value.to(out.dtype.element_ty), mask=is_row)


@triton.jit
def _block(
    q, qkv, bias, head, row, start, end, head_channel, is_channel, width, distance_count, log2_scale,
    acc, row_sum, row_max, is_masked: tl.constexpr, window: tl.constexpr, keys: tl.constexpr,
):  # fmt: skip
    """Accumulate one block of keys and values (online softmax)."""
    key = start + tl.arange(0, keys)
    is_key = key < end
    k_at = qkv + width + key[None, :] * (3 * width) + head_channel[:, None]
    v_at = qkv + 2 * width + key[:, None] * (3 * width) + head_channel[None, :]
    k = tl.load(k_at, mask=is_key[None, :] & is_channel[:, None], other=0.0) if is_masked else tl.load(k_at)
    scores = tl.dot(q, k)
    if bias is not None:
        distance = key[None, :] - row[:, None]
        is_near = (distance >= -(distance_count // 2)) & (distance < distance_count - distance_count // 2)
        biases = tl.load(bias + head * distance_count + distance_count // 2 + distance, mask=is_near, other=0.0).to(
            tl.float32
        )
        scores = scores * log2_scale + biases * 1.4426950408889634
        log2_scale = 1.0
    if is_masked:
        scores = tl.where(is_key[None, :], scores, -float("inf"))
    if window >= 0:
        scores = tl.where(tl.abs(key[None, :] - row[:, None]) <= window, scores, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * log2_scale)
    if window >= 0:
        # A row may have no key in this block: −inf − −inf would be NaN.
        new_max = tl.maximum(new_max, -1.0e30)
    weight = tl.math.exp2(scores * log2_scale - new_max[:, None])
    rescale = tl.math.exp2(row_max - new_max)
    v = tl.load(v_at, mask=is_key[:, None] & is_channel[None, :], other=0.0) if is_masked else tl.load(v_at)
    return tl.dot(weight.to(v.dtype), v, acc * rescale[:, None]), row_sum * rescale + tl.sum(weight, 1), new_max
