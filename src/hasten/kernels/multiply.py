"""A product of numbers of eight bits by our own kernel, with what stands behind it: step, bias, GELU, eight bits again.

Sums are in fp32 or int32. Beside the libraries it is there for two reasons: they have no GELU but the one by tanh, and
nothing of theirs gives int8 products their steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.activation import TANH, gelu
from hasten.kernels.activation import reference as gelu_reference
from hasten.kernels.squeeze import FP8, Squeeze, factor_of, settings, squeezed
from hasten.kernels.squeeze import reference as squeeze_reference

# Rows of tiles that share the columns' weights while those are in the cache.
_GROUP = 8


@dataclass(frozen=True, slots=True)
class Cut:
    """How the product is cut into programs: a tile of the result, and how much of the depth is loaded at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.depth}x{self.warps}x{self.stages}"

    @classmethod
    def parse(cls, text: str) -> Cut:
        return cls(*map(int, text.split("x")))


# The usual ones for tensor cores of Hopper, Ada and Ampere, of which tuning takes the fastest.
CUTS = (
    Cut(128, 256, 128, 8, 3),
    Cut(128, 128, 128, 8, 4),
    Cut(128, 128, 64, 4, 4),
    Cut(64, 256, 128, 8, 3),
    Cut(64, 128, 128, 4, 4),
    Cut(64, 64, 128, 4, 4),
)
# For those that nobody has timed.
USUAL = Cut(128, 128, 64, 4, 4)


def reference(
    x: Any,
    weight: Any,
    step: Any,
    bias: Any | None = None,
    kind: str | None = None,
    squeeze: Squeeze | None = None,
) -> Any:
    # In fp64 no sum of 8-bit products rounds.
    y = (x.double() @ weight.double().T).float() * step
    if bias is not None:
        y = y + bias.float()
    if kind is not None:
        y = gelu_reference(y, kind)
    return y if squeeze is None else squeeze_reference(y, squeeze)


def multiply(
    x: Any,
    weight: Any,
    step: Any,
    bias: Any | None = None,
    *,
    dtype: Any,
    kind: str | None = None,
    squeeze: Squeeze | None = None,
    cut: Cut = USUAL,
    sums_fast: bool = False,
) -> Any:
    """x (rows, depth) · weight (columns, depth)ᵀ · step + bias, and GELU of the `kind`; in `dtype`, or squeezed.

    `sums_fast`: products of fp8 are added up in the fewer bits that Hopper's tensor cores have, not in fp32.
    """
    (rows, depth), columns = x.shape, weight.shape[0]
    if squeeze is None:
        out = torch.empty((rows, columns), dtype=dtype, device=x.device)
    else:
        out = squeeze.empty(rows, columns)
    _multiply[(triton.cdiv(rows, cut.rows) * triton.cdiv(columns, cut.columns),)](
        x,
        weight,
        step,
        x if bias is None else bias,
        step if squeeze is None else squeeze.factors,
        out,
        rows,
        columns,
        depth,
        has_bias=bias is not None,
        has_steps=step.numel() > 1,
        has_gelu=kind is not None,
        is_tanh=kind == TANH,
        is_fp8=x.dtype == FP8,
        sums_fast=sums_fast,
        is_even=depth % cut.depth == 0,
        rows_at_once=cut.rows,
        columns_at_once=cut.columns,
        depth_at_once=cut.depth,
        group=_GROUP,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **settings(squeeze),
    )
    return out


@triton.jit
def _multiply(
    x,
    weight,
    step,
    bias,
    factors,
    out,
    rows,
    columns,
    depth,
    has_bias: tl.constexpr,
    has_steps: tl.constexpr,
    has_gelu: tl.constexpr,
    is_tanh: tl.constexpr,
    is_fp8: tl.constexpr,
    sums_fast: tl.constexpr,
    is_even: tl.constexpr,
    largest: tl.constexpr,
    is_uniform: tl.constexpr,
    rows_at_once: tl.constexpr,
    columns_at_once: tl.constexpr,
    depth_at_once: tl.constexpr,
    group: tl.constexpr,
):
    tile = tl.program_id(0)
    across = tl.cdiv(columns, columns_at_once)
    first = tile // (group * across) * group
    size = tl.minimum(tl.cdiv(rows, rows_at_once) - first, group)
    row = (first + tile % (group * across) % size) * rows_at_once + tl.arange(0, rows_at_once)
    column = tile % (group * across) // size * columns_at_once + tl.arange(0, columns_at_once)
    k = tl.arange(0, depth_at_once)
    # What lies past an end is read from the beginning, and never stored: loads without masks are faster.
    x_at = x + (row % rows)[:, None].to(tl.int64) * depth + k[None, :]
    weight_at = weight + (column % columns)[None, :].to(tl.int64) * depth + k[:, None]
    total = tl.zeros((rows_at_once, columns_at_once), tl.float32 if is_fp8 else tl.int32)
    for start in range(0, depth, depth_at_once):
        if is_even:
            values, weights = tl.load(x_at), tl.load(weight_at)
        else:
            values = tl.load(x_at, mask=(start + k < depth)[None, :], other=0.0)
            weights = tl.load(weight_at, mask=(start + k < depth)[:, None], other=0.0)
        if is_fp8 and sums_fast:
            total = tl.dot(values, weights, total)
        elif is_fp8:
            # Hopper's tensor cores add fp8 products in fewer bits than fp32: not more than one block of them.
            total = tl.dot(values, weights, total, max_num_imprecise_acc=depth_at_once)
        else:
            total = tl.dot(values, weights, total, out_dtype=tl.int32)
        x_at += depth_at_once
        weight_at += depth_at_once
    is_column = column < columns
    y = total.to(tl.float32)
    if has_steps:
        y *= tl.load(step + column, mask=is_column, other=0.0)[None, :]
    else:
        y *= tl.load(step)
    if has_bias:
        y += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if has_gelu:
        y = gelu(y, is_tanh)
    if largest > 0:
        y = squeezed(y, factor_of(factors, column[None, :], is_column[None, :], is_uniform), largest)
    at = out + row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=(row < rows)[:, None] & is_column[None, :])
