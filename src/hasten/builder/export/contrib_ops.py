"""Define ONNX Runtime's contrib operators for the tracing exporter; in PyTorch they have shapes but no values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_DOMAIN = "com.microsoft"


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """The attributes of an attention operator."""

    heads: int
    kv_heads: int
    scale: float
    window: int = -1
    softcap: float = 0.0
    rotates: bool = False


class CausalAttention(torch.autograd.Function):
    """Causal attention with a KV cache (GroupQueryAttention).

    Inputs: query, key, value, past key and value, seqlens_k, total sequence length, cosines, sines, bias.
    """

    @staticmethod
    def forward(_: Any, query: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        return torch.zeros_like(query), rest[2].clone(), rest[3].clone()

    @staticmethod
    def symbolic(g: Any, *inputs: Any) -> Any:
        *tensors, bias, config = inputs
        result = g.op(
            f"{_DOMAIN}::GroupQueryAttention",
            *_optional_inputs(g, (*tensors, None, bias)),
            outputs=3,
            num_heads_i=config.heads,
            kv_num_heads_i=config.kv_heads,
            scale_f=config.scale,
            local_window_size_i=config.window,
            softcap_f=config.softcap,
            do_rotary_i=int(config.rotates),
        )
        for value, like in zip(result, (tensors[0], tensors[3], tensors[4]), strict=True):
            value.setType(like.type())
        return result


class FullAttention(torch.autograd.Function):
    """Attention of all queries to all keys, or to the first `lengths` keys of each row (MultiHeadAttention).

    Inputs of (rows, heads, tokens, width): query, key, value; then lengths and bias.
    """

    @staticmethod
    def forward(_: Any, query: torch.Tensor, *__: Any) -> torch.Tensor:
        return torch.zeros_like(query)

    @staticmethod
    def symbolic(g: Any, query: Any, key: Any, value: Any, lengths: Any, bias: Any, config: AttentionConfig) -> Any:
        result = g.op(
            f"{_DOMAIN}::MultiHeadAttention",
            *_optional_inputs(g, (query, key, value, None, lengths, bias)),
            num_heads_i=config.heads,
            scale_f=config.scale,
        )
        result.setType(query.type())
        return result


class LMHead(torch.autograd.Function):
    """A linear layer with untransposed weights, so that an embedding table tied to the head is stored once."""

    @staticmethod
    def forward(_: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, weight, bias)

    @staticmethod
    def symbolic(g: Any, hidden: Any, weight: Any, bias: Any) -> Any:
        return g.op("Gemm", *_optional_inputs(g, (hidden, weight, bias)), transB_i=1)


def _optional_inputs(g: Any, values: tuple[Any, ...]) -> list[Any]:
    """Return the inputs up to the last that is present, with a placeholder for each that is absent."""
    is_present = [value is not None and not value.node().mustBeNone() for value in values]
    last = max(index for index, present in enumerate(is_present) if present)
    return [value if present else _none(g) for value, present in zip(values[: last + 1], is_present, strict=False)]


def _none(g: Any) -> Any:
    constant = g.op("prim::Constant")
    constant.setType(torch._C.OptionalType.ofTensor())
    return constant
