"""Who records a CUDA graph is alone, and comes before those who ask later."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hasten.core.recording import Recording

SOON_S, LONG_S = 0.05, 10.0


def test_several_work_beside_each_other() -> None:
    recording, together = Recording(), threading.Barrier(3)

    def work() -> None:
        with recording.beside_others():
            together.wait(LONG_S)

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(work) for _ in range(3)]:
            done.result(LONG_S)


def test_who_records_waits_for_those_at_work_and_others_wait_for_it() -> None:
    recording, order = Recording(), list[str]()
    is_working, may_end = threading.Event(), threading.Event()

    def work(name: str) -> None:
        with recording.beside_others():
            is_working.set()
            assert may_end.wait(LONG_S)
            order.append(name)

    def record() -> None:
        with recording.alone():
            order.append("recorded")

    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(work, "first")
        assert is_working.wait(LONG_S)
        recorder = threads.submit(record)
        while not recording._waiting:
            time.sleep(0.001)
        later = threads.submit(work, "later")
        with pytest.raises(TimeoutError):
            recorder.result(SOON_S)
        may_end.set()
        for done in (first, recorder, later):
            done.result(LONG_S)
    assert order == ["first", "recorded", "later"]


def test_who_is_interrupted_while_it_waits_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording()

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with recording.beside_others():
        monkeypatch.setattr(recording._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt), recording.alone():
            pass
    assert recording._waiting == 0


def test_after_an_error_nobody_waits() -> None:
    recording = Recording()
    for kind in (recording.alone, recording.beside_others):
        with pytest.raises(ValueError, match="broken"), kind():
            raise ValueError("broken")

    def both() -> None:
        with recording.alone():
            pass
        with recording.beside_others():
            pass

    with ThreadPoolExecutor(1) as threads:
        threads.submit(both).result(LONG_S)
