from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from hasten.core.system.map_ahead import map_ahead
from support.wait import wait_until


def ahead_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("hasten-ahead")]


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_results_come_in_order(threads: int) -> None:
    assert list(map_ahead(lambda item: item * item, range(50), threads)) == [item * item for item in range(50)]
    assert not ahead_threads()


@pytest.mark.parametrize("threads", [1, 3])
def test_results_that_nobody_takes_are_bounded(threads: int) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(1000):
            taken.append(item)
            yield item

    results = map_ahead(lambda item: item, items(), threads)
    for expected in range(20):
        assert next(results) == expected
        assert len(taken) <= expected + 2 * threads
    results.close()
    assert not ahead_threads()


def test_without_threads_nothing_is_computed_ahead() -> None:
    computed: list[int] = []
    results = map_ahead(lambda item: computed.append(item), range(9), 0)
    next(results)
    next(results)
    assert computed == [0, 1]


def test_later_results_are_computed_while_earlier_one_is_used() -> None:
    computed: list[int] = []
    results = map_ahead(lambda item: (computed.append(item), item)[1], range(9), 2)
    assert next(results) == 0
    wait_until(lambda: len(computed) > 2, "results that were not asked for")
    results.close()


def test_error_is_raised_in_place_of_its_result_and_ends_the_threads() -> None:
    def fail_at_five(item: int) -> int:
        if item == 5:
            raise KeyError("five")
        return item

    results = map_ahead(fail_at_five, range(1000), 2)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(KeyError, match="five"):
        next(results)
    assert not ahead_threads()


def test_error_of_the_items_ends_the_threads() -> None:
    def items() -> Iterator[int]:
        yield 0
        raise ValueError("no more items")

    with pytest.raises(ValueError, match="no more items"):
        list(map_ahead(lambda item: item, items(), 2))
    assert not ahead_threads()
