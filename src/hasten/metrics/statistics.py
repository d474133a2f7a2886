"""The statistics that verification and benchmarks need, without a dependency on scipy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hasten.core.report import Interval
from hasten.core.tensors import FloatArray, IntArray


def ranks(values: FloatArray) -> FloatArray:
    """Return ranks from 1, ties averaged."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    average: FloatArray = (last - (counts - 1) / 2.0)[inverse]
    return average


def pearson(a: FloatArray, b: FloatArray) -> float:
    """Return the Pearson correlation; equal constant vectors count as perfectly correlated."""
    are_equal = np.array_equal(a, b)
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    if scale == 0.0:
        return 1.0 if are_equal else 0.0
    return float((a * b).sum() / scale)


def concordance(a: FloatArray, b: FloatArray) -> float:
    """Return Lin's concordance: correlation that also falls with a difference in mean or scale."""
    spread = float(a.var() + b.var() + (a.mean() - b.mean()) ** 2)
    if spread == 0.0:
        return 1.0
    return float(2 * ((a - a.mean()) * (b - b.mean())).mean() / spread)


def spearman(a: FloatArray, b: FloatArray) -> float:
    """Return the Spearman rank correlation."""
    return pearson(ranks(np.asarray(a, np.float64)), ranks(np.asarray(b, np.float64)))


def mean_spearman(a: FloatArray, b: FloatArray) -> float:
    """Return the mean rank correlation of the columns."""
    return float(np.mean([spearman(ours, theirs) for ours, theirs in zip(a.T, b.T, strict=True)]))


def softmax(logits: FloatArray) -> FloatArray:
    """Return the softmax over the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    scores: FloatArray = powers / powers.sum(axis=-1, keepdims=True)
    return scores


def top_indices(values: FloatArray, count: int) -> IntArray:
    """Return the indices of the greatest values of a vector, greatest first; of equal values, the first."""
    count = min(count, len(values))
    threshold = np.partition(values, -count)[-count]
    # Which of equal values `argpartition` would return differs between CPUs.
    best = np.union1d(np.flatnonzero(values > threshold), np.flatnonzero(values == threshold)[:count])
    return best[np.argsort(-values[best], kind="stable")][:count]


def top_k_overlap(ours: FloatArray, theirs: FloatArray, k: int) -> float:
    """Return the share of the k greatest values of each row that are the same, averaged over rows."""
    pairs = zip(ours, theirs, strict=True)
    shared = [len(np.intersect1d(top_indices(our, k), top_indices(their, k))) for our, their in pairs]
    return float(np.mean(shared)) / k


def relative_error(ours: FloatArray, theirs: FloatArray) -> float:
    """Return the norm of the difference relative to the norm of `theirs`."""
    return float(np.linalg.norm(ours - theirs)) / max(float(np.linalg.norm(theirs)), 1e-12)


def row_cosines(a: FloatArray, b: FloatArray) -> FloatArray:
    """Return the cosine of each pair of rows."""
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    norms = np.linalg.norm(a64, axis=1) * np.linalg.norm(b64, axis=1)
    dots = (a64 * b64).sum(axis=1)
    # Two zero vectors agree; a zero vector and any other do not.
    both_zero = ~a64.any(axis=1) & ~b64.any(axis=1)
    with np.errstate(invalid="ignore"):  # the cosine of a row that is not finite is NaN, which callers check
        cosines: FloatArray = np.where(both_zero, 1.0, dots / np.where(norms == 0, 1.0, norms))
    return cosines


def paired_drop(
    measure: Callable[[FloatArray], float],
    reference: FloatArray,
    variant: FloatArray,
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """Return the points of a metric that the variant loses, bootstrapped over rows of item scores.

    Both are resampled with the same rows (a paired bootstrap): a hard row is hard for both.
    """
    value = 100 * (measure(reference) - measure(variant))
    if np.array_equal(reference, variant):
        return Interval(value, value, value)
    random, rows = np.random.default_rng(seed), len(reference)
    drops = np.empty(resamples)
    for draw in range(resamples):
        picked = random.integers(0, rows, rows)
        drops[draw] = measure(reference.take(picked, axis=0)) - measure(variant.take(picked, axis=0))
    low, high = np.percentile(100 * drops, (2.5, 97.5))
    return Interval(value, float(low), float(high))


def median_ratio(baseline: FloatArray, contender: FloatArray, *, resamples: int = 2000, seed: int = 0) -> Interval:
    """Return how many times faster the contender is: the median of per-round ratios, bootstrapped over rounds.

    Rounds are resampled instead of runs because noise comes in bursts that slow neighbouring runs alike.
    """
    ratios = baseline / contender
    value = float(np.median(ratios))
    if len(ratios) < 3:
        return Interval(value, float(ratios.min()), float(ratios.max()))
    picks = np.random.default_rng(seed).integers(0, len(ratios), (resamples, len(ratios)))
    medians = np.median(ratios[picks], axis=1)
    low, high = np.percentile(medians, (2.5, 97.5))
    return Interval(value, float(low), float(high))
