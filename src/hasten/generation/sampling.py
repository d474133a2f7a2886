"""Choose the next token from logits, by the definitions and in the order of transformers' logits warpers.

Sequences are handled one by one: each is a whole vocabulary wide, and their parameters differ.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from hasten.core.generation_types import SamplingParams
from hasten.core.tensors import FloatArray, IntArray
from hasten.generation.logits import LogitsProcessor, finite_factor

# This many of the most likely tokens nearly always hold the share of top-p: sorting a whole vocabulary would take
# longer than everything else here.
_HEAD = 256
# Values whose maximum or sum is computed together, so that only a few of a vocabulary are examined one by one.
_CHUNK = 64


class Sampler:
    """Chooses the tokens of one sequence. It has its own random generator: other sequences do not affect it."""

    def __init__(
        self, sampling: SamplingParams, prompt_ids: Sequence[int], eos_token_ids: Collection[int] = ()
    ) -> None:
        self.sampling = sampling
        self._process_logits = LogitsProcessor(sampling, prompt_ids, eos_token_ids)
        self._generated: list[int] = []
        self._random = np.random.default_rng(sampling.seed)

    def __call__(self, logits: FloatArray) -> int:
        processed = self._process_logits(logits, self._generated)
        if self.sampling.temperature == 0:
            token = int(np.argmax(processed))
        else:
            ids, weights = candidates(processed, self.sampling)
            token = int(ids[_draw(weights, self._random.random())])
        self._generated.append(token)
        return token


def _draw(weights: FloatArray, share: float) -> int:
    """Return the index at which the cumulative weights reach this share; by chunks, since a full sum is slow."""
    sums = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _CHUNK), dtype=np.float64))
    target = share * sums[-1]
    chunk = min(int(np.searchsorted(sums, target, side="right")), len(sums) - 1)
    inside = np.cumsum(weights[chunk * _CHUNK : (chunk + 1) * _CHUNK], dtype=np.float64)
    index = int(np.searchsorted(inside, target - (sums[chunk - 1] if chunk else 0), side="right"))
    return chunk * _CHUNK + min(index, len(inside) - 1)


def candidates(logits: FloatArray, sampling: SamplingParams) -> tuple[IntArray, FloatArray]:
    """Return the tokens to sample from, each with a weight in proportion to its probability."""
    ids: IntArray = np.arange(len(logits))
    top_logits = logits
    if 0 < sampling.top_k < len(logits):
        ids = largest(logits, sampling.top_k)
        top_logits = logits[ids]
    weights = np.exp((top_logits - logits.max()) / finite_factor(sampling.temperature))
    if sampling.top_p < 1:
        nucleus = _nucleus(weights, sampling.top_p)
        ids, weights = ids[nucleus], weights[nucleus]
    if sampling.min_p > 0:
        is_likely = weights >= sampling.min_p * weights.max()
        ids, weights = ids[is_likely], weights[is_likely]
    return ids, weights


def largest(values: FloatArray, count: int) -> IntArray:
    """Return the indices of the `count` largest values, and of those that tie with the last, as transformers does."""
    indices: IntArray = np.arange(len(values))
    chunks = len(values) // _CHUNK
    if chunks >= count:
        # `count` chunks have a maximum of at least this, so `count` values do: only those values need a closer look.
        maxima = values[: chunks * _CHUNK].reshape(chunks, _CHUNK).max(axis=1)
        indices = np.flatnonzero(values >= np.partition(maxima, chunks - count)[chunks - count])
    remaining = values[indices]
    top: IntArray = indices[remaining >= np.partition(remaining, len(remaining) - count)[len(remaining) - count]]
    return top


def _nucleus(weights: FloatArray, share: float) -> IntArray:
    """Return the indices of the most likely tokens that together have this share, at least one."""
    target = share * weights.sum(dtype=np.float64)
    head = largest(weights, _HEAD) if len(weights) > _HEAD else np.arange(len(weights))
    if weights[head].sum(dtype=np.float64) < target:
        return _wide_nucleus(weights, target)
    order = head[np.argsort(-weights[head], kind="stable")]
    sums = np.cumsum(weights[order], dtype=np.float64)
    count = int(np.searchsorted(sums, target)) + 1
    return order[:count]


def _wide_nucleus(weights: FloatArray, target: float) -> IntArray:
    """Return the nucleus in no order: sorting all values is many times faster than sorting all indices."""
    descending = np.sort(weights)[::-1]
    count = int(np.searchsorted(np.cumsum(descending, dtype=np.float64), target)) + 1
    last = descending[min(count, len(weights)) - 1]
    above, ties = np.flatnonzero(weights > last), np.flatnonzero(weights == last)
    return np.concatenate([above, ties[: count - len(above)]])
