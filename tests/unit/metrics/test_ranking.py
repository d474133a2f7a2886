from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, ndcg_score

from hasten.metrics.ranking import average_precision, best_first, ndcg, reciprocal_rank


@given(
    relevance=st.lists(st.integers(0, 4), min_size=2, max_size=30),
    seed=st.integers(0, 2**31),
    k=st.sampled_from([1, 3, 10]),
)
def test_ndcg_equals_sklearn(relevance: list[int], seed: int, k: int) -> None:
    scores = np.random.default_rng(seed).normal(size=len(relevance))
    expected = ndcg_score([relevance], [scores], k=k)
    assert ndcg(scores, np.array(relevance, float), k) == pytest.approx(expected)


@given(relevance=st.lists(st.booleans(), min_size=2, max_size=30).filter(any), seed=st.integers(0, 2**31))
def test_average_precision_equals_sklearn(relevance: list[bool], seed: int) -> None:
    scores = np.random.default_rng(seed).normal(size=len(relevance))
    expected = average_precision_score(relevance, scores)
    assert average_precision(scores, np.array(relevance, float)) == pytest.approx(expected)


def test_ranking_metrics_of_a_worked_example() -> None:
    scores, relevance = np.array([0.1, 0.9, 0.5, 0.7]), np.array([1.0, 0.0, 2.0, 0.0])
    assert best_first(scores, relevance).tolist() == [0.0, 0.0, 2.0, 1.0]
    assert reciprocal_rank(scores, relevance) == pytest.approx(1 / 3)
    assert reciprocal_rank(scores, relevance, k=2) == 0.0
    assert average_precision(scores, relevance) == pytest.approx((1 / 3 + 2 / 4) / 2)
    ideal = 2 / np.log2(2) + 1 / np.log2(3)
    assert ndcg(scores, relevance) == pytest.approx((2 / np.log2(4) + 1 / np.log2(5)) / ideal)


@pytest.mark.parametrize("relevance", [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
def test_equal_scores_rank_relevant_documents_last(relevance: list[float]) -> None:
    """Data files often list the relevant document first, so the input order must not count."""
    scores, labels = np.full(4, 0.5), np.array(relevance)
    assert reciprocal_rank(scores, labels) == 1 / 4
    assert average_precision(scores, labels) == 1 / 4
    assert ndcg(scores, labels) == pytest.approx(1 / np.log2(5))


def test_ranking_metrics_are_zero_without_relevant_documents() -> None:
    scores, none = np.arange(3.0), np.zeros(3)
    assert (ndcg(scores, none), reciprocal_rank(scores, none), average_precision(scores, none)) == (0.0, 0.0, 0.0)
