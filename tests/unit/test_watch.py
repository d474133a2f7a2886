"""What is recorded when nobody waits for it."""

from __future__ import annotations

import logging

import pytest

from hasten.server import watch
from hasten.server.watch import Later


def test_it_is_done_once_in_order_and_whatever_fails(caplog: pytest.LogCaptureFixture) -> None:
    later, done = Later(), list[int]()

    def fail() -> None:
        raise ValueError("no")

    later.add(lambda: done.append(1))
    later.add(fail)
    later.add(lambda: done.append(2))
    assert done == []
    with caplog.at_level(logging.ERROR, "hasten"):
        logging.getLogger("hasten").propagate = True
        later.do()
        later.do()
    assert done == [1, 2]
    assert "a request could not be recorded" in caplog.text


def test_not_more_than_so_much_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_MOST_UNTOLD", 3)
    later, done = Later(), list[int]()
    for number in range(5):
        later.add(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == [0, 1, 2, 3]
    later.do()
    assert done == [0, 1, 2, 3, 4]
