"""The memory limit: who may run, who waits, and who is rejected."""

from __future__ import annotations

import threading

import pytest

from hasten.core.errors import OverloadedError, TooLargeError
from hasten.core.system import memory_limit
from hasten.core.system.hardware import resident_memory_bytes
from hasten.core.system.memory_limit import MemoryLimit
from support.wait import wait_until

pytestmark = pytest.mark.skipif(resident_memory_bytes() is None, reason="only Linux reports resident memory")

MB = 2**20


def limit_with_room(size: int) -> MemoryLimit:
    return MemoryLimit((resident_memory_bytes() or 0) + size)


class Held:
    """A batch on a thread of its own, which runs until it is told to end."""

    def __init__(self, limit: MemoryLimit, size: int) -> None:
        self.is_running, self._may_end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(limit, size))
        self._thread.start()

    def _run(self, limit: MemoryLimit, size: int) -> None:
        with limit.reserve(size, "a batch"):
            self.is_running.set()
            self._may_end.wait(30)

    def end(self) -> None:
        self._may_end.set()
        self._thread.join()


def test_waiting_batch_is_not_overtaken_by_smaller_ones() -> None:
    limit = limit_with_room(400 * MB)
    first = Held(limit, 250 * MB)
    assert first.is_running.wait(10)
    large = Held(limit, 300 * MB)
    wait_until(lambda: len(memory_limit._PROCESS.waiting) == 1)
    small = Held(limit, 100 * MB)
    wait_until(lambda: len(memory_limit._PROCESS.waiting) == 2)
    assert not small.is_running.wait(0.2)
    first.end()
    assert large.is_running.wait(10)
    small._may_end.set()
    large.end()
    small.end()
    assert small.is_running.is_set()
    assert memory_limit._PROCESS.reserved_bytes == 0


def test_limits_share_one_account() -> None:
    first = Held(limit_with_room(400 * MB), 300 * MB)
    assert first.is_running.wait(10)
    assert not limit_with_room(400 * MB).fits(300 * MB)
    first.end()
    assert limit_with_room(400 * MB).fits(300 * MB)


def test_batch_that_does_not_fit_beside_nothing_is_too_large() -> None:
    with pytest.raises(TooLargeError, match="a text of 9 tokens needs about 500 MB of memory; the memory limit of"):
        reserve(limit_with_room(100 * MB), 500 * MB, "a text of 9 tokens")


def test_batch_is_rejected_while_others_run_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "_MAX_WAIT_S", 0.2)
    limit = limit_with_room(400 * MB)
    running = Held(limit, 300 * MB)
    assert running.is_running.wait(10)
    with pytest.raises(OverloadedError, match="which other batches use"):
        reserve(limit, 300 * MB, "a batch")
    running.end()
    reserve(limit, 300 * MB, "a batch")


def test_growth_of_a_cache_is_kept_free() -> None:
    class Cache:
        max_cache_bytes = 300 * MB
        cache_bytes = 0

    limit, cache = limit_with_room(400 * MB), Cache()
    limit.add_cache(cache)
    assert not limit.fits(200 * MB)
    cache.cache_bytes = 200 * MB
    assert limit.fits(200 * MB)


def test_no_batch_runs_while_a_session_is_measured() -> None:
    limit = limit_with_room(400 * MB)
    with limit.measuring():
        batch = Held(limit, MB)
        assert not batch.is_running.wait(0.2)
    assert batch.is_running.wait(10)
    batch.end()


def reserve(limit: MemoryLimit, size: int, subject: str) -> None:
    with limit.reserve(size, subject):
        pass
