"""The gated activation of a GeGLU feed-forward block: GELU of one column times the column beside it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.ops.activation import EXACT, gelu
from hasten.kernels.ops.activation import reference as gelu_reference
from hasten.kernels.ops.quantize import ActivationQuant, load_inverse_scale, quant_options, quantize_value

_ROWS, _COLUMNS = 4, 512


def reference(x: Any, kind: str = EXACT) -> Any:
    """Compute the gated activation in plain PyTorch."""
    return gelu_reference(x[:, 0::2], kind) * x[:, 1::2].float()


def gated_activation(x: Any, kind: str = EXACT, quant: ActivationQuant | None = None) -> Any:
    """Return GELU of the even columns of x times the odd ones, or that quantized."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device) if quant is None else quant.empty(rows, width)
    _gated_activation[(triton.cdiv(width, _COLUMNS), triton.cdiv(rows, _ROWS))](
        x, out, rows, width, gelu_kind=kind, block_rows=_ROWS, block_columns=_COLUMNS, num_warps=4,
        **quant_options(quant),
    )  # fmt: skip
    return out


@triton.jit
def gate(value, kind: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr):
    """Return GELU of the even columns of a block times its odd columns."""
    activated, factor = tl.split(tl.reshape(value, (block_rows, block_columns // 2, 2)))
    return gelu(activated, kind) * factor


@triton.jit
def _gated_activation(
    x, out, rows, width, inverse_scales,
    gelu_kind: tl.constexpr, max_value: tl.constexpr, is_per_tensor: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    # From the end, which was written last and is still in the cache; the next kernel reads the beginning first.
    row = (tl.num_programs(1) - 1 - tl.program_id(1)) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    pair = tl.program_id(0) * block_columns * 2 + tl.arange(0, block_columns * 2)
    is_row = (row < rows)[:, None]
    if max_value > 0:
        inverse_scale = load_inverse_scale(inverse_scales, column[None, :], (column < width)[None, :], is_per_tensor)
    at = x + row[:, None].to(tl.int64) * (2 * width) + pair[None, :]
    value = tl.load(at, mask=is_row & (pair < 2 * width)[None, :], other=0.0).to(tl.float32)
    value = gate(value, gelu_kind, block_rows, 2 * block_columns)
    if max_value > 0:
        value = quantize_value(value, inverse_scale, max_value)
    at = out + row[:, None].to(tl.int64) * width + column[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=is_row & (column < width)[None, :])
