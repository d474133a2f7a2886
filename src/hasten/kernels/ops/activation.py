"""GELU between the two linear layers of a feed-forward block, in place or quantized to 8 bits."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.ops.quantize import ActivationQuant, load_inverse_scale, quant_options, quantize_value

_ROWS, _COLUMNS = 4, 512
# transformers' names of the exact GELU and its tanh approximation.
EXACT, TANH = "gelu", "gelu_new"


def reference(x: Any, kind: str = EXACT) -> Any:
    """Compute GELU in plain PyTorch."""
    return torch.nn.functional.gelu(x.float(), approximate="tanh" if kind == TANH else "none")


def activate(x: Any, kind: str | None = EXACT, quant: ActivationQuant | None = None) -> Any:
    """Apply GELU in place, or return it quantized; without a `kind` of GELU, only quantize."""
    rows, width = x.shape
    out = x if quant is None else quant.empty(rows, width)
    _activate[(triton.cdiv(width, _COLUMNS), triton.cdiv(rows, _ROWS))](
        x, out, rows, width, gelu_kind=kind, block_rows=_ROWS, block_columns=_COLUMNS, num_warps=4,
        **quant_options(quant),
    )  # fmt: skip
    return out


@triton.jit
def gelu(value, kind: tl.constexpr):
    """Return value · Φ(value), with Φ as the sigmoid of an odd polynomial.

    Two terms give the tanh approximation, seven the exact GELU within 6e-7, far below the rounding of fp16.
    """
    square = value * value
    # Times −log₂ e: the hardware has an instruction for powers of two.
    if kind == "gelu_new":
        inner = -2.3022082 + square * -0.10294324
    else:
        inner = -1.14524231e-05 + square * (3.85044587e-07 + square * -5.20989998e-09)
        inner = 9.55931051e-05 + square * (0.000159389361 + square * inner)
        inner = -2.3022072 + square * (-0.104838581 + square * inner)
    return value / (1.0 + tl.math.exp2(value * inner))


@triton.jit
def _activate(
    x, out, rows, width, inverse_scales,
    gelu_kind: tl.constexpr, max_value: tl.constexpr, is_per_tensor: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    # From the end, which was written last and is still in the cache; the next kernel reads the beginning first.
    row = (tl.num_programs(1) - 1 - tl.program_id(1)) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    is_inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None].to(tl.int64) * width + column[None, :]
    if max_value > 0:
        inverse_scale = load_inverse_scale(inverse_scales, column[None, :], (column < width)[None, :], is_per_tensor)
    value = tl.load(x + at, mask=is_inside, other=0.0).to(tl.float32)
    if gelu_kind is not None:
        value = gelu(value, gelu_kind)
    if max_value > 0:
        value = quantize_value(value, inverse_scale, max_value)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=is_inside)
