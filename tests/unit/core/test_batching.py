from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.core.batching import FREE_PADDING, MAX_PADDING, TOKEN_BUDGET, batch_by_length, batch_in_order

lengths = st.lists(st.integers(0, 600), max_size=80).map(lambda values: np.asarray(values, np.int32))


@given(lengths, st.integers(1, 1000), st.integers(1, 16))
def test_groups_hold_every_row_once_within_the_budget(lengths: np.ndarray, budget: int, max_rows: int) -> None:
    groups = batch_by_length(lengths, budget=budget, max_rows=max_rows)
    assert sorted(row for group in groups for row in group.tolist()) == list(range(len(lengths)))
    for group in groups:
        padded = len(group) * int(lengths[group].max())
        assert len(group) == 1 or padded <= budget
        assert 1 <= len(group) <= max_rows


@given(lengths)
def test_no_row_is_mostly_padding(lengths: np.ndarray) -> None:
    for group in batch_by_length(lengths):
        longest = int(lengths[group].max())
        assert longest - int(lengths[group].min()) <= max(FREE_PADDING, MAX_PADDING * longest)


def test_short_rows_do_not_run_beside_a_long_one() -> None:
    assert [group.tolist() for group in batch_by_length(np.array([20, 512, 24, 500]))] == [[1, 3], [2, 0]]


@given(lengths)
def test_groups_are_sorted_by_length_longest_first(lengths: np.ndarray) -> None:
    ordered = [int(lengths[row]) for group in batch_by_length(lengths) for row in group]
    assert ordered == sorted(lengths.tolist(), reverse=True)


def test_equal_lengths_keep_their_order() -> None:
    groups = [group.tolist() for group in batch_by_length(np.array([4, 9, 4, 4, 9]), budget=18)]
    assert groups == [[1, 4], [0, 2, 3]]


def test_no_rows_make_no_groups() -> None:
    assert batch_by_length(np.zeros(0, np.int32)) == []


@pytest.mark.parametrize(("length", "size"), [(32, 64), (128, TOKEN_BUDGET // 128), (TOKEN_BUDGET + 1, 1)])
def test_default_budget_limits_the_group_size(length: int, size: int) -> None:
    groups = batch_by_length(np.full(130, length, np.int32))
    assert len(groups[0]) == size


@pytest.mark.parametrize(("rows", "size", "sizes"), [(5, 2, [2, 2, 1]), (3, 8, [3]), (4, 1, [1] * 4), (0, 4, [])])
def test_in_order_groups_consecutive_rows(rows: int, size: int, sizes: list[int]) -> None:
    groups = batch_in_order(rows, size)
    assert [len(group) for group in groups] == sizes
    assert [row for group in groups for row in group.tolist()] == list(range(rows))
