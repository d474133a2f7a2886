"""Word embeddings with their LayerNorm, and the same centered, for a pre-norm encoder whose residual has mean zero."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.ops.quantize import ActivationQuant, load_inverse_scale, quant_options, quantize_value


def reference(ids: Any, word_embeddings: Any, norm_weight: Any, eps: float) -> tuple[Any, Any]:
    """Return the normalized embeddings and the centered ones, in plain PyTorch."""
    width = word_embeddings.shape[1]
    normed = torch.nn.functional.layer_norm(
        word_embeddings.float()[ids], (width,), norm_weight.float(), norm_weight.new_zeros(width).float(), eps
    )
    return normed, normed - normed.mean(1, keepdim=True)


def embed_norm(
    ids: Any, word_embeddings: Any, norm_weight: Any, eps: float, quant: ActivationQuant | None = None,
    *, dtype: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Return the normalized embeddings, or these quantized, and the residual: the centered ones, in `dtype`."""
    tokens, width = ids.shape[0], word_embeddings.shape[1]
    dtype = word_embeddings.dtype if dtype is None else dtype
    residual = torch.empty((tokens, width), dtype=dtype, device=word_embeddings.device)
    out = torch.empty_like(residual) if quant is None else quant.empty(tokens, width)
    _embed_norm[(tokens,)](
        ids, word_embeddings, norm_weight, out, residual, width, eps, block=triton.next_power_of_2(width), num_warps=1,
        **quant_options(quant),
    )  # fmt: skip
    return out, residual


@triton.jit
def _embed_norm(
    ids, word_embeddings, norm_weight, out, residual, width, eps, inverse_scales,
    max_value: tl.constexpr, is_per_tensor: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    is_column = column < width
    if max_value > 0:
        inverse_scale = load_inverse_scale(inverse_scales, column, is_column, is_per_tensor)
    norm_weights = tl.load(norm_weight + column, mask=is_column, other=0.0).to(tl.float32)
    token_id = tl.load(ids + token).to(tl.int64)
    value = tl.load(word_embeddings + token_id * width + column, mask=is_column, other=0.0).to(tl.float32)
    centered = tl.where(is_column, value - tl.sum(value, axis=0) / width, 0.0)
    value = centered * tl.rsqrt(tl.sum(centered * centered, axis=0) / width + eps) * norm_weights
    at = token * width + column
    tl.store(residual + at, (value - tl.sum(value, axis=0) / width).to(residual.dtype.element_ty), mask=is_column)
    if max_value > 0:
        value = quantize_value(value, inverse_scale, max_value)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=is_column)
