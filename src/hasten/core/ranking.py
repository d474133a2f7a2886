"""How well scores put relevant documents first: the measures rerankers are known by.

Relevance is a number, zero for none. Of documents with equal scores the less relevant count as first: who cannot tell
them apart earns nothing for the order they came in.
"""

from __future__ import annotations

import numpy as np

from hasten.core.tensors import FloatArray


def best_first(scores: FloatArray, relevance: FloatArray) -> FloatArray:
    """The relevance of the documents in the order of their scores."""
    return relevance[np.lexsort((relevance, -scores))]


def ndcg(scores: FloatArray, relevance: FloatArray, k: int = 10) -> float:
    """Discounted gain of the first k over that of the best order; 0 where nothing is relevant: scikit-learn's."""
    discounts = 1.0 / np.log2(np.arange(2, 2 + min(k, len(relevance))))
    ideal = float(np.sort(relevance)[::-1][:k] @ discounts)
    return float(best_first(scores, relevance)[:k] @ discounts) / ideal if ideal else 0.0


def reciprocal_rank(scores: FloatArray, relevance: FloatArray, k: int = 10) -> float:
    """One over the place of the first relevant document; 0 where it is not among the first k."""
    places = np.flatnonzero(best_first(scores, relevance)[:k] > 0)
    return 1.0 / (int(places[0]) + 1) if len(places) else 0.0


def average_precision(scores: FloatArray, relevance: FloatArray) -> float:
    """The mean, over relevant documents, of the share of relevant ones down to each; 0 where there are none."""
    places = np.flatnonzero(best_first(scores, relevance) > 0)
    return float(np.mean(np.arange(1, len(places) + 1) / (places + 1))) if len(places) else 0.0
