"""From logits to the next token, as transformers' logits warpers define it and in their order.

Row by row: one row is a whole vocabulary already, and rows ask for different things.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from hasten.core.generation import Sampling
from hasten.core.tensors import FloatArray, IntArray
from hasten.generation.rules import Rules, single

# So many of the likeliest nearly always hold the share that top-p asks for: sorting a vocabulary takes longer than
# all else here.
_HEAD = 256
# Values whose maximum or sum is taken together, so that only few of a vocabulary are looked at one by one.
_RUN = 64


class Chooser:
    """Chooses one row's tokens. It has a generator of its own: its choices do not depend on who else is written for."""

    def __init__(self, sampling: Sampling, before: Sequence[int], end_ids: Collection[int] = ()) -> None:
        self.sampling = sampling
        self._rules = Rules(sampling, before, end_ids)
        self._written: list[int] = []
        self._random = np.random.default_rng(sampling.seed)

    def __call__(self, logits: FloatArray) -> int:
        chosen = self._chosen(self._rules(logits, self._written))
        self._written.append(chosen)
        return chosen

    def _chosen(self, logits: FloatArray) -> int:
        if self.sampling.temperature == 0:
            return int(np.argmax(logits))
        ids, weights = candidates(logits, self.sampling)
        return int(ids[_drawn(weights, self._random.random())])


def _drawn(weights: FloatArray, share: float) -> int:
    """The place where, added up, they reach this share of all. Runs first: one sum after the other is slow."""
    runs = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _RUN), dtype=np.float64))
    reached = share * runs[-1]
    run = min(int(np.searchsorted(runs, reached, side="right")), len(runs) - 1)
    inside = np.cumsum(weights[run * _RUN : (run + 1) * _RUN], dtype=np.float64)
    place = int(np.searchsorted(inside, reached - (runs[run - 1] if run else 0), side="right"))
    return run * _RUN + min(place, len(inside) - 1)


def candidates(logits: FloatArray, sampling: Sampling) -> tuple[IntArray, FloatArray]:
    """The tokens that may come next, each with a weight in proportion to its probability."""
    ids: IntArray = np.arange(len(logits))
    kept_logits = logits
    if 0 < sampling.top_k < len(logits):
        ids = largest(logits, sampling.top_k)
        kept_logits = logits[ids]
    weights = np.exp((kept_logits - logits.max()) / single(sampling.temperature))
    if sampling.top_p < 1:
        kept = _nucleus(weights, sampling.top_p)
        ids, weights = ids[kept], weights[kept]
    if sampling.min_p > 0:
        likely = weights >= sampling.min_p * weights.max()
        ids, weights = ids[likely], weights[likely]
    return ids, weights


def largest(values: FloatArray, count: int) -> IntArray:
    """Places of so many of the largest, and of those that tie with the last of them, as transformers keeps them."""
    places: IntArray = np.arange(len(values))
    runs = len(values) // _RUN
    if runs >= count:
        # So many runs have a maximum of at least this, so many values then do: looking through those few is all.
        maxima = values[: runs * _RUN].reshape(runs, _RUN).max(axis=1)
        places = np.flatnonzero(values >= np.partition(maxima, runs - count)[runs - count])
    among = values[places]
    kept: IntArray = places[among >= np.partition(among, len(among) - count)[len(among) - count]]
    return kept


def _nucleus(weights: FloatArray, share: float) -> IntArray:
    """Places of the likeliest that together have this share, and at least one."""
    needed = share * weights.sum(dtype=np.float64)
    head = largest(weights, _HEAD) if len(weights) > _HEAD else np.arange(len(weights))
    if weights[head].sum(dtype=np.float64) < needed:
        head = np.arange(len(weights))
    order = head[np.argsort(-weights[head], kind="stable")]
    sums = np.cumsum(weights[order], dtype=np.float64)
    count = int(np.searchsorted(sums, needed)) + 1
    return order[:count]
