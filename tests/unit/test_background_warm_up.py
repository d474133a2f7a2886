"""Buckets are prepared between batches, never at the same time as one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hasten.backends import PreparesBuckets
from hasten.background_warm_up import WarmingSession
from hasten.core.errors import StageError
from hasten.core.tensors import Batch, Outputs
from support.wait import wait_until


def batch_of(tokens: int) -> Batch:
    return Batch({"input_ids": np.ones(tokens, np.int32)}, np.array([tokens], np.int32))


class BucketSession:
    """Records what runs, and fails if two threads use it at once."""

    spec: Any = None
    max_batch_tokens = 64

    def __init__(self) -> None:
        self.uses_larger_buckets = self.is_closed = False
        self.events: list[tuple[str, int]] = []
        self.may_prepare = threading.Semaphore(0)
        self.is_preparing = threading.Event()
        self.failure: Exception | None = None
        self._owner = threading.Lock()

    def run(self, batch: Batch) -> Outputs:
        assert self._owner.acquire(blocking=False)
        self.events.append(("run in larger" if self.uses_larger_buckets else "run", batch.tokens))
        self._owner.release()
        return {}

    def prepare(self, batch: Batch) -> None:
        assert self._owner.acquire(blocking=False)
        self.is_preparing.set()
        assert self.may_prepare.acquire(timeout=60)
        self.is_preparing.clear()
        self.events.append(("prepare", batch.tokens))
        self._owner.release()
        if self.failure is not None:
            raise self.failure

    def rounded(self, tokens: int) -> int:
        return tokens

    def samples(self, tokens: int, rows: int) -> Sequence[Batch]:
        return []

    covering_samples = samples

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def session() -> BucketSession:
    return BucketSession()


def warming(session: BucketSession, *sizes: int, turn: threading.Lock | None = None) -> tuple[Any, list[int]]:
    finished: list[int] = []
    batches = [batch_of(size) for size in sizes]
    assert isinstance(session, PreparesBuckets)
    wrapper = WarmingSession(
        session,
        batches,
        turn or threading.Lock(),
        lambda buckets, _: finished.append(buckets),  # type: ignore[arg-type]
    )
    return wrapper, finished


def test_batches_run_before_remaining_buckets(session: BucketSession) -> None:
    wrapper, finished = warming(session, 1, 2, 3)
    with wrapper:
        assert session.is_preparing.wait(60)
        thread = threading.Thread(target=wrapper.run, args=[batch_of(9)])
        thread.start()
        wait_until(lambda: wrapper._waiting, "a batch that waits")
        session.may_prepare.release(3)
        thread.join(60)
        wait_until(lambda: finished, "the end of the warm-up")
        assert session.events == [("prepare", 1), ("run in larger", 9), ("prepare", 2), ("prepare", 3)]
        assert finished == [3]
        wait_until(lambda: not session.uses_larger_buckets, "exact buckets")
        wrapper.run(batch_of(9))
        assert session.events[-1] == ("run", 9)
    assert session.is_closed


def test_closing_leaves_out_remaining_buckets(session: BucketSession) -> None:
    wrapper, finished = warming(session, *range(1, 100))
    assert session.is_preparing.wait(60)
    closer = threading.Thread(target=wrapper.close)
    closer.start()
    wait_until(lambda: wrapper._is_closing, "the start of the closing")
    session.may_prepare.release()
    closer.join(60)
    assert session.is_closed
    assert session.events == [("prepare", 1)]
    assert not finished


def test_failed_bucket_is_logged_and_batches_still_run(
    session: BucketSession, caplog: pytest.LogCaptureFixture
) -> None:
    session.failure = StageError("out of memory")
    session.may_prepare.release()
    with caplog.at_level(logging.ERROR, "hasten"):
        wrapper, finished = warming(session, 1, 2)
        wait_until(lambda: not session.uses_larger_buckets, "the end of the warm-up")
    assert "a bucket could not be prepared" in caplog.text
    wrapper.run(batch_of(5))
    assert session.events == [("prepare", 1), ("run", 5)]
    assert not finished
    wrapper.close()


def test_sessions_of_a_model_prepare_one_bucket_at_a_time(session: BucketSession) -> None:
    turn, other = threading.Lock(), BucketSession()
    first, _ = warming(session, 1, turn=turn)
    assert session.is_preparing.wait(60)
    second, finished = warming(other, 2, turn=turn)
    other.may_prepare.release()
    # It does not wait for the other session's bucket.
    second.run(batch_of(7))
    assert other.events == [("run in larger", 7)]
    session.may_prepare.release()
    wait_until(lambda: finished, "the second session")
    assert other.events[-1] == ("prepare", 2)
    first.close()
    second.close()
