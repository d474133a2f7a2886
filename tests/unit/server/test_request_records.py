"""Deferred recording of answered requests."""

from __future__ import annotations

import logging

import pytest

from hasten.server import request_records
from hasten.server.request_records import DeferredRecorder


def test_deferred_calls_run_once_in_order_despite_failures(caplog: pytest.LogCaptureFixture) -> None:
    recorder, done = DeferredRecorder(), list[int]()

    def fail() -> None:
        raise ValueError("no")

    recorder.add(lambda: done.append(1))
    recorder.add(fail)
    recorder.add(lambda: done.append(2))
    assert done == []
    with caplog.at_level(logging.ERROR, "hasten"):
        logging.getLogger("hasten").propagate = True
        recorder.run()
        recorder.run()
    assert done == [1, 2]
    assert "a request could not be recorded" in caplog.text


def test_pending_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_records, "_MAX_PENDING", 3)
    recorder, done = DeferredRecorder(), list[int]()
    for number in range(5):
        recorder.add(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == [0, 1, 2, 3]
    recorder.run()
    assert done == [0, 1, 2, 3, 4]
