"""The queue of a model, and which rows run together."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from hasten.core.tensors import Batch
from hasten.server.scheduling.queue import Limits, PendingRequest, Queue


def pending(*lengths: int, **options: Any) -> PendingRequest:
    batch = Batch({"input_ids": np.arange(sum(lengths), dtype=np.int32)}, np.array(lengths, np.int32))
    return PendingRequest(batch, 0.0, [].append, **options)


@pytest.fixture
def queue() -> Queue:
    return Queue(Limits(tokens_per_batch=64, rows_per_batch=8))


def taken(queue: Queue, now: float = 0.0) -> list[int]:
    job = queue.take(now)
    return sorted(job.batch.lengths.tolist()) if job else []


def test_empty_queue_gives_no_batch(queue: Queue) -> None:
    assert queue.take(0.0) is None
    assert (len(queue), queue.tokens, queue.oldest) == (0, 0, None)


def test_rows_of_similar_length_run_together_across_requests(queue: Queue) -> None:
    for lengths in ((10,), (40,), (11, 39), (10,)):
        queue.put(pending(*lengths))
    assert len(queue) == 4
    assert taken(queue) == [10, 10, 11]
    assert taken(queue) == [40]
    assert taken(queue) == [39]
    assert (len(queue), queue.tokens) == (0, 0)


def test_batch_keeps_to_token_and_row_limits(queue: Queue) -> None:
    queue.put(pending(*[16] * 6))
    assert taken(queue) == [16] * 4
    assert taken(queue) == [16] * 2
    queue.put(pending(*[2] * 12))
    assert taken(queue) == [2] * 8
    queue.put(pending(100))
    assert 100 in [*taken(queue), *taken(queue)]


def test_padding_is_bounded() -> None:
    wide = Queue(Limits(tokens_per_batch=2048))
    lengths = np.random.default_rng(0).integers(4, 300, 400).tolist()
    for length in lengths:
        wide.put(pending(length))
    seen, padding = [], 0
    while job := wide.take(0.0):
        seen += job.batch.lengths.tolist()
        padding += job.padding
    assert sorted(seen) == sorted(lengths)
    assert padding <= 0.05 * sum(lengths)


def test_slices_keep_the_indices_of_rows(queue: Queue) -> None:
    whole = pending(3, 30, 4)
    queue.put(whole)
    job = queue.take(0.0)
    assert job is not None
    assert job.slices[0].rows.tolist() == [0, 2]
    assert job.batch.values["input_ids"].tolist() == [0, 1, 2, 33, 34, 35, 36]
    assert (whole.rows, len(queue)) == ({30: [1]}, 1)


def test_priority_precedes_arrival(queue: Queue) -> None:
    queue.put(pending(5))
    queue.put(pending(50, priority=-1))
    queue.put(pending(30, priority=1))
    assert [taken(queue), taken(queue), taken(queue)] == [[50], [5], [30]]


def test_expired_and_cancelled_requests_are_dropped(queue: Queue) -> None:
    late, cancelled = pending(5, deadline=1.0), pending(5, 6)
    for request in (late, cancelled, pending(5, deadline=3.0)):
        queue.put(request)
    cancelled.is_cancelled = True
    assert taken(queue, now=2.0) == [5]
    assert queue.dropped == [late, cancelled]
    assert (len(queue), queue.tokens) == (0, 0)


def test_close_returns_all_queued_requests(queue: Queue) -> None:
    first, second = pending(5, 6), pending(7)
    queue.put(first)
    queue.put(second)
    assert queue.close() == [first, second]
    assert queue.take(0.0) is None


def test_priority_does_not_starve_other_requests(queue: Queue) -> None:
    """A step of priority counts as a second, and all steps together as at most a minute."""
    patient = pending(30, priority=10**9)
    queue.put(patient)
    for arrived, priority, is_before in (
        (50.0, 0, True),
        (59.0, 0, True),
        (100.0, -(10**400), True),
        (121.0, -60, False),
    ):
        other = pending(5, priority=priority)
        other.arrived = arrived
        queue.put(other)
        assert (taken(queue) == [5]) == is_before
    assert taken(queue) == [5]


@pytest.mark.slow
def test_taking_batches_does_not_sort_all_rows_again() -> None:
    """A hundred requests of a thousand rows took minutes when they were sorted again for each batch."""
    wide = Queue(Limits(tokens_per_batch=2048, rows_per_batch=64))
    lengths = np.random.default_rng(0).integers(4, 300, (100, 1000))
    for row_lengths in lengths:
        wide.put(pending(*row_lengths.tolist()))
    begin, rows = time.monotonic(), 0
    while job := wide.take(0.0):
        rows += len(job.batch)
    assert (rows, len(wide), wide.tokens, wide.is_full) == (100_000, 0, 0, False)
    assert time.monotonic() - begin < 60


def test_unpadded_batches_are_filled_in_queue_order() -> None:
    packed = Queue(Limits(tokens_per_batch=64, rows_per_batch=4, round_up=lambda tokens: -(-tokens // 16) * 16))
    for lengths in ((3, 40), (10,), (30,), (5,)):
        packed.put(pending(*lengths))
    job = packed.take(0.0)
    assert job is not None
    assert (job.batch.lengths.tolist(), job.padding) == ([3, 40, 10], 64 - 53)
    job = packed.take(0.0)
    assert job is not None
    assert (job.batch.lengths.tolist(), job.padding) == ([30, 5], 48 - 35)
    for _ in range(6):
        packed.put(pending(1))
    packed.put(pending(100, priority=-1))
    assert [taken(packed), taken(packed), taken(packed)] == [[100], [1] * 4, [1] * 2]


def test_rows_that_are_put_back_run_in_order_of_arrival(queue: Queue) -> None:
    first, second, third = (pending(10, 11), pending(10), pending(10))
    for request in (first, second):
        queue.put(request)
    job = queue.take(0.0)
    assert job is not None
    queue.put(third)
    for part in reversed(job.slices):
        queue.put_back(part.request, part.rows)
    assert (len(queue), queue.tokens) == (3, 41)
    again = queue.take(0.0)
    assert again is not None
    assert again.slices[0].request is first
    assert sorted((part.request.order, part.rows.tolist()) for part in again.slices) == [
        (0, [0, 1]),
        (1, [0]),
        (2, [0]),
    ]
    assert (len(queue), queue.tokens, queue.oldest) == (0, 0, None)


@pytest.mark.parametrize("round_up", [None, lambda tokens: tokens])
def test_suspect_request_runs_without_others(round_up: Any) -> None:
    queue = Queue(Limits(tokens_per_batch=64, round_up=round_up))
    for is_suspect in (False, True, False, True):
        queue.put(pending(5, 5, is_suspect=is_suspect))
    assert [taken(queue) for _ in range(4)] == [[5] * 4, [5] * 2, [5] * 2, []]
