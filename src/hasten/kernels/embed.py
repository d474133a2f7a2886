"""The sum of a token's embeddings, and its LayerNorm; or the sum alone, where whoever comes next does that."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.dependent import launching, let_next_start, wait_for_previous
from hasten.kernels.squeeze import Squeeze, factor_of, settings, squeezed


def reference(
    ids: Any,
    positions: Any,
    types: Any,
    words: Any,
    places: Any,
    kinds: Any | None,
    norm: tuple[Any, Any, float] | None = None,
) -> Any:
    total = words.float()[ids] + places.float()[positions]
    if kinds is not None:
        total = total + kinds.float()[types]
    if norm is None:
        return total
    scale, shift, eps = norm
    return torch.nn.functional.layer_norm(total, total.shape[-1:], scale.float(), shift.float(), eps)


def embed(
    ids: Any,
    positions: Any,
    types: Any,
    words: Any,
    places: Any,
    kinds: Any | None,
    norm: tuple[Any, Any, float] | None = None,
    out: Any | None = None,
    squeeze: Squeeze | None = None,
    *,
    is_dependent: bool = False,
) -> tuple[Any, Any]:
    """Of each token: its word, its place in its sequence, and its text of a pair where the model knows that.

    Twice: as it is, and squeezed where that is asked for.
    """
    tokens, width = ids.shape[0], words.shape[1]
    if out is None:
        dtype = torch.float32 if norm is None else words.dtype
        out = torch.empty((tokens, width), dtype=dtype, device=words.device)
    narrow = out if squeeze is None else squeeze.empty(tokens, width)
    scale, shift, eps = norm or (words, words, 0.0)
    _embed[(tokens,)](
        ids,
        positions,
        types,
        words,
        places,
        words if kinds is None else kinds,
        scale,
        shift,
        words if squeeze is None else squeeze.factors,
        out,
        narrow,
        width,
        eps,
        has_kinds=kinds is not None,
        has_norm=norm is not None,
        block=triton.next_power_of_2(width),
        is_dependent=is_dependent,
        num_warps=1,
        **settings(squeeze),
        **launching(is_dependent),
    )
    return out, narrow


@triton.jit
def _embed(
    ids,
    positions,
    types,
    words,
    places,
    kinds,
    scale,
    shift,
    factors,
    out,
    narrow,
    width,
    eps,
    has_kinds: tl.constexpr,
    has_norm: tl.constexpr,
    largest: tl.constexpr,
    is_uniform: tl.constexpr,
    block: tl.constexpr,
    is_dependent: tl.constexpr,
):
    token = tl.program_id(0)
    column = tl.arange(0, block)
    is_column = column < width
    if has_norm:
        scales = tl.load(scale + column, mask=is_column, other=0.0).to(tl.float32)
        shifts = tl.load(shift + column, mask=is_column, other=0.0).to(tl.float32)
    if largest > 0:
        factor = factor_of(factors, column, is_column, is_uniform)
    if is_dependent:
        let_next_start()
        wait_for_previous()
    word = tl.load(ids + token).to(tl.int64)
    place = tl.load(positions + token)
    value = tl.load(words + word * width + column, mask=is_column, other=0.0).to(tl.float32)
    value += tl.load(places + place * width + column, mask=is_column, other=0.0).to(tl.float32)
    if has_kinds:
        kind = tl.load(types + token)
        value += tl.load(kinds + kind * width + column, mask=is_column, other=0.0).to(tl.float32)
    if has_norm:
        mean = tl.sum(value, axis=0) / width
        centred = tl.where(is_column, value - mean, 0.0)
        normal = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
        value = normal * scales + shifts
    tl.store(out + token * width + column, value.to(out.dtype.element_ty), mask=is_column)
    if largest > 0:
        value = squeezed(value, factor, largest)
        tl.store(narrow + token * width + column, value.to(narrow.dtype.element_ty), mask=is_column)
