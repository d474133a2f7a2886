"""Operators of ONNX Runtime's own, as the tracing exporter takes them: in PyTorch they have shapes and no values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_DOMAIN = "com.microsoft"


@dataclass(frozen=True, slots=True)
class About:
    """What one attention is told beside tensors."""

    heads: int
    kv_heads: int
    scale: float
    window: int = -1
    softcap: float = 0.0
    rotates: bool = False


class CausalAttention(torch.autograd.Function):
    """To what came before, which is kept: query, key, value, past key and value, last places, longest, cosines, sines,
    bias."""

    @staticmethod
    def forward(_: Any, query: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        return torch.zeros_like(query), rest[2].clone(), rest[3].clone()

    @staticmethod
    def symbolic(g: Any, *inputs: Any) -> Any:
        *tensors, bias, about = inputs
        made = g.op(
            f"{_DOMAIN}::GroupQueryAttention",
            *_given(g, (*tensors, None, bias)),
            outputs=3,
            num_heads_i=about.heads,
            kv_num_heads_i=about.kv_heads,
            scale_f=about.scale,
            local_window_size_i=about.window,
            softcap_f=about.softcap,
            do_rotary_i=int(about.rotates),
        )
        for value, like in zip(made, (tensors[0], tensors[3], tensors[4]), strict=True):
            value.setType(like.type())
        return made


class FullAttention(torch.autograd.Function):
    """Of all to all, or to so many keys of each row (rows, heads, tokens, width): query, key, value, lengths, bias."""

    @staticmethod
    def forward(_: Any, query: torch.Tensor, *__: Any) -> torch.Tensor:
        return torch.zeros_like(query)

    @staticmethod
    def symbolic(g: Any, query: Any, key: Any, value: Any, lengths: Any, bias: Any, about: About) -> Any:
        made = g.op(
            f"{_DOMAIN}::MultiHeadAttention",
            *_given(g, (query, key, value, None, lengths, bias)),
            num_heads_i=about.heads,
            scale_f=about.scale,
        )
        made.setType(query.type())
        return made


class Head(torch.autograd.Function):
    """A product with the weights as they lie, so that a table of words that is the head too is stored once."""

    @staticmethod
    def forward(_: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, weight, bias)

    @staticmethod
    def symbolic(g: Any, hidden: Any, weight: Any, bias: Any) -> Any:
        return g.op("Gemm", *_given(g, (hidden, weight, bias)), transB_i=1)


def _given(g: Any, values: tuple[Any, ...]) -> list[Any]:
    """Inputs with a placeholder for each that is left out, none behind the last one."""
    is_there = [value is not None and not value.node().mustBeNone() for value in values]
    last = max(place for place, there in enumerate(is_there) if there)
    return [value if there else _nothing(g) for value, there in zip(values[: last + 1], is_there, strict=False)]


def _nothing(g: Any) -> Any:
    made = g.op("prim::Constant")
    made.setType(torch._C.OptionalType.ofTensor())
    return made
