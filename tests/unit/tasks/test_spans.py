from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hasten.tasks._spans.spans import following, top_spans


def test_following_returns_windows_of_values() -> None:
    assert following(np.array([1.0, 2.0, 3.0]), 2).tolist() == [[1, 2], [2, 3], [3, 0]]
    assert following(np.array([True, True]), 9).tolist() == [[True, True], [True, False]]
    assert following(np.array([4.0]), 1).tolist() == [[4]]


def search(start: list[float], end: list[float], inside: list[bool], longest: int) -> list[tuple[int, int, float]]:
    """Score every span, best first; of equal ones the one that starts, then the one that ends first."""
    candidates = [
        (first, last, start[first] * end[last])
        for first in range(len(start))
        for last in range(first, min(first + longest, len(end)))
        if inside[first] and inside[last]
    ]
    return sorted(candidates, key=lambda span: -span[2])


# Few distinct values, so that many spans have equal scores.
places = st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0, 4.0]), st.sampled_from([0.0, 0.5, 2.0]), st.booleans())


@given(st.lists(places, min_size=1, max_size=14), st.integers(1, 20), st.integers(1, 60))
def test_best_spans_equal_those_of_a_plain_search(
    row: list[tuple[float, float, bool]], longest: int, count: int
) -> None:
    start, end, inside = (list(column) for column in zip(*row, strict=True))
    scores = np.array(start)[:, None] * following(np.array(end), longest)
    assert top_spans(scores, np.array(inside), count) == search(start, end, inside, longest)[:count]


def test_negative_scores_are_ranked() -> None:
    start, end = np.array([-3.0, -1.0, -2.0]), np.array([-5.0, -9.0, -4.0])
    assert top_spans(start[:, None] + following(end, 3), np.array([True, True, True]), 1) == [(1, 2, -5.0)]


def test_no_span_without_candidate_tokens() -> None:
    assert top_spans(np.ones((3, 2)), np.zeros(3, np.bool_), 4) == []


def test_memory_is_linear_in_the_row_length() -> None:
    tokens = 8192
    values = np.random.default_rng(0).random(tokens).astype(np.float32)
    tracemalloc.start()
    top_spans(values[:, None] * following(values, 15), np.ones(tokens, np.bool_), 12)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * 15 * tokens  # a few copies of the band; all pairs in fp32 would take 268 MB
