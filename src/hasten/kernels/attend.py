"""For few tokens: attention of one head and its share of the output product, added to a sum that was started."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.dependent import launching, let_next_start, wait_for_previous
from hasten.kernels.squeeze import Squeeze, factor_of, fitted, settings


def reference(qkv: Any, sequence: Any, weight: Any, total: Any, heads: int, bias: Any | None = None) -> Any:
    tokens, width = total.shape
    q, k, v = (part.reshape(tokens, heads, -1).transpose(0, 1).float() for part in qkv.split(width, 1))
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    if bias is not None:
        place = torch.arange(tokens, device=qkv.device)
        scores = scores + bias.float()[:, place[None, :] - place[:, None] + bias.shape[1] // 2]
    scores = scores.masked_fill(sequence[:, None] != sequence[None, :], -torch.inf)
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(tokens, width)
    return total + mixed @ weight.float().T


def attend(
    qkv: Any,
    sequence: Any,
    weight: Any,
    total: Any,
    heads: int,
    bias: Any | None = None,
    step: Any | None = None,
    squeeze: Squeeze | None = None,
    *,
    rows: int = 16,
    columns: int = 128,
    warps: int = 4,
    is_dependent: bool = False,
) -> None:
    """All tokens are keys at once, so they must be few; `sequence` says whose each is.

    See attention for `bias`, and expand for a weight of eight bits.
    """
    tokens, width = total.shape
    _attend[(heads, triton.cdiv(width, columns), triton.cdiv(tokens, rows))](
        qkv,
        sequence,
        weight,
        qkv if bias is None else bias,
        weight if step is None else step,
        weight if squeeze is None else squeeze.factors,
        total,
        tokens,
        (width // heads) ** -0.5,
        0 if bias is None else bias.shape[1],
        width=width,
        size=width // heads,
        rows=rows,
        keys=max(16, triton.next_power_of_2(tokens)),
        columns=columns,
        has_bias=bias is not None,
        has_steps=step is not None and step.numel() > 1,
        is_dependent=is_dependent,
        num_warps=warps,
        **settings(squeeze),
        **launching(is_dependent),
    )


@triton.jit
def _attend(
    qkv,
    sequence,
    weight,
    bias,
    step,
    factors,
    total,
    tokens,
    scale,
    distances,
    width: tl.constexpr,
    size: tl.constexpr,
    rows: tl.constexpr,
    keys: tl.constexpr,
    columns: tl.constexpr,
    has_bias: tl.constexpr,
    has_steps: tl.constexpr,
    largest: tl.constexpr,
    is_uniform: tl.constexpr,
    is_dependent: tl.constexpr,
):
    channel = tl.program_id(0) * size + tl.arange(0, size)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    is_column = (column < width)[None, :]
    weights = tl.load(weight + column[None, :] * width + channel[:, None], mask=is_column, other=0.0)
    if largest > 0:
        factor = factor_of(factors, channel[None, :], (channel < width)[None, :], is_uniform)
        steps = tl.load(step + column[None, :], mask=is_column, other=0.0) if has_steps else tl.load(step)
    if is_dependent:
        let_next_start()
        wait_for_previous()
    row = tl.program_id(2) * rows + tl.arange(0, rows)
    key = tl.arange(0, keys)
    is_row, is_key = row < tokens, key < tokens
    q = tl.load(qkv + row[:, None] * 3 * width + channel[None, :], mask=is_row[:, None], other=0.0)
    k = tl.load(qkv + width + key[None, :] * 3 * width + channel[:, None], mask=is_key[None, :], other=0.0)
    v = tl.load(qkv + 2 * width + key[:, None] * 3 * width + channel[None, :], mask=is_key[:, None], other=0.0)
    own = tl.load(sequence + row, mask=is_row, other=-1)
    others = tl.load(sequence + key, mask=is_key, other=-2)
    scores = tl.dot(q, k) * (scale * 1.4426950408889634)
    if has_bias:
        apart = key[None, :] - row[:, None] + distances // 2
        near = (apart >= 0) & (apart < distances)
        at = bias + tl.program_id(0) * distances + apart
        scores += tl.load(at, mask=near, other=0.0).to(tl.float32) * 1.4426950408889634
    is_seen = own[:, None] == others[None, :]
    # Not minus infinity: rows past the end see nobody, and must stay numbers.
    scores = tl.where(is_seen, scores, -1.0e30)
    chances = tl.where(is_seen, tl.math.exp2(scores - tl.max(scores, 1)[:, None]), 0.0)
    mixed = tl.dot(chances.to(v.dtype), v) / tl.maximum(tl.sum(chances, 1), 1e-30)[:, None]
    if largest > 0:
        mixed = fitted(mixed, factor, largest)
        part = tl.dot(mixed.to(v.dtype), weights.to(v.dtype)) * steps
    else:
        part = tl.dot(mixed.to(weights.dtype), weights)
    is_inside = is_row[:, None] & is_column
    tl.atomic_add(total + row[:, None] * width + column[None, :], part, mask=is_inside, sem="relaxed")
