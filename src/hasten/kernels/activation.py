"""What stands between the two products of a feed-forward layer, in place: bias and GELU."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 1024
# transformers' names for the two.
EXACT, TANH = "gelu", "gelu_new"


def reference(x: Any, bias: Any, kind: str = EXACT) -> Any:
    return torch.nn.functional.gelu(x.float() + bias.float(), approximate="tanh" if kind == TANH else "none")


def bias_gelu(x: Any, bias: Any, kind: str = EXACT) -> Any:
    rows, width = x.shape
    total = rows * width
    _bias_gelu[(triton.cdiv(total, _BLOCK),)](x, bias, total, width, is_tanh=kind == TANH, block=_BLOCK, num_warps=4)
    return x


@triton.jit
def gelu(value, is_tanh: tl.constexpr):
    if is_tanh:
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        # tanh by the exponential, which has an instruction.
        result = value * tl.sigmoid(2.0 * inner)
    else:
        result = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    return result


@triton.jit
def _bias_gelu(x, bias, total, width, is_tanh: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    is_inside = at < total
    value = tl.load(x + at, mask=is_inside, other=0.0).to(tl.float32)
    value += tl.load(bias + at % width, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(x + at, gelu(value, is_tanh).to(x.dtype.element_ty), mask=is_inside)
