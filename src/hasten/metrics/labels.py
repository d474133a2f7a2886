"""Label and entity metrics as scikit-learn and seqeval define them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hasten.core.report import Metric
from hasten.core.tensors import FloatArray
from hasten.metrics.entities import spans
from hasten.metrics.statistics import pearson, spearman

# One label index per row, or one truth value per row and label where several labels may be right.
Labels: TypeAlias = NDArray[Any]


ENTITY_METRICS = ("entity F1", "precision", "recall")
CORRELATIONS = ("Spearman correlation", "Pearson correlation")


def accuracy(expected: Labels, predicted: Labels) -> float:
    """Return the share of equal labels."""
    return float((expected == predicted).mean())


def macro_f1(expected: Labels, predicted: Labels) -> float:
    """Return the mean F1 over labels: over those that occur, or over all columns (0 for one that never occurs)."""
    hits, total = _counts(expected, predicted)
    return float((2 * hits / np.maximum(total, 1)).mean())


def micro_f1(expected: Labels, predicted: Labels) -> float:
    """Return F1 over all labels together; 0 if there are neither expected nor predicted labels."""
    hits, total = _counts(expected, predicted)
    return float(2 * hits.sum() / max(1, total.sum()))


def entity_counts(expected: Sequence[str], predicted: Sequence[str]) -> tuple[int, int, int]:
    """Return the numbers of correct, predicted and expected entities; a correct one has the right type and ends."""
    theirs, ours = spans(expected), spans(predicted)
    return len(ours & theirs), len(ours), len(theirs)


def entity_metric(counts: FloatArray) -> Metric:
    """Return micro F1, precision and recall of rows of `entity_counts`; 0 where there are no entities."""
    correct, predicted, expected = (float(total) for total in counts.sum(axis=0))
    values = (2 * correct / max(1, predicted + expected), correct / max(1, predicted), correct / max(1, expected))
    f1, *also = zip(ENTITY_METRICS, values, strict=True)
    return Metric(*f1, len(counts), dict(also))


def correlation(pairs: FloatArray) -> Metric:
    """Return the Spearman and Pearson correlation of two columns."""
    ours, theirs = pairs.T
    return Metric(CORRELATIONS[0], spearman(ours, theirs), len(pairs), {CORRELATIONS[1]: pearson(ours, theirs)})


def _counts(expected: Labels, predicted: Labels) -> tuple[Labels, Labels]:
    """Return, per label, the correct predictions, and the sum of expected and predicted ones."""
    if expected.ndim == 2:
        # Dot products are faster than sums over columns, and thousands of resamples are counted.
        expected, predicted, ones = (
            np.asarray(expected, np.float64),
            np.asarray(predicted, np.float64),
            np.ones(len(expected)),
        )
        return np.einsum("ij,ij->j", expected, predicted), ones @ expected + ones @ predicted
    size = int(max(expected.max(), predicted.max())) + 1
    total = np.bincount(expected, minlength=size) + np.bincount(predicted, minlength=size)
    hits = np.bincount(expected[expected == predicted], minlength=size)
    return hits[total > 0], total[total > 0]
