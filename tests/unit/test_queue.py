"""What waits for a model, and what runs together."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from hasten.core.tensors import Batch
from hasten.server.queue import Limits, Queue, Work


def work(*lengths: int, **about: Any) -> Work:
    batch = Batch({"input_ids": np.arange(sum(lengths), dtype=np.int32)}, np.array(lengths, np.int32))
    return Work(batch, 0.0, [].append, **about)


@pytest.fixture
def queue() -> Queue:
    return Queue(Limits(tokens_per_batch=64, rows_per_batch=8))


def taken(queue: Queue, now: float = 0.0) -> list[int]:
    job = queue.take(now)
    return sorted(job.batch.lengths.tolist()) if job else []


def test_nothing_waits(queue: Queue) -> None:
    assert queue.take(0.0) is None
    assert (len(queue), queue.tokens, queue.oldest) == (0, 0, None)


def test_rows_of_similar_length_run_together_whoever_sent_them(queue: Queue) -> None:
    for lengths in ((10,), (40,), (11, 39), (10,)):
        queue.put(work(*lengths))
    assert len(queue) == 4
    assert taken(queue) == [10, 10, 11]
    assert taken(queue) == [40]
    assert taken(queue) == [39]
    assert (len(queue), queue.tokens) == (0, 0)


def test_a_batch_keeps_to_its_tokens_and_rows(queue: Queue) -> None:
    queue.put(work(*[16] * 6))
    assert taken(queue) == [16] * 4
    assert taken(queue) == [16] * 2
    queue.put(work(*[2] * 12))
    assert taken(queue) == [2] * 8
    queue.put(work(100))
    assert 100 in [*taken(queue), *taken(queue)]


def test_padding_is_a_small_part() -> None:
    wide = Queue(Limits(tokens_per_batch=2048))
    lengths = np.random.default_rng(0).integers(4, 300, 400).tolist()
    for length in lengths:
        wide.put(work(length))
    seen, padding = [], 0
    while job := wide.take(0.0):
        seen += job.batch.lengths.tolist()
        padding += job.padding
    assert sorted(seen) == sorted(lengths)
    assert padding <= 0.05 * sum(lengths)


def test_the_rows_of_a_request_keep_their_places(queue: Queue) -> None:
    whole = work(3, 30, 4)
    queue.put(whole)
    job = queue.take(0.0)
    assert job is not None
    assert job.slices[0].rows.tolist() == [0, 2]
    assert job.batch.values["input_ids"].tolist() == [0, 1, 2, 33, 34, 35, 36]
    assert (whole.waiting, len(queue)) == (1, 1)


def test_priority_before_arrival(queue: Queue) -> None:
    queue.put(work(5))
    queue.put(work(50, priority=-1))
    queue.put(work(30, priority=1))
    assert [taken(queue), taken(queue), taken(queue)] == [[50], [5], [30]]


def test_whose_time_is_over_and_who_has_left_is_put_aside(queue: Queue) -> None:
    late, gone = work(5, deadline=1.0), work(5, 6)
    for one in (late, gone, work(5, deadline=3.0)):
        queue.put(one)
    gone.is_cancelled = True
    assert taken(queue, now=2.0) == [5]
    assert queue.dropped == [late, gone]
    assert (len(queue), queue.tokens) == (0, 0)


def test_closing_hands_out_all_that_waits(queue: Queue) -> None:
    first, second = work(5, 6), work(7)
    queue.put(first)
    queue.put(second)
    assert queue.close() == [first, second]
    assert queue.take(0.0) is None


def test_whoever_goes_first_does_not_keep_others_waiting_for_ever(queue: Queue) -> None:
    """A step of priority is worth a second; beyond a minute no priority helps."""
    patient = work(30, priority=10**9)
    queue.put(patient)
    for arrived, priority, is_before in (
        (50.0, 0, True),
        (59.0, 0, True),
        (100.0, -(10**400), True),
        (121.0, -60, False),
    ):
        other = work(5, priority=priority)
        other.arrived = arrived
        queue.put(other)
        assert (taken(queue) == [5]) == is_before
    assert taken(queue) == [5]


@pytest.mark.slow
def test_many_rows_cost_no_more_than_few() -> None:
    """A hundred requests of a thousand rows: sorted again for each batch, they took minutes."""
    wide = Queue(Limits(tokens_per_batch=2048, rows_per_batch=64))
    lengths = np.random.default_rng(0).integers(4, 300, (100, 1000))
    for own in lengths:
        wide.put(work(*own.tolist()))
    begin, rows = time.monotonic(), 0
    while job := wide.take(0.0):
        rows += len(job.batch)
    assert (rows, len(wide), wide.tokens, wide.is_full) == (100_000, 0, 0, False)
    assert time.monotonic() - begin < 60


def test_where_nothing_is_padded_whoever_is_next_comes_along() -> None:
    packed = Queue(Limits(tokens_per_batch=64, rows_per_batch=4, rounded=lambda tokens: -(-tokens // 16) * 16))
    for lengths in ((3, 40), (10,), (30,), (5,)):
        packed.put(work(*lengths))
    job = packed.take(0.0)
    assert job is not None
    assert (job.batch.lengths.tolist(), job.padding) == ([3, 40, 10], 64 - 53)
    job = packed.take(0.0)
    assert job is not None
    assert (job.batch.lengths.tolist(), job.padding) == ([30, 5], 48 - 35)
    for _ in range(6):
        packed.put(work(1))
    packed.put(work(100, priority=-1))
    assert [taken(packed), taken(packed), taken(packed)] == [[100], [1] * 4, [1] * 2]
