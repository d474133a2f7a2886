"""From logits to the next token, as transformers' logits processors define it and in their order.

Row by row: one row is a whole vocabulary already, and rows ask for different things.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hasten.core.generation import Sampling
from hasten.core.tensors import FloatArray, IntArray

# So many of the likeliest nearly always hold the share that top-p asks for: sorting a vocabulary takes longer than
# all else here.
_HEAD = 256


class Chooser:
    """Chooses one row's tokens. It has a generator of its own: its choices do not depend on who else is written for."""

    def __init__(self, sampling: Sampling, seen: Iterable[int]) -> None:
        self.sampling = sampling
        self.seen = set(seen)
        self._random = np.random.default_rng(sampling.seed)

    def __call__(self, logits: FloatArray) -> int:
        chosen = self._chosen(penalized(logits, self.seen, self.sampling.repetition_penalty))
        self.seen.add(chosen)
        return chosen

    def _chosen(self, logits: FloatArray) -> int:
        if self.sampling.temperature == 0:
            return int(np.argmax(logits))
        ids, weights = candidates(logits, self.sampling)
        reached = np.cumsum(weights)
        place = int(np.searchsorted(reached, self._random.random() * reached[-1], side="right"))
        return int(ids[min(place, len(ids) - 1)])


def penalized(logits: FloatArray, seen: Iterable[int], penalty: float) -> FloatArray:
    """Tokens that were there before, less likely."""
    if penalty == 1:
        return logits
    # Padding of the embedding may give a prompt ids that no logit stands for.
    ids = np.array([token for token in seen if token < len(logits)], np.int64)
    changed = logits.astype(np.float32, copy=True)
    before = changed[ids]
    changed[ids] = np.where(before < 0, before * np.float32(penalty), before / np.float32(penalty))
    return changed


def candidates(logits: FloatArray, sampling: Sampling) -> tuple[IntArray, FloatArray]:
    """The tokens that may come next, the likeliest first where that matters, each with a weight of its probability."""
    scaled = logits.astype(np.float64) / sampling.temperature
    ids = np.arange(len(scaled))
    if 0 < sampling.top_k < len(scaled):
        # Not argpartition: of tokens that tie with the last one, transformers keeps all.
        least = np.partition(scaled, -sampling.top_k)[-sampling.top_k]
        ids = np.flatnonzero(scaled >= least)
    weights = np.exp(scaled[ids] - scaled.max())
    if sampling.top_p < 1:
        kept = _nucleus(weights, sampling.top_p)
        ids, weights = ids[kept], weights[kept]
    if sampling.min_p > 0:
        likely = weights >= sampling.min_p * weights.max()
        ids, weights = ids[likely], weights[likely]
    return ids, weights


def _nucleus(weights: FloatArray, share: float) -> IntArray:
    """Places of the likeliest that together have this share, and at least one."""
    needed = share * weights.sum()
    size = len(weights)
    head = np.argpartition(weights, size - _HEAD)[size - _HEAD :] if size > _HEAD else np.arange(size)
    if weights[head].sum() < needed:
        head = np.arange(size)
    order = head[np.argsort(-weights[head], kind="stable")]
    before = np.cumsum(weights[order]) - weights[order]
    kept = order[before < needed]
    return kept if len(kept) else order[:1]
