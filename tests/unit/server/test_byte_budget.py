"""The total size of the requests that a server holds."""

from __future__ import annotations

import threading

import pytest

from hasten.core.errors import OverloadedError
from hasten.server.byte_budget import ByteBudget


def test_bytes_beyond_limit_are_rejected_until_others_are_removed() -> None:
    budget = ByteBudget(10)
    with budget.holding(6):
        with pytest.raises(OverloadedError), budget.holding(5):
            pass
        assert budget.used == 6
    with budget.holding(10):
        pass
    assert budget.used == 0


def test_budget_is_counted_exactly_by_many_threads() -> None:
    budget = ByteBudget(10**9)

    def work() -> None:
        for _ in range(5000):
            budget.add(3)
            budget.remove(2)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.used == 8 * 5000
