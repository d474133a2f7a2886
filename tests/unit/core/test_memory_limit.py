"""Test the admission of batches under the memory limit."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import pytest

from hasten.core.errors import OverloadedError
from hasten.core.system import memory_limit
from hasten.core.system.hardware import resident_memory_bytes
from hasten.core.system.memory_limit import MemoryLimit
from support.wait import wait_until

pytestmark = pytest.mark.skipif(resident_memory_bytes() is None, reason="only Linux reports resident memory")

MB = 2**20


def limit_with_room(size: int) -> MemoryLimit:
    return MemoryLimit((resident_memory_bytes() or 0) + size)


@pytest.fixture(autouse=True)
def account(monkeypatch: pytest.MonkeyPatch) -> memory_limit._Process:
    """Give each test an account of its own, in which no other session or cache takes part."""
    process = memory_limit._Process()
    monkeypatch.setattr(memory_limit, "_PROCESS", process)
    return process


class RunningBatch:
    """A batch on a thread of its own, which runs until `end` is called or the `with` block is left."""

    def __init__(self, limit: MemoryLimit, size: int) -> None:
        self.is_running, self._may_end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(limit, size))
        self._thread.start()

    def __enter__(self) -> RunningBatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _run(self, limit: MemoryLimit, size: int) -> None:
        with limit.using(), limit.reserve(size, "a batch"):
            self.is_running.set()
            self._may_end.wait(30)

    def end(self) -> None:
        self._may_end.set()
        self._thread.join()


def test_waiting_batch_is_not_overtaken_by_smaller_ones(account: memory_limit._Process) -> None:
    limit = limit_with_room(400 * MB)
    with RunningBatch(limit, 250 * MB) as first:
        assert first.is_running.wait(10)
        with RunningBatch(limit, 300 * MB) as large:
            wait_until(lambda: len(account.waiting) == 1)
            with RunningBatch(limit, 100 * MB) as small:
                wait_until(lambda: len(account.waiting) == 2)
                assert not small.is_running.wait(0.2)
                first.end()
                assert large.is_running.wait(10)
                large.end()
                assert small.is_running.wait(10)
    assert account.reserved_bytes == account.running == account.users == 0


def test_limits_share_one_account() -> None:
    with RunningBatch(limit_with_room(400 * MB), 300 * MB) as first:
        assert first.is_running.wait(10)
        assert not limit_with_room(400 * MB).fits(300 * MB)
    assert limit_with_room(400 * MB).fits(300 * MB)


def test_batch_that_does_not_fit_beside_nothing_is_rejected() -> None:
    with pytest.raises(OverloadedError, match="a text of 9 tokens needs about 500 MB of memory; the memory limit of"):
        reserve(limit_with_room(100 * MB), 500 * MB, "a text of 9 tokens")


def test_shortage_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one client could stop all batches again and again."""
    limit = limit_with_room(100 * MB)
    with pytest.raises(OverloadedError):
        reserve(limit, 500 * MB, "a text")
    monkeypatch.setattr(memory_limit, "_IDLE_WAIT_S", 60.0)
    begin = time.monotonic()
    with pytest.raises(OverloadedError):
        reserve(limit, 400 * MB, "a text")
    assert time.monotonic() - begin < 10
    reserve(limit, 50 * MB, "a text that fits")


def test_batch_is_rejected_while_others_run_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "_MAX_WAIT_S", 0.2)
    limit = limit_with_room(400 * MB)
    with RunningBatch(limit, 300 * MB) as running:
        assert running.is_running.wait(10)
        with pytest.raises(OverloadedError, match="at the moment"):
            reserve(limit, 300 * MB, "a batch")
    reserve(limit, 300 * MB, "a batch")


def test_growth_of_a_cache_is_kept_free() -> None:
    class Cache:
        cache_bytes = 0

        def max_cache_bytes(self, prompt_tokens: int) -> int:
            return prompt_tokens * MB

    limit, cache = limit_with_room(400 * MB), Cache()
    limit.add_cache(cache, 300)
    assert not limit.fits(200 * MB)
    cache.cache_bytes = 200 * MB
    assert limit.fits(200 * MB)


def test_no_batch_runs_while_a_session_is_measured() -> None:
    limit = limit_with_room(400 * MB)
    with ExitStack() as batches:
        with limit.measuring():
            batch = batches.enter_context(RunningBatch(limit, MB))
            assert not batch.is_running.wait(0.2)
        assert batch.is_running.wait(10)


def test_batches_do_not_wait_for_a_measured_session_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "_MAX_WAIT_S", 0.2)
    limit = limit_with_room(400 * MB)
    with limit.measuring(), pytest.raises(OverloadedError, match="another model is being loaded"), limit.using():
        pass


def reserve(limit: MemoryLimit, size: int, subject: str) -> None:
    with limit.reserve(size, subject):
        pass
