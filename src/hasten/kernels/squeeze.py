"""Numbers of eight bits: what values become on their way into a product, in the kernel that computes them.

A value is multiplied by its factor, cut off at the largest number there is, and rounded. Factors come from calibration
rows (`calibrate.py`); a product's step undoes them, and the weights' own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.dependent import IS_INTERPRETED

FP8, INT8 = torch.float8_e4m3fn, torch.int8
LARGEST = {FP8: 448.0, INT8: 127.0}
_ROWS, _COLUMNS = 4, 512


@dataclass(frozen=True, slots=True)
class Squeeze:
    """Into what, and by what factors, in fp32: one for all values, or one for each channel."""

    factors: Any
    dtype: Any

    @property
    def largest(self) -> float:
        return LARGEST[self.dtype]

    @property
    def is_uniform(self) -> bool:
        return bool(self.factors.numel() == 1)

    def empty(self, *shape: int) -> Any:
        return torch.empty(shape, dtype=self.dtype, device=self.factors.device)


def settings(squeeze: Squeeze | None) -> dict[str, Any]:
    """What kernels are compiled for; without a squeeze the largest number is none."""
    if squeeze is None:
        return {"largest": 0.0, "is_uniform": True}
    return {"largest": squeeze.largest, "is_uniform": squeeze.is_uniform}


def reference(x: Any, squeeze: Squeeze) -> Any:
    value = (x.float() * squeeze.factors).clamp(-squeeze.largest, squeeze.largest)
    return (value.round() if squeeze.dtype == INT8 else value).to(squeeze.dtype)


def squeeze_weight(weight: Any, factors: Any, dtype: Any) -> tuple[Any, Any]:
    """A weight (columns, depth) for values that come multiplied by `factors`, and the step of its products.

    fp8 has one step, which is what the library's fastest products take, and its precision hardly depends on it; int8,
    whose precision does, has one for each column.
    """
    whole = weight.float() / factors
    most = whole.abs().amax().view(1) if dtype == FP8 else whole.abs().amax(1)
    step = torch.where(most > 0, most / LARGEST[dtype], 1.0)
    return reference(whole, Squeeze(1 / step.view(-1, 1), dtype)), step


def squeeze(x: Any, how: Squeeze) -> Any:
    """By itself, where what computed x is not ours: behind the projection of ELECTRA's and ALBERT's embeddings."""
    rows, width = x.shape
    out = how.empty(rows, width)
    _squeeze[(triton.cdiv(rows, _ROWS), triton.cdiv(width, _COLUMNS))](
        x, how.factors, out, rows, width, rows_at_once=_ROWS, columns=_COLUMNS, num_warps=4, **settings(how)
    )
    return out


@triton.jit
def _squeeze(
    x,
    factors,
    out,
    rows,
    width,
    largest: tl.constexpr,
    is_uniform: tl.constexpr,
    rows_at_once: tl.constexpr,
    columns: tl.constexpr,
):
    row = (tl.program_id(0) * rows_at_once + tl.arange(0, rows_at_once))[:, None]
    column = (tl.program_id(1) * columns + tl.arange(0, columns))[None, :]
    is_inside = (row < rows) & (column < width)
    at = row.to(tl.int64) * width + column
    factor = factor_of(factors, column, column < width, is_uniform)
    value = squeezed(tl.load(x + at, mask=is_inside, other=0.0).to(tl.float32), factor, largest)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def factor_of(factors, column, is_column, is_uniform: tl.constexpr):
    """To be asked for early: where a kernel comes to need it, it would wait for it and for nothing else."""
    return tl.load(factors) if is_uniform else tl.load(factors + column, mask=is_column, other=0.0)


@triton.jit
def fitted(value, factor, largest: tl.constexpr):
    """Within the range of what it will be rounded to, and not rounded."""
    return tl.minimum(tl.maximum(value * factor, -largest), largest)


@triton.jit
def squeezed(value, factor, largest: tl.constexpr):
    """Such that converting it rounds no more than the format does."""
    value = fitted(value, factor, largest)
    # Converting to integers cuts off; where fp32 has no room for a fraction, adding rounds, halves to even.
    return (value + 12582912.0) - 12582912.0 if largest < 128.0 else _exact(value)


if IS_INTERPRETED:

    @triton.jit
    def _exact(value):
        """Rounded to numbers of fp8, halves to even: Triton's interpreter converts others wrongly."""
        bits = value.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        subnormal = ((value * 512.0 + 12582912.0) - 12582912.0) / 512.0
        return tl.where(tl.abs(value) < 0.015625, subnormal, normal)
else:

    @triton.jit
    def _exact(value):
        return value
