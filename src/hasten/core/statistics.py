"""The few statistics that verification and benchmarks need, without scipy at serving time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hasten.core.tensors import FloatArray


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % confidence interval."""

    value: float
    low: float
    high: float


def ranks(values: FloatArray) -> FloatArray:
    """Ranks from 1, ties averaged."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    average: FloatArray = (last - (counts - 1) / 2.0)[inverse]
    return average


def pearson(a: FloatArray, b: FloatArray) -> float:
    """Correlation; two constant vectors that are equal count as perfectly correlated."""
    are_equal = np.array_equal(a, b)
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    if scale == 0.0:
        return 1.0 if are_equal else 0.0
    return float((a * b).sum() / scale)


def concordance(a: FloatArray, b: FloatArray) -> float:
    """Lin's: Pearson's correlation, less for a difference in mean or scale, which correlation alone cannot see."""
    spread = float(a.var() + b.var() + (a.mean() - b.mean()) ** 2)
    if spread == 0.0:
        return 1.0
    return float(2 * ((a - a.mean()) * (b - b.mean())).mean() / spread)


def spearman(a: FloatArray, b: FloatArray) -> float:
    return pearson(ranks(np.asarray(a, np.float64)), ranks(np.asarray(b, np.float64)))


def relative_error(ours: FloatArray, theirs: FloatArray) -> float:
    return float(np.linalg.norm(ours - theirs)) / max(float(np.linalg.norm(theirs)), 1e-12)


def row_cosines(a: FloatArray, b: FloatArray) -> FloatArray:
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    norms = np.linalg.norm(a64, axis=1) * np.linalg.norm(b64, axis=1)
    products = (a64 * b64).sum(axis=1)
    # Two zero vectors agree; a zero vector against anything else does not.
    both_zero = ~a64.any(axis=1) & ~b64.any(axis=1)
    with np.errstate(invalid="ignore"):  # a row that is not finite has no cosine: NaN, which the caller sees
        cosines: FloatArray = np.where(both_zero, 1.0, products / np.where(norms == 0, 1.0, norms))
    return cosines


def paired_drop(
    measure: Callable[[FloatArray], float],
    reference: FloatArray,
    variant: FloatArray,
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """Points of a measure that the variant loses, bootstrapped over rows of marks.

    The same rows are drawn for both: what makes a row hard hits both alike, and only their differences are chance.
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
    """How many times faster the contender is: median of per-round ratios, bootstrapped over rounds.

    Rounds are the unit because noise comes in stretches that hit neighbouring runs alike.
    """
    ratios = baseline / contender
    value = float(np.median(ratios))
    if len(ratios) < 3:
        return Interval(value, float(ratios.min()), float(ratios.max()))
    picks = np.random.default_rng(seed).integers(0, len(ratios), (resamples, len(ratios)))
    medians = np.median(ratios[picks], axis=1)
    low, high = np.percentile(medians, (2.5, 97.5))
    return Interval(value, float(low), float(high))
