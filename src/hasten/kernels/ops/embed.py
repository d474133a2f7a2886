"""The sum of each token's embeddings, with its LayerNorm unless the next kernel computes that."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.ops.norm import reference as norm_reference
from hasten.kernels.ops.pdl import pdl_options, wait_for_previous_kernel
from hasten.kernels.ops.quantize import ActivationQuant, load_inverse_scale, quant_options, quantize_value


def reference(
    ids: Any,
    positions: Any,
    token_types: Any,
    word_embeddings: Any,
    position_embeddings: Any,
    token_type_embeddings: Any | None,
    norm: tuple[Any, Any, float] | None = None,
) -> Any:
    """Compute the embeddings and their LayerNorm in plain PyTorch."""
    total = word_embeddings.float()[ids] + position_embeddings.float()[positions]
    if token_type_embeddings is not None:
        total = total + token_type_embeddings.float()[token_types]
    return total if norm is None else norm_reference(total, *norm)


def embed(
    ids: Any,
    positions: Any,
    token_types: Any,
    word_embeddings: Any,
    position_embeddings: Any,
    token_type_embeddings: Any | None,
    norm: tuple[Any, Any, float] | None = None,
    out: Any | None = None,
    quant: ActivationQuant | None = None,
    *,
    use_pdl: bool = False,
) -> tuple[Any, Any]:
    """Sum the word, position and (where the model has them) token type embeddings of each token.

    `norm` is the LayerNorm's weight, bias and epsilon. Return the result as it is, and quantized for the next GEMM (or
    the same tensor again).
    """
    tokens, width = ids.shape[0], word_embeddings.shape[1]
    if out is None:
        dtype = torch.float32 if norm is None else word_embeddings.dtype
        out = torch.empty((tokens, width), dtype=dtype, device=word_embeddings.device)
    quantized_out = out if quant is None else quant.empty(tokens, width)
    norm_weight, norm_bias, eps = norm or (None, None, 0.0)
    _embed[(tokens,)](
        ids, positions, token_types, word_embeddings, position_embeddings, token_type_embeddings,
        norm_weight, norm_bias, out, quantized_out, width, eps, block=triton.next_power_of_2(width), num_warps=1,
        **quant_options(quant), **pdl_options(use_pdl),
    )  # fmt: skip
    return out, quantized_out


@triton.jit
def _embed(
    ids, positions, token_types, word_embeddings, position_embeddings, token_type_embeddings,
    norm_weight, norm_bias, out, quantized_out, width, eps, inverse_scales,
    max_value: tl.constexpr, is_per_tensor: tl.constexpr, block: tl.constexpr, use_pdl: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    column = tl.arange(0, block)
    is_column = column < width
    if norm_weight is not None:
        norm_weights = tl.load(norm_weight + column, mask=is_column, other=0.0).to(tl.float32)
        norm_biases = tl.load(norm_bias + column, mask=is_column, other=0.0).to(tl.float32)
    if max_value > 0:
        inverse_scale = load_inverse_scale(inverse_scales, column, is_column, is_per_tensor)
    wait_for_previous_kernel(use_pdl)
    token_id = tl.load(ids + token).to(tl.int64)
    position = tl.load(positions + token)
    value = tl.load(word_embeddings + token_id * width + column, mask=is_column, other=0.0).to(tl.float32)
    value += tl.load(position_embeddings + position * width + column, mask=is_column, other=0.0).to(tl.float32)
    if token_type_embeddings is not None:
        token_type = tl.load(token_types + token)
        value += tl.load(token_type_embeddings + token_type * width + column, mask=is_column, other=0.0).to(tl.float32)
    if norm_weight is not None:
        mean = tl.sum(value, axis=0) / width
        centered = tl.where(is_column, value - mean, 0.0)
        normalized = centered * tl.rsqrt(tl.sum(centered * centered, axis=0) / width + eps)
        value = normalized * norm_weights + norm_biases
    tl.store(out + token * width + column, value.to(out.dtype.element_ty), mask=is_column)
    if max_value > 0:
        value = quantize_value(value, inverse_scale, max_value)
        tl.store(quantized_out + token * width + column, value.to(quantized_out.dtype.element_ty), mask=is_column)
