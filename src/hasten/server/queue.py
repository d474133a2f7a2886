"""What waits for a model, and which of it runs together next. No threads here: whoever calls holds the lock.

A batch starts with whoever is first in line, by priority and then by arrival, and takes along rows of similar length
from anyone, as many as the token budget allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hasten.core.batching import TOKEN_BUDGET
from hasten.core.errors import HastenError
from hasten.core.tensors import Batch, IntArray, Outputs

# Padding that a batch may add for the sake of fewer batches: a share of its tokens, and a few in any case, since a
# batch has a cost of its own.
_MOST_PADDING = 0.05
_FREE_PADDING = 12


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may wait: requests, and the time until the last of them would be answered."""

    requests: int = 2048
    wait_s: float = 5.0
    # What a request may take, in times of what it takes alone.
    slowdown: float | None = None
    tokens_per_batch: int = TOKEN_BUDGET
    rows_per_batch: int = 256


@dataclass(slots=True, eq=False)
class Work:
    """The rows of one request on their way."""

    batch: Batch
    arrived: float
    on_done: Callable[[Outputs | HastenError], None]
    # Lower goes first.
    priority: int = 0
    deadline: float | None = None
    is_cancelled: bool = False
    waiting: int = field(init=False)
    compute_s: float = 0.0
    parts: list[tuple[IntArray, Outputs]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waiting = len(self.batch)


@dataclass(frozen=True, slots=True)
class Slice:
    """The rows of one request that run in one batch."""

    work: Work
    rows: IntArray

    def batch(self) -> Batch:
        whole = self.work.batch
        return whole if len(self.rows) == len(whole) else whole.take(self.rows)


@dataclass(frozen=True, slots=True)
class Job:
    """What a session runs at once, and whose it is."""

    batch: Batch
    slices: Sequence[Slice]

    @property
    def padding(self) -> int:
        lengths = self.batch.lengths
        return int(lengths.max()) * len(lengths) - int(lengths.sum())


class Queue:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        # (priority, arrival, order) → sorted where it matters; a row knows its request and its place in it.
        self._rows: list[_Row] = []
        self._requests = 0
        self._tokens = 0
        self._order = 0
        # Whose time is over, or who has left; whoever holds the lock tells them after letting go of it.
        self.dropped: list[Work] = []

    def __len__(self) -> int:
        return self._requests

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def oldest(self) -> float | None:
        """When the one that waits longest came; None where nobody waits."""
        return self._rows[0].work.arrived if self._rows else None

    @property
    def is_full(self) -> bool:
        """Whether there is enough for a batch."""
        return self._tokens >= self._limits.tokens_per_batch or len(self._rows) >= self._limits.rows_per_batch

    def put(self, work: Work) -> None:
        lengths = work.batch.lengths.tolist()
        for place, length in enumerate(lengths):
            self._rows.append(_Row(work.priority, self._order, place, length, work))
        self._order += 1
        self._requests += 1
        self._tokens += sum(lengths)

    def take(self, now: float) -> Job | None:
        """The next batch; None where nothing waits. Whoever's time is over, or who has left, is put aside."""
        self._drop(now)
        if not self._rows:
            return None
        first = min(self._rows, key=_Row.place_in_line)
        chosen = self._companions(first)
        taken = {id(row) for row in chosen}
        self._rows = [row for row in self._rows if id(row) not in taken]
        self._tokens -= sum(row.length for row in chosen)
        by_work: dict[int, list[_Row]] = {}
        for row in chosen:
            by_work.setdefault(id(row.work), []).append(row)
        slices = []
        for rows in by_work.values():
            slices.append(Slice(rows[0].work, np.array(sorted(row.place for row in rows))))
            self._leave(rows[0].work, len(rows))
        batches = [part.batch() for part in slices]
        return Job(batches[0] if len(batches) == 1 else Batch.concatenate(batches), slices)

    def close(self) -> list[Work]:
        """All that waits, taken out."""
        waiting = list({id(row.work): row.work for row in self._rows}.values())
        self._rows, self._requests, self._tokens = [], 0, 0
        return waiting

    def _companions(self, first: _Row) -> list[_Row]:
        """Rows of about the same length, the nearest first, until the batch is full or would be mostly padding."""
        limits = self._limits
        others = sorted((row for row in self._rows if row is not first), key=lambda row: abs(row.length - first.length))
        chosen, longest, tokens = [first], first.length, first.length
        for row in others:
            if len(chosen) == limits.rows_per_batch:
                break
            width, count = max(longest, row.length), len(chosen) + 1
            padding = width * count - tokens - row.length
            if width * count > limits.tokens_per_batch or padding > max(_FREE_PADDING, _MOST_PADDING * width * count):
                # Nearer rows came first: on the other side there may be one that still fits, but none much better.
                break
            chosen.append(row)
            longest, tokens = width, tokens + row.length
        return chosen

    def _drop(self, now: float) -> None:
        gone = {id(row.work): row.work for row in self._rows if row.work.is_cancelled or _is_late(row.work, now)}
        if not gone:
            return
        self._tokens -= sum(row.length for row in self._rows if id(row.work) in gone)
        self._rows = [row for row in self._rows if id(row.work) not in gone]
        self._requests -= len(gone)
        self.dropped += gone.values()

    def _leave(self, work: Work, rows: int) -> None:
        work.waiting -= rows
        if work.waiting == 0:
            self._requests -= 1


@dataclass(slots=True, eq=False)
class _Row:
    priority: int
    order: int
    place: int
    length: int
    work: Work

    def place_in_line(self) -> tuple[int, int, int]:
        return self.priority, self.order, self.place


def _is_late(work: Work, now: float) -> bool:
    return work.deadline is not None and now > work.deadline
