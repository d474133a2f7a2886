from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import closing

import pytest

from hasten.core.system.prefetch import prefetch
from support.wait import wait_until


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hasten-prefetch"]


def test_items_come_in_order_and_the_thread_ends() -> None:
    assert list(prefetch(range(50), 3)) == list(range(50))
    assert not prefetch_threads()


def test_items_that_are_not_taken_are_bounded() -> None:
    computed: list[int] = []
    with closing(prefetch((computed.append(item) or item for item in range(1000)), 2)) as items:  # type: ignore[func-returns-value]
        assert next(items) == 0
        wait_until(lambda: len(computed) >= 3)
        assert len(computed) <= 4
    assert not prefetch_threads()


def test_error_is_raised_in_the_place_of_its_item() -> None:
    def items() -> Generator[int, None, None]:
        yield 1
        raise ValueError("broken")

    results = prefetch(items(), 2)
    assert next(results) == 1
    with pytest.raises(ValueError, match="broken"):
        next(results)


def test_closing_closes_the_items_on_their_thread() -> None:
    closed: list[str] = []

    def items() -> Generator[int, None, None]:
        try:
            while True:
                yield 1
        finally:
            closed.append(threading.current_thread().name)

    with closing(prefetch(items(), 1)) as results:
        next(results)
    assert closed == ["hasten-prefetch"]
