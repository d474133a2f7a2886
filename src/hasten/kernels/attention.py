"""Attention of every token to the tokens of its own sequence, all sequences in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.squeeze import Squeeze, factor_of, settings, squeezed


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows that a program asks for, keys that it looks at in a step, its warps, and steps that are loaded ahead."""

    rows: int
    keys: int
    warps: int
    stages: int


# By the most tokens a sequence has on the average, as a bucket has room for: there may be half as many, and twice as
# long. Found by measuring on an H200.
CUTS = {24: Cut(16, 16, 1, 3), 96: Cut(64, 16, 4, 4)}
LONG = Cut(64, 64, 4, 3)
# Where only some rows ask, each in a tile of its own: the fewest that tensor cores take.
LONE = Cut(16, 64, 4, 3)


def cut_for(tokens: int, sequences: int) -> Cut:
    """Short sequences leave most of a large tile empty."""
    return next((cut for most, cut in CUTS.items() if tokens <= most * sequences), LONG)


def reference(qkv: Any, starts: Any, heads: int, bias: Any | None = None) -> Any:
    """`bias` (heads, distances) is added by how far apart two tokens are, at distances // 2 for none."""
    tokens, width = qkv.shape[0], qkv.shape[1] // 3
    out = torch.empty((tokens, width), dtype=torch.float32, device=qkv.device)
    bounds = starts.tolist()
    for first, last in pairwise(bounds):
        q, k, v = (
            part.reshape(last - first, heads, -1).transpose(0, 1).float() for part in qkv[first:last].split(width, 1)
        )
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        if bias is not None:
            place = torch.arange(last - first, device=qkv.device)
            scores = scores + bias.float()[:, place[None, :] - place[:, None] + bias.shape[1] // 2]
        out[first:last] = (scores.softmax(-1) @ v).transpose(0, 1).reshape(last - first, width)
    return out


def tiles(lengths: Any, rows: int) -> Any:
    """Which tokens a program asks for, as (first of its own, first and end of their sequence): no program is idle."""
    import numpy as np

    ends = np.cumsum(lengths, dtype=np.int32)
    starts = ends - lengths
    counts = (lengths + (rows - 1)) // rows
    of_sequences = np.empty((len(lengths), 3), np.int32)
    # Less what all tiles before have begun with, so that one row of steps serves all sequences.
    of_sequences[:, 0] = starts - (np.cumsum(counts) - counts) * rows
    of_sequences[:, 1] = starts
    of_sequences[:, 2] = ends
    found = np.repeat(of_sequences, counts, axis=0)
    found[:, 0] += np.arange(0, len(found) * rows, rows, dtype=np.int32)
    return found


def attention(
    qkv: Any,
    work: Any,
    heads: int,
    bias: Any | None = None,
    squeeze: Squeeze | None = None,
    *,
    cut: Cut = LONG,
) -> Any:
    """qkv (tokens, 3 × width) as one product gives it; `work` from `tiles` with the rows of the cut."""
    tokens, width = qkv.shape[0], qkv.shape[1] // 3
    if squeeze is None:
        out = torch.empty((tokens, width), dtype=qkv.dtype, device=qkv.device)
    else:
        out = squeeze.empty(tokens, width)
    size = width // heads
    _attention[(work.shape[0], heads)](
        qkv,
        work,
        bias if bias is not None else qkv,
        qkv if squeeze is None else squeeze.factors,
        out,
        size**-0.5,
        width,
        bias.shape[1] if bias is not None else 0,
        has_bias=bias is not None,
        size=size,
        # No side of a product on the tensor cores is shorter.
        block=max(16, triton.next_power_of_2(size)),
        rows=cut.rows,
        keys=cut.keys,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **settings(squeeze),
    )
    return out


@triton.jit
def _attention(
    qkv,
    work,
    bias,
    factors,
    out,
    scale,
    width,
    distances,
    has_bias: tl.constexpr,
    largest: tl.constexpr,
    is_uniform: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
    keys: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    own = tl.load(work + 3 * tile)
    first = tl.load(work + 3 * tile + 1)
    end = tl.load(work + 3 * tile + 2)
    row = own + tl.arange(0, rows)
    channel = tl.arange(0, block)
    is_channel = channel < size
    here = head * size + channel
    is_row = (row < end)[:, None] & is_channel[None, :]
    q = tl.load(qkv + row[:, None] * (3 * width) + here[None, :], mask=is_row, other=0.0)
    if largest > 0:
        squeezing = factor_of(factors, here[None, :], is_channel[None, :], is_uniform)
    # In powers of two, which is what the hardware has an instruction for.
    factor = scale * 1.4426950408889634
    highest = tl.full((rows,), -float("inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    mixed = tl.zeros((rows, block), tl.float32)
    own_bias = bias + head * distances + distances // 2
    # Whole blocks of keys need no masks; what is left of the sequence does.
    whole = first + (end - first) // keys * keys
    for start in range(first, whole, keys):
        mixed, total, highest = _block(
            q, qkv, own_bias, row, start, end, here, is_channel, width, distances, factor, mixed, total, highest,
            has_bias=has_bias, is_masked=size != block, keys=keys,
        )  # fmt: skip
    if whole < end:
        mixed, total, highest = _block(
            q, qkv, own_bias, row, whole, end, here, is_channel, width, distances, factor, mixed, total, highest,
            has_bias=has_bias, is_masked=True, keys=keys,
        )  # fmt: skip
    at = out + row[:, None] * width + here[None, :]
    value = mixed / total[:, None]
    if largest > 0:
        value = squeezed(value, squeezing, largest)
    tl.store(at, value.to(out.dtype.element_ty), mask=is_row)


@triton.jit
def _block(
    q,
    qkv,
    bias,
    row,
    start,
    end,
    here,
    is_channel,
    width,
    distances,
    factor,
    mixed,
    total,
    highest,
    has_bias: tl.constexpr,
    is_masked: tl.constexpr,
    keys: tl.constexpr,
):
    """What some keys add to what the rows have seen."""
    key = start + tl.arange(0, keys)
    is_key = key < end
    k_at = qkv + width + key[None, :] * (3 * width) + here[:, None]
    v_at = qkv + 2 * width + key[:, None] * (3 * width) + here[None, :]
    k = tl.load(k_at, mask=is_key[None, :] & is_channel[:, None], other=0.0) if is_masked else tl.load(k_at)
    scores = tl.dot(q, k)
    if has_bias:
        apart = key[None, :] - row[:, None]
        is_near = (apart >= -(distances // 2)) & (apart < distances - distances // 2)
        scores = scores * factor + tl.load(bias + apart, mask=is_near, other=0.0).to(tl.float32) * 1.4426950408889634
        factor = 1.0
    if is_masked:
        scores = tl.where(is_key[None, :], scores, -float("inf"))
    new = tl.maximum(highest, tl.max(scores, 1) * factor)
    weight = tl.math.exp2(scores * factor - new[:, None])
    shrink = tl.math.exp2(highest - new)
    v = tl.load(v_at, mask=is_key[:, None] & is_channel[None, :], other=0.0) if is_masked else tl.load(v_at)
    return tl.dot(weight.to(v.dtype), v, mixed * shrink[:, None]), total * shrink + tl.sum(weight, 1), new
