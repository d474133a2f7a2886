"""Judge embeddings by rated pairs of texts, and by the similarities between texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hasten.core.errors import InputError
from hasten.core.report import Metric
from hasten.core.tensors import FloatArray
from hasten.metrics.labels import CORRELATIONS, correlation
from hasten.metrics.statistics import spearman
from hasten.tasks import Row, TaskSpec
from hasten.tasks._labels import check_spread, is_number, read_labels

# Texts whose similarities are compared: 200 texts give 19,900 pairs.
MAX_COMPARED_TEXTS = 200


class RatedPairs:
    """The labels and metrics of tasks whose rows are pairs with a "score": the correlation with their similarity."""

    def gold(self, rows: Sequence[Row], spec: TaskSpec) -> list[object] | None:
        return read_labels(rows, "score", _gold)

    def metrics(self, gold: Sequence[object], spec: TaskSpec) -> tuple[str, ...]:
        check_spread(gold)
        return CORRELATIONS

    def metric(self, item_scores: FloatArray, spec: TaskSpec) -> Metric:
        return correlation(item_scores)


def similarities(vectors: FloatArray, *, is_cosine: bool = True) -> FloatArray:
    """Return the cosine, or the dot product, of every two vectors."""
    if is_cosine:
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = vectors / np.where(norms == 0, 1.0, norms)
    products: FloatArray = vectors @ vectors.T
    return products


def pair_correlation(ours: FloatArray, theirs: FloatArray) -> float | None:
    """Return the rank correlation of the similarities of different texts; None for less than two pairs."""
    upper = np.triu_indices(len(ours), 1)
    return spearman(ours[upper], theirs[upper]) if len(upper[0]) > 1 else None


def _gold(row: Row, position: int) -> float:
    score = row.get("score")
    if not is_number(score) or row.get("text_pair") is None:
        raise InputError(f'row {position} has no "text_pair" with a number in "score"')
    return float(score)
