"""Look up T5's relative position bias in a table by distance.

transformers computes its bucket from logarithms, and those of PyTorch and of a runtime may differ in the last digit,
which rounds to another bucket.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch


@contextmanager
def relative_bias(
    model: Any, distances: Callable[[Any], torch.Tensor], lookup: Callable[..., torch.Tensor]
) -> Iterator[None]:
    """Replace the bias of each attention by `lookup(table, queries, keys)` within the context.

    The table has a row for each of the `distances` of the attention, which are negative for keys before the query.
    """
    parts = [part for part in model.modules() if getattr(part, "has_relative_attention_bias", False)]
    for part in parts:
        table = part.relative_attention_bias.weight.detach()[_buckets(part, distances(part))]
        part.compute_bias = lambda queries, keys, *_, table=table, **__: lookup(table, queries, keys)
    try:
        yield
    finally:
        for part in parts:
            del part.compute_bias


def relative_bias_of_any_length(model: Any) -> AbstractContextManager[None]:
    """Replace the bias of an encoder: beyond the maximum distance, all distances share a bucket."""

    def distances(part: Any) -> torch.Tensor:
        limit = part.relative_attention_max_distance
        return torch.arange(-limit, limit + 1)

    return relative_bias(model, distances, lambda table, *sizes: bidirectional_bias(table, *sizes, is_clamped=True))


def bidirectional_bias(table: torch.Tensor, queries: Any, keys: Any, *, is_clamped: bool = False) -> torch.Tensor:
    """Return the bias by the distance of each key from each query, in both directions."""
    half = table.shape[0] // 2
    distances = torch.arange(keys)[None] - torch.arange(queries)[:, None]
    distances = distances.clamp(-half, half) if is_clamped else distances
    return torch.nn.functional.embedding(distances + half, table).permute(2, 0, 1)[None]


def _buckets(part: Any, distances: torch.Tensor) -> torch.Tensor:
    options = {
        "bidirectional": not part.is_decoder,
        "num_buckets": part.relative_attention_num_buckets,
        "max_distance": part.relative_attention_max_distance,
    }
    # UMT5 reads them from itself.
    accepted = inspect.signature(part._relative_position_bucket).parameters
    buckets: torch.Tensor = part._relative_position_bucket(
        distances, **{name: value for name, value in options.items() if name in accepted}
    )
    return buckets
