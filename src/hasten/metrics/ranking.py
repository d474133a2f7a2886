"""Ranking metrics for rerankers: nDCG, MRR and MAP.

Relevance is a number, zero for none. Among documents with equal scores the less relevant rank first, so that a model
that does not separate them gains nothing from their input order.
"""

from __future__ import annotations

import numpy as np

from hasten.core.tensors import FloatArray


def best_first(scores: FloatArray, relevance: FloatArray) -> FloatArray:
    """Return the relevance of the documents in the order of their scores, best first."""
    return relevance[np.lexsort((relevance, -scores))]


def ndcg(scores: FloatArray, relevance: FloatArray, k: int = 10) -> float:
    """Return scikit-learn's nDCG of the first k documents; 0 if none is relevant."""
    discounts = 1.0 / np.log2(np.arange(2, 2 + min(k, len(relevance))))
    ideal = float(np.sort(relevance)[::-1][:k] @ discounts)
    return float(best_first(scores, relevance)[:k] @ discounts) / ideal if ideal else 0.0


def reciprocal_rank(scores: FloatArray, relevance: FloatArray, k: int = 10) -> float:
    """Return the reciprocal rank of the first relevant document; 0 if it is not among the first k."""
    hits = np.flatnonzero(best_first(scores, relevance)[:k] > 0)
    return 1.0 / (int(hits[0]) + 1) if len(hits) else 0.0


def average_precision(scores: FloatArray, relevance: FloatArray) -> float:
    """Return the mean precision at the rank of each relevant document; 0 if there is none."""
    hits = np.flatnonzero(best_first(scores, relevance) > 0)
    return float(np.mean(np.arange(1, len(hits) + 1) / (hits + 1))) if len(hits) else 0.0
