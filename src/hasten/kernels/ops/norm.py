"""LayerNorm of each token, fused with a preceding bias and residual addition and a following quantization."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.ops.pdl import pdl_options, wait_for_previous_kernel
from hasten.kernels.ops.quantize import ActivationQuant, load_inverse_scale, quant_options, quantize_value


def reference(
    x: Any, norm_weight: Any, norm_bias: Any, eps: float, bias: Any | None = None, residual: Any | None = None
) -> Any:
    """Compute LayerNorm(x + bias + residual) in plain PyTorch."""
    total = x.float()
    if bias is not None:
        total = total + bias.float()
    if residual is not None:
        total = total + residual.float()
    return torch.nn.functional.layer_norm(total, total.shape[-1:], norm_weight.float(), norm_bias.float(), eps)


def layer_norm(
    x: Any,
    norm_weight: Any,
    norm_bias: Any,
    eps: float,
    bias: Any | None = None,
    residual: Any | None = None,
    quant: ActivationQuant | None = None,
    *,
    use_pdl: bool = False,
) -> tuple[Any, Any]:
    """Return LayerNorm(x + bias + residual), where `bias` is that of the preceding linear layer.

    The first tensor is the next residual, the second the input of the next GEMM: quantized, or the same tensor.
    """
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=norm_weight.dtype, device=x.device)
    quantized_out = out if quant is None else quant.empty(rows, width)
    block = triton.next_power_of_2(width)
    # Several rows per program: one row takes less time than a launch, unless it is also written quantized.
    rows_per_program = 1 if quant is not None and block > 512 else max(1, min(4, 4096 // block))
    _norm[(triton.cdiv(rows, rows_per_program),)](
        x, bias, residual, norm_weight, norm_bias, out, quantized_out, rows, width, eps,
        block=block, rows_per_program=rows_per_program, num_warps=2 if block <= 512 else 4,
        **quant_options(quant), **pdl_options(use_pdl),
    )  # fmt: skip
    return out, quantized_out


@triton.jit
def _norm(
    x, bias, residual, norm_weight, norm_bias, out, quantized_out, rows, width, eps, inverse_scales,
    max_value: tl.constexpr, is_per_tensor: tl.constexpr,
    block: tl.constexpr, rows_per_program: tl.constexpr, use_pdl: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows_per_program + tl.arange(0, rows_per_program)
    column = tl.arange(0, block)
    is_column = column < width
    is_inside = (row < rows)[:, None] & is_column[None, :]
    at = row[:, None] * width + column[None, :]
    norm_weights = tl.load(norm_weight + column, mask=is_column, other=0.0).to(tl.float32)
    norm_biases = tl.load(norm_bias + column, mask=is_column, other=0.0).to(tl.float32)
    if max_value > 0:
        inverse_scale = load_inverse_scale(inverse_scales, column[None, :], is_column[None, :], is_per_tensor)
    wait_for_previous_kernel(use_pdl)
    value = tl.load(x + at, mask=is_inside, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        value += tl.load(residual + at, mask=is_inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, axis=1) / width
    centered = tl.where(is_inside, value - mean[:, None], 0.0)
    normalized = centered * tl.rsqrt(tl.sum(centered * centered, axis=1) / width + eps)[:, None]
    value = normalized * norm_weights[None, :] + norm_biases[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=is_inside)
    if max_value > 0:
        value = quantize_value(value, inverse_scale, max_value)
        tl.store(quantized_out + at, value.to(quantized_out.dtype.element_ty), mask=is_inside)
