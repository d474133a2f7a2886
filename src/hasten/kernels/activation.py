"""What stands between the two products of a feed-forward layer: GELU, in place or squeezed into eight bits."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.squeeze import Squeeze, factor_of, settings, squeezed

_ROWS, _COLUMNS = 4, 512
# transformers' names for the two.
EXACT, TANH = "gelu", "gelu_new"


def reference(x: Any, kind: str = EXACT) -> Any:
    return torch.nn.functional.gelu(x.float(), approximate="tanh" if kind == TANH else "none")


def gelu_(x: Any, kind: str = EXACT, squeeze: Squeeze | None = None) -> Any:
    """In place, unless what it becomes is squeezed."""
    rows, width = x.shape
    out = x if squeeze is None else squeeze.empty(rows, width)
    _gelu[(triton.cdiv(width, _COLUMNS), triton.cdiv(rows, _ROWS))](
        x,
        x if squeeze is None else squeeze.factors,
        out,
        rows,
        width,
        is_tanh=kind == TANH,
        rows_at_once=_ROWS,
        columns=_COLUMNS,
        num_warps=4,
        **settings(squeeze),
    )
    return out


@triton.jit
def gelu(value, is_tanh: tl.constexpr):
    """value · Φ(value), where Φ is a sigmoid of an odd polynomial: of two terms that is GELU by tanh, of seven the real
    one to 6e-7, which is next to nothing of what fp16 rounds.
    """
    square = value * value
    # Times −log₂ e, since powers of two have an instruction.
    if is_tanh:
        inner = -2.3022082 + square * -0.10294324
    else:
        inner = -1.14524231e-05 + square * (3.85044587e-07 + square * -5.20989998e-09)
        inner = 9.55931051e-05 + square * (0.000159389361 + square * inner)
        inner = -2.3022072 + square * (-0.104838581 + square * inner)
    return value / (1.0 + tl.math.exp2(value * inner))


@triton.jit
def _gelu(
    x,
    factors,
    out,
    rows,
    width,
    is_tanh: tl.constexpr,
    largest: tl.constexpr,
    is_uniform: tl.constexpr,
    rows_at_once: tl.constexpr,
    columns: tl.constexpr,
):
    # From the end, which was written last and is still in the cache; the beginning will be read first.
    row = (tl.num_programs(1) - 1 - tl.program_id(1)) * rows_at_once + tl.arange(0, rows_at_once)
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    is_inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None].to(tl.int64) * width + column[None, :]
    if largest > 0:
        factor = factor_of(factors, column[None, :], (column < width)[None, :], is_uniform)
    value = gelu(tl.load(x + at, mask=is_inside, other=0.0).to(tl.float32), is_tanh)
    if largest > 0:
        value = squeezed(value, factor, largest)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=is_inside)
