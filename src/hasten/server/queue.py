"""What waits for a model, and which of it runs together next. No threads here: whoever calls holds the lock.

A batch starts with whoever is first in line, by priority and arrival, and takes along rows of similar length from
anyone, as many as the token budget allows; where nothing is padded, rows of any length from whoever is next in line.
Taking one costs time by the requests that wait, not by their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from hasten.core.batching import FREE_PADDING, MOST_PADDING, TOKEN_BUDGET
from hasten.core.errors import HastenError
from hasten.core.tensors import Batch, IntArray, Outputs

# A step of priority is worth so much earlier an arrival, and nobody gets further ahead than a minute: who is told to
# wait is answered in the end, also where others keep coming that go first.
_STEP_S = 1.0
_MOST_STEPS = 60


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may wait: requests, and the time until the last of them would be answered."""

    requests: int = 2048
    wait_s: float = 5.0
    # What a request may take, in times of what it takes alone.
    slowdown: float | None = None
    tokens_per_batch: int = TOKEN_BUDGET
    rows_per_batch: int = 256
    # Where rows are not padded to one length: the size in which a session computes a batch of so many tokens.
    rounded: Callable[[int], int] | None = None


class Work(msgspec.Struct, eq=False):
    """The rows of one request on their way."""

    batch: Batch
    arrived: float
    on_done: Callable[[Outputs | HastenError], None]
    # Lower goes first.
    priority: int = 0
    deadline: float | None = None
    is_cancelled: bool = False
    # Whether it was answered, with its outputs or with what went wrong.
    is_over: bool = False
    compute_s: float = 0.0
    parts: list[tuple[IntArray, Outputs]] = []
    tokens: int = 0
    # How many of its rows have no outputs yet.
    missing: int = 0
    # The places of its rows that still wait, by their length; and its own place in the order of arrival.
    rows: dict[int, list[int]] = {}
    order: int = 0

    def __post_init__(self) -> None:
        lengths = self.batch.lengths.tolist()
        self.tokens, self.missing = sum(lengths), len(lengths)
        for place, length in enumerate(lengths):
            self.rows.setdefault(length, []).append(place)

    @property
    def waiting(self) -> int:
        return sum(map(len, self.rows.values()))

    def place_in_line(self) -> tuple[float, int]:
        steps = max(-_MOST_STEPS, min(_MOST_STEPS, self.priority))
        return self.arrived + steps * _STEP_S, self.order


class Slice(msgspec.Struct, frozen=True):
    """The rows of one request that run in one batch."""

    work: Work
    rows: IntArray

    def batch(self) -> Batch:
        whole = self.work.batch
        return whole if len(self.rows) == len(whole) else whole.take(self.rows)


class Job(msgspec.Struct, frozen=True):
    """What a session runs at once, and whose it is."""

    batch: Batch
    slices: Sequence[Slice]
    rounded: Callable[[int], int] | None = None

    @property
    def tokens(self) -> int:
        work = self.slices[0].work
        return work.tokens if len(self.slices) == 1 and work.batch is self.batch else self.batch.tokens

    @classmethod
    def of(cls, slices: Sequence[Slice], rounded: Callable[[int], int] | None = None) -> Job:
        batches = [part.batch() for part in slices]
        return cls(batches[0] if len(batches) == 1 else Batch.concatenate(batches), slices, rounded)

    @property
    def padding(self) -> int:
        """Tokens that are computed for nothing."""
        lengths, tokens = self.batch.lengths, self.tokens
        if self.rounded is not None:
            return self.rounded(tokens) - tokens
        return int(lengths.max()) * len(lengths) - tokens if len(lengths) > 1 else 0


