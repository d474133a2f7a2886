"""Pool the token vectors of each sequence into one vector."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl

MEAN, MAX, SQRT, WEIGHTED = "mean", "max", "mean_sqrt_len_tokens", "weightedmean"


def reference(x: Any, starts: Any, kind: str) -> Any:
    """Compute the pooled outputs in plain PyTorch."""
    bounds = starts.tolist()
    return torch.stack([_pooled(x[first:last].float(), kind) for first, last in pairwise(bounds)])


def _pooled(tokens: Any, kind: str) -> Any:
    if kind == MAX:
        return tokens.amax(0)
    if kind == WEIGHTED:
        weights = torch.arange(1, len(tokens) + 1, device=tokens.device).float()
        return weights @ tokens / weights.sum()
    return tokens.sum(0) / (len(tokens) ** 0.5 if kind == SQRT else len(tokens))


def pool(x: Any, starts: Any, kind: str) -> Any:
    """Pool x (tokens, width) in fp32; `starts` (sequences + 1) holds the first token of each sequence, and the end."""
    width, count = x.shape[1], starts.shape[0] - 1
    out = torch.empty((count, width), dtype=torch.float32, device=x.device)
    columns = 128
    _pool[(count, triton.cdiv(width, columns))](x, starts, out, width, kind=kind, rows=32, columns=columns, num_warps=4)
    return out


@triton.jit
def _pool(x, starts, out, width, kind: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):
    sequence = tl.program_id(0)
    first, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    is_column = (column < width)[None, :]
    largest = tl.full((columns,), -float("inf"), tl.float32)
    total = tl.zeros((columns,), tl.float32)
    for start in range(first, end, rows):
        row = start + tl.arange(0, rows)
        is_inside = (row < end)[:, None] & is_column
        value = tl.load(x + row[:, None] * width + column[None, :], mask=is_inside, other=0.0).to(tl.float32)
        if kind == "max":
            largest = tl.maximum(largest, tl.max(tl.where(is_inside, value, -float("inf")), 0))
        elif kind == "weightedmean":
            total += tl.sum(value * (row - first + 1).to(tl.float32)[:, None], 0)
        else:
            total += tl.sum(value, 0)
    count = tl.maximum(end - first, 1).to(tl.float32)
    if kind == "max":
        result = largest
    elif kind == "mean_sqrt_len_tokens":
        result = total / tl.sqrt(count)
    elif kind == "weightedmean":
        result = total / (count * (count + 1.0) / 2.0)
    else:
        result = total / count
    tl.store(out + sequence * width + column, result, mask=column < width)
