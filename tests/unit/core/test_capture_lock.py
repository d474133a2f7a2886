"""A CUDA graph capture holds the lock exclusively, and has priority over later shared work."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hasten.core.gpu.capture_lock import CaptureLock

SOON_S, LONG_S = 0.05, 10.0


def test_shared_holders_run_concurrently() -> None:
    lock, together = CaptureLock(), threading.Barrier(3)

    def work() -> None:
        with lock.shared():
            together.wait(LONG_S)

    with ThreadPoolExecutor(3) as threads:
        for future in [threads.submit(work) for _ in range(3)]:
            future.result(LONG_S)


def test_capture_waits_for_holders_and_precedes_later_work() -> None:
    lock, order = CaptureLock(), list[str]()
    has_started, may_finish = threading.Event(), threading.Event()

    def work(name: str) -> None:
        with lock.shared():
            has_started.set()
            assert may_finish.wait(LONG_S)
            order.append(name)

    def capture() -> None:
        with lock.exclusive():
            order.append("captured")

    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(work, "first")
        assert has_started.wait(LONG_S)
        capturing = threads.submit(capture)
        while not lock._exclusive_waiters:
            time.sleep(0.001)
        later = threads.submit(work, "later")
        with pytest.raises(TimeoutError):
            capturing.result(SOON_S)
        may_finish.set()
        for future in (first, capturing, later):
            future.result(LONG_S)
    assert order == ["first", "captured", "later"]


def test_interrupted_wait_does_not_block_others(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = CaptureLock()

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with lock.shared():
        monkeypatch.setattr(lock._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt), lock.exclusive():
            pass
    assert lock._exclusive_waiters == 0


def test_lock_is_released_after_error() -> None:
    lock = CaptureLock()
    for kind in (lock.exclusive, lock.shared):
        with pytest.raises(ValueError, match="broken"), kind():
            raise ValueError("broken")

    def both() -> None:
        with lock.exclusive():
            pass
        with lock.shared():
            pass

    with ThreadPoolExecutor(1) as threads:
        threads.submit(both).result(LONG_S)