class Queue:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        # All that wait, in the order they came; and those of them that have rows of a length.
        self._works: dict[int, Work] = {}
        self._by_length: dict[int, dict[int, Work]] = {}
        self._rows = 0
        self._tokens = 0
        self._order = 0
        # Whose time is over, or who has left; whoever holds the lock tells them after letting go of it.
        self.dropped: list[Work] = []

    def __len__(self) -> int:
        return len(self._works)

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def oldest(self) -> float | None:
        """When the one that waits longest came; None where nobody waits."""
        return next(iter(self._works.values())).arrived if self._works else None

    @property
    def is_full(self) -> bool:
        """Whether there is enough for a batch."""
        return self._tokens >= self._limits.tokens_per_batch or self._rows >= self._limits.rows_per_batch

    def put(self, work: Work) -> None:
        work.order, self._order = self._order, self._order + 1
        self._works[work.order] = work
        for length in work.rows:
            self._by_length.setdefault(length, {})[work.order] = work
        self._rows += work.missing
        self._tokens += work.tokens

    def take(self, now: float) -> Job | None:
        """The next batch; None where nothing waits. Whoever's time is over, or who has left, is put aside."""
        self.drop(now)
        if not self._works:
            return None
        if len(self._works) == 1 and (lone := self._lone()) is not None:
            return lone
        chosen: dict[int, list[int]] = {}
        works: dict[int, Work] = {}
        for work, length, place in self._companions():
            works[work.order] = work
            chosen.setdefault(work.order, []).append(place)
            self._tokens -= length
            self._rows -= 1
        for order, work in works.items():
            taken = set(chosen[order])
            self._keep(work, {length: [p for p in places if p not in taken] for length, places in work.rows.items()})
        slices = [Slice(works[order], np.array(sorted(places))) for order, places in chosen.items()]
        return Job.of(slices, self._limits.rounded)

    def _lone(self) -> Job | None:
        """The only one that waits, where all of it is a batch without padding: a short way for who has come alone."""
        (work,) = self._works.values()
        if len(work.rows) > 1:
            return None
        ((length, places),) = work.rows.items()
        rows, limits = len(places), self._limits
        if rows < len(work.batch) or rows > limits.rows_per_batch or rows * length > limits.tokens_per_batch:
            return None
        work.rows = {}
        self._works.clear()
        self._by_length.clear()
        self._rows = self._tokens = 0
        return Job(work.batch, [Slice(work, np.arange(rows))], limits.rounded)

    def discard(self, work: Work) -> bool:
        """Take it out; whether any of it still waited."""
        is_in = self._works.get(work.order) is work
        if is_in:
            self._remove([work])
        return is_in

    def close(self) -> list[Work]:
        """All that waits, taken out."""
        waiting = list(self._works.values())
        self._remove(waiting)
        return waiting

    def _companions(self) -> list[tuple[Work, int, int]]:
        """The first in line, and rows that go well with it until the batch is full or would be mostly padding."""
        limits, is_padded = self._limits, self._limits.rounded is None
        chosen: list[tuple[Work, int, int]] = []
        longest = tokens = 0
        for row in self._near(min(self._works.values(), key=Work.place_in_line)) if is_padded else self._in_line():
            length = row[1]
            width, count = max(longest, length), len(chosen) + 1
            cost = width * count if is_padded else tokens + length
            padding = cost - tokens - length
            is_fitting = cost <= limits.tokens_per_batch and count <= limits.rows_per_batch
            if chosen and not (is_fitting and padding <= max(FREE_PADDING, MOST_PADDING * cost)):
                # Nearer rows came first: on the other side there may be one that still fits, but none much better.
                break
            chosen.append(row)
            longest, tokens = width, tokens + length
        return chosen

    def _in_line(self) -> Iterator[tuple[Work, int, int]]:
        """All that wait, as (work, length, place), by priority and arrival."""
        for work in sorted(self._works.values(), key=Work.place_in_line):
            for length, places in work.rows.items():
                yield from ((work, length, place) for place in places)

    def _near(self, first: Work) -> Iterator[tuple[Work, int, int]]:
        """All that wait, as (work, length, place): the first one's own rows of its first length, then by distance."""
        start = next(iter(first.rows))
        yield from ((first, start, place) for place in first.rows[start])
        for length in sorted(self._by_length, key=lambda other: abs(other - start)):
            for work in self._by_length[length].values():
                if work is not first or length != start:
                    yield from ((work, length, place) for place in work.rows[length])

    def drop(self, now: float) -> None:
        gone = [
            work
            for work in self._works.values()
            if work.is_cancelled or work.is_over or (work.deadline is not None and now > work.deadline)
        ]
        if gone:
            self._remove(gone)
            self.dropped += gone

    def _remove(self, works: Iterable[Work]) -> None:
        for work in works:
            for length, places in work.rows.items():
                self._rows -= len(places)
                self._tokens -= length * len(places)
            self._keep(work, {})

    def _keep(self, work: Work, rows: dict[int, list[int]]) -> None:
        """Of a request's rows those that go on waiting; none, and it is out."""
        for length in work.rows:
            if not rows.get(length):
                of_length = self._by_length[length]
                del of_length[work.order]
                if not of_length:
                    del self._by_length[length]
        work.rows = {length: places for length, places in rows.items() if places}
        if not work.rows:
            del self._works[work.order]
