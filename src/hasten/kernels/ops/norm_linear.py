"""Fused LayerNorm + linear (+ GELU) for small batches.

A post-norm block is LayerNorm(x + f(x)), where x is itself a LayerNorm output that is not stored. This kernel
recomputes x for its GEMM and also stores x + the bias of f, into which the kernels that compute f accumulate.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.ops.activation import gelu
from hasten.kernels.ops.activation import reference as gelu_reference
from hasten.kernels.ops.norm import reference as norm_reference
from hasten.kernels.ops.pdl import pdl_options, wait_for_previous_kernel
from hasten.kernels.ops.quantize import ActivationQuant, clamp_to_range, load_inverse_scale
from hasten.kernels.ops.small_batch import Tile, weight_options

_TILE = Tile(16, 64, 8)


def reference(
    total: Any,
    norm_weight: Any,
    norm_bias: Any,
    eps: float,
    weight: Any,
    bias: Any,
    next_bias: Any,
    gelu_kind: str | None = None,
) -> tuple[Any, Any]:
    """Compute the LayerNorm and the linear layer in plain PyTorch."""
    x = norm_reference(total, norm_weight, norm_bias, eps)
    y = torch.nn.functional.linear(x, weight.float(), bias.float())
    if gelu_kind is not None:
        y = gelu_reference(y, gelu_kind)
    return y, x + next_bias.float()


def norm_linear(
    total: Any,
    norm_weight: Any,
    norm_bias: Any,
    eps: float,
    weight: Any,
    bias: Any,
    next_bias: Any,
    out: Any,
    next_total: Any,
    gelu_kind: str | None = None,
    scale: Any | None = None,
    quant: ActivationQuant | None = None,
    *,
    tile: Tile = _TILE,
    use_pdl: bool = False,
) -> None:
    """Write LayerNorm(total) · weightᵀ + bias (and GELU of it) to `out`, LayerNorm(total) + next_bias to `next_total`.

    `total` (tokens, width) is fp32, weight is (out width, width), and the tile's columns must divide the out width. See
    `small_batch` for `scale` and `quant`.
    """
    tokens, width = total.shape
    out_width = weight.shape[0]
    count = out_width // tile.columns
    _norm_linear[(count, triton.cdiv(tokens, tile.rows))](
        total, norm_weight, norm_bias, weight, bias, next_bias, out, next_total, tokens, out_width, eps,
        gelu_kind=gelu_kind, width=width, block=triton.next_power_of_2(width), rows=tile.rows, columns=tile.columns,
        columns_per_program=triton.cdiv(width, count), num_warps=tile.warps,
        **weight_options(scale, quant), **pdl_options(use_pdl),
    )  # fmt: skip


@triton.jit
def _norm_linear(
    total, norm_weight, norm_bias, weight, bias, next_bias, out, next_total, tokens, out_width, eps,
    scale, inverse_scales, has_channel_scales: tl.constexpr, max_value: tl.constexpr, is_per_tensor: tl.constexpr,
    gelu_kind: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, columns_per_program: tl.constexpr, use_pdl: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = program * columns + tl.arange(0, columns)
    k = tl.arange(0, block)
    is_k = k < width
    weights = tl.load(weight + column[None, :] * width + k[:, None], mask=is_k[:, None], other=0.0)
    biases = tl.load(bias + column).to(tl.float32)
    norm_weights = tl.load(norm_weight + k, mask=is_k, other=0.0).to(tl.float32)
    norm_biases = tl.load(norm_bias + k, mask=is_k, other=0.0).to(tl.float32)
    # Every program initializes its share of the columns of `next_total`.
    is_assigned = (k >= program * columns_per_program) & (k < (program + 1) * columns_per_program) & is_k
    next_biases = tl.load(next_bias + k, mask=is_assigned, other=0.0).to(tl.float32)
    if max_value > 0:
        inverse_scale = load_inverse_scale(inverse_scales, k[None, :], is_k[None, :], is_per_tensor)
        scales = tl.load(scale + column)[None, :] if has_channel_scales else tl.load(scale)
    wait_for_previous_kernel(use_pdl)
    row = tl.program_id(1) * rows + tl.arange(0, rows)
    is_row = row < tokens
    is_inside = is_row[:, None] & is_k[None, :]
    value = tl.load(total + row[:, None] * width + k[None, :], mask=is_inside, other=0.0)
    mean = tl.sum(value, 1) / width
    centered = tl.where(is_inside, value - mean[:, None], 0.0)
    normalized = centered * tl.rsqrt(tl.sum(centered * centered, 1) / width + eps)[:, None]
    x = normalized * norm_weights[None, :] + norm_biases[None, :]
    if max_value > 0:
        compute_dtype: tl.constexpr = out.dtype.element_ty
        clamped = clamp_to_range(x, inverse_scale, max_value)
        y = tl.dot(clamped.to(compute_dtype), weights.to(compute_dtype)) * scales + biases[None, :]
    else:
        y = tl.dot(x.to(weights.dtype), weights) + biases[None, :]
    if gelu_kind is not None:
        y = gelu(y, gelu_kind)
    tl.store(out + row[:, None] * out_width + column[None, :], y.to(out.dtype.element_ty), mask=is_row[:, None])
    at = next_total + row[:, None] * width + k[None, :]
    tl.store(at, x + next_biases[None, :], mask=is_row[:, None] & is_assigned[None, :])
