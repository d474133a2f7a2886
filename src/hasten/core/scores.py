"""How right answers are, as those define it whom people cite: scikit-learn for labels, seqeval for entities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hasten.core.entities import spans
from hasten.core.report import Metric
from hasten.core.statistics import pearson, spearman
from hasten.core.tensors import FloatArray

# One label's number a row, or a row of truth values with a column a label where several may be right.
Labels: TypeAlias = NDArray[Any]


ENTITY_METRICS = ("entity F1", "precision", "recall")
CORRELATIONS = ("Spearman correlation", "Pearson correlation")


def accuracy(wanted: Labels, found: Labels) -> float:
    return float((wanted == found).mean())


def macro_f1(wanted: Labels, found: Labels) -> float:
    """The mean of every label's F1. Numbers count where they occur at all; columns always, as 0 where they do not."""
    hits, total = _counts(wanted, found)
    return float((2 * hits / np.maximum(total, 1)).mean())


def micro_f1(wanted: Labels, found: Labels) -> float:
    """F1 over all labels together; 0 where there is nothing to find and nothing found."""
    hits, total = _counts(wanted, found)
    return float(2 * hits.sum() / max(1, total.sum()))


def entity_counts(wanted: Sequence[str], found: Sequence[str]) -> tuple[int, int, int]:
    """How many entities of a row of tags are right, were found, and are there; right is of its type, at both ends."""
    theirs, ours = spans(wanted), spans(found)
    return len(ours & theirs), len(ours), len(theirs)


def entity_metric(counts: FloatArray) -> Metric:
    """Micro F1 over all entities that a row was counted for. What cannot be told for want of entities is 0."""
    right, answered, asked = (float(own) for own in counts.sum(axis=0))
    values = (2 * right / max(1, answered + asked), right / max(1, answered), right / max(1, asked))
    f1, *also = zip(ENTITY_METRICS, values, strict=True)
    return Metric(*f1, len(counts), dict(also))


def correlated(pairs: FloatArray) -> Metric:
    """How two columns of numbers go together."""
    ours, theirs = pairs.T
    return Metric(CORRELATIONS[0], spearman(ours, theirs), len(pairs), {CORRELATIONS[1]: pearson(ours, theirs)})


def _counts(wanted: Labels, found: Labels) -> tuple[Labels, Labels]:
    """For every label: how often it was found rightly, and how often it was wanted or found, added up."""
    if wanted.ndim == 2:
        # As products, not as sums down columns: thousands of resamples are counted.
        wanted, found, ones = np.asarray(wanted, np.float64), np.asarray(found, np.float64), np.ones(len(wanted))
        return np.einsum("ij,ij->j", wanted, found), ones @ wanted + ones @ found
    size = int(max(wanted.max(), found.max())) + 1
    total = np.bincount(wanted, minlength=size) + np.bincount(found, minlength=size)
    hits = np.bincount(wanted[wanted == found], minlength=size)
    return hits[total > 0], total[total > 0]
