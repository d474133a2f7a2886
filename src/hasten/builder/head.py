"""The module that is exported: the model, and what turns its output into the graph's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hasten.tasks import Pooling

# Below any activation, above the smallest float: padding never wins a maximum.
_NEVER = -1e9


class Exportable(nn.Module):
    """Takes tensors by name, gives a tuple of tensors: what exporters and sessions want."""

    def __init__(self, model: nn.Module, inputs: Sequence[str], output: str, head: nn.Module | None) -> None:
        super().__init__()
        self.model = model
        self.inputs = tuple(inputs)
        self.output = output
        self.head = head
        self.eval()

    def forward(self, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor, ...]:
        feeds = dict(zip(self.inputs, args, strict=False)) | kwargs
        outputs: Any = self.model(**feeds, return_dict=True)
        if self.head is None:
            return (outputs[self.output],)
        return (self.head(outputs["last_hidden_state"], feeds["attention_mask"]),)


class PoolingHead(nn.Module):
    """Token vectors to one vector a text: pooling, then dense layers where the model has them, then length one."""

    def __init__(self, pooling: Sequence[Pooling], dense: Sequence[nn.Module], normalize: bool) -> None:
        super().__init__()
        self.pooling = tuple(pooling)
        self.dense = nn.ModuleList(dense)
        self.normalize = normalize

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        pooled = torch.cat([pool(kind, tokens, mask) for kind in self.pooling], dim=-1)
        for layer in self.dense:
            pooled = layer(pooled)
        return nn.functional.normalize(pooled, p=2.0, dim=-1) if self.normalize else pooled


def pool(kind: Pooling, tokens: Tensor, mask: Tensor) -> Tensor:
    """As sentence-transformers defines each, for rows that start at the first position."""
    weights = mask.unsqueeze(-1).to(tokens.dtype)
    if kind is Pooling.CLS:
        return tokens[:, 0]
    if kind is Pooling.MAX:
        return (tokens + (1.0 - weights) * _NEVER).amax(dim=1)
    if kind is Pooling.LAST_TOKEN:
        last = weights.sum(dim=1, keepdim=True) - 1.0
        # A one-hot product instead of a gather: the same value, and every exporter and runtime takes it.
        places = torch.arange(tokens.shape[1], device=tokens.device, dtype=tokens.dtype).view(1, -1, 1)
        return (tokens * (places == last).to(tokens.dtype)).sum(dim=1)
    if kind is Pooling.WEIGHTED_MEAN:
        weights = weights * torch.cumsum(torch.ones_like(weights), dim=1)
    total = weights.sum(dim=1).clamp(min=1e-9)
    summed = (tokens * weights).sum(dim=1)
    return summed / (total.sqrt() if kind is Pooling.MEAN_SQRT_LEN else total)
