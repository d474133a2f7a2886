"""Queue of the requests of one model, and the choice of rows that run together.

A batch starts with the first request by priority and arrival and adds rows of similar length from any request, up to
the token budget. If a session does not pad, it adds rows of any length in queue order. Taking a batch costs time
proportional to the number of queued requests, not to their rows.

Not thread-safe: the caller must hold the engine's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from hasten.core.batching import FREE_PADDING, MAX_PADDING, TOKEN_BUDGET
from hasten.core.errors import HastenError
from hasten.core.tensors import Batch, IntArray, Outputs

# A step of priority counts as one second of arrival time, and at most a minute: low priorities are answered in the end,
# even while requests of high priority keep arriving.
_PRIORITY_STEP_S = 1.0
_MAX_PRIORITY_STEPS = 60


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the queue and of a batch."""

    # Open requests, and the estimated wait of the last of them.
    requests: int = 2048
    wait_s: float = 5.0
    # Estimated latency of a request as a multiple of its unloaded latency.
    slowdown: float | None = None
    tokens_per_batch: int = TOKEN_BUDGET
    rows_per_batch: int = 256
    # For sessions that do not pad rows to one length: the bucket in which a batch of N tokens is computed.
    round_up: Callable[[int], int] | None = None


class PendingRequest(msgspec.Struct, eq=False):
    """The rows of one tokenized request until all have outputs."""

    batch: Batch
    arrived: float
    on_done: Callable[[Outputs | HastenError], None]
    # Lower runs first.
    priority: int = 0
    deadline: float | None = None
    is_cancelled: bool = False
    # Whether the request was answered, with its outputs or an error.
    is_over: bool = False
    compute_s: float = 0.0
    parts: list[tuple[IntArray, Outputs]] = []
    # All tokens, and those of rows without outputs.
    tokens: int = 0
    tokens_left: int = 0
    # Number of rows without outputs.
    missing: int = 0
    # Indices of the queued rows by length, and the request's number in order of arrival.
    rows: dict[int, list[int]] = {}
    order: int = 0
    # Called before a batch with rows of this request runs.
    on_start: Callable[[], None] | None = None
    # Whether the process of a session ended while it ran rows of this request: they then run without other requests.
    is_suspect: bool = False

    def __post_init__(self) -> None:
        lengths = self.batch.lengths.tolist()
        self.tokens = self.tokens_left = sum(lengths)
        self.missing = len(lengths)
        for index, length in enumerate(lengths):
            self.rows.setdefault(length, []).append(index)

    def sort_key(self) -> tuple[float, int]:
        """Return the key by which requests are ordered."""
        steps = max(-_MAX_PRIORITY_STEPS, min(_MAX_PRIORITY_STEPS, self.priority))
        return self.arrived + steps * _PRIORITY_STEP_S, self.order


# A queued row: its request, its length and its index in the request.
_QueuedRow = tuple[PendingRequest, int, int]


class RowSlice(msgspec.Struct, frozen=True):
    """The rows of one request that run in one batch."""

    request: PendingRequest
    rows: IntArray

    def batch(self) -> Batch:
        """Return the rows as a batch."""
        whole = self.request.batch
        return whole if len(self.rows) == len(whole) else whole.take(self.rows)


class BatchJob(msgspec.Struct, frozen=True):
    """A batch to run, and the requests that its rows belong to."""

    batch: Batch
    slices: Sequence[RowSlice]
    round_up: Callable[[int], int] | None = None

    @property
    def tokens(self) -> int:
        """Return the number of tokens without padding."""
        request = self.slices[0].request
        return request.tokens if len(self.slices) == 1 and request.batch is self.batch else self.batch.tokens

    @classmethod
    def of(cls, slices: Sequence[RowSlice], round_up: Callable[[int], int] | None = None) -> BatchJob:
        """Concatenate the rows of several requests."""
        batches = [part.batch() for part in slices]
        return cls(batches[0] if len(batches) == 1 else Batch.concatenate(batches), slices, round_up)

    @property
    def padding(self) -> int:
        """Return the number of padding tokens that are computed."""
        lengths, tokens = self.batch.lengths, self.tokens
        if self.round_up is not None:
            return self.round_up(tokens) - tokens
        return int(lengths.max()) * len(lengths) - tokens if len(lengths) > 1 else 0


class Queue:
    """The queued requests of one model."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        # All queued requests in order of arrival, and those with rows of each length.
        self._requests: dict[int, PendingRequest] = {}
        self._by_length: dict[int, dict[int, PendingRequest]] = {}
        # Queued rows and tokens, and the number of the next request.
        self._rows = self.tokens = self._order = 0
        # Expired and cancelled requests; the caller fails them after it has released the lock.
        self.dropped: list[PendingRequest] = []

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def oldest(self) -> float | None:
        """Return the arrival time of the oldest request; None if the queue is empty."""
        return next(iter(self._requests.values())).arrived if self._requests else None

    @property
    def is_full(self) -> bool:
        """Return whether the queue holds enough for a full batch."""
        return self.tokens >= self._limits.tokens_per_batch or self._rows >= self._limits.rows_per_batch

    def put(self, request: PendingRequest) -> None:
        """Append a request to the queue."""
        request.order, self._order = self._order, self._order + 1
        self._requests[request.order] = request
        for length in request.rows:
            self._by_length.setdefault(length, {})[request.order] = request
        self._rows += request.missing
        self.tokens += request.tokens

    def put_back(self, request: PendingRequest, rows: IntArray) -> None:
        """Queue rows of a request again whose batch was lost; the request keeps its place in the order of arrival."""
        for index, length in zip(rows.tolist(), request.batch.lengths[rows].tolist(), strict=True):
            request.rows.setdefault(length, []).append(index)
            self._by_length.setdefault(length, {})[request.order] = request
            self._rows += 1
            self.tokens += length
        self._requests = dict(sorted({**self._requests, request.order: request}.items()))

    def take(self, now: float) -> BatchJob | None:
        """Return the next batch; None if the queue is empty. Expired and cancelled requests go to `dropped`."""
        self.drop(now)
        if not self._requests:
            return None
        if len(self._requests) == 1 and (lone := self._take_lone()) is not None:
            return lone
        chosen: dict[int, list[int]] = {}
        requests: dict[int, PendingRequest] = {}
        for request, length, index in self._choose_rows():
            requests[request.order] = request
            chosen.setdefault(request.order, []).append(index)
            self.tokens -= length
            self._rows -= 1
        for order, request in requests.items():
            taken = set(chosen[order])
            rows = {length: [i for i in indices if i not in taken] for length, indices in request.rows.items()}
            self._set_rows(request, rows)
        slices = [RowSlice(requests[order], np.array(sorted(indices))) for order, indices in chosen.items()]
        return BatchJob.of(slices, self._limits.round_up)

    def _take_lone(self) -> BatchJob | None:
        """Return the only queued request if it is one batch without padding: the fast path for a lone request."""
        (request,) = self._requests.values()
        if len(request.rows) > 1:
            return None
        ((length, indices),) = request.rows.items()
        rows, limits = len(indices), self._limits
        if rows < len(request.batch) or rows > limits.rows_per_batch or rows * length > limits.tokens_per_batch:
            return None
        request.rows = {}
        self._requests.clear()
        self._by_length.clear()
        self._rows = self.tokens = 0
        return BatchJob(request.batch, [RowSlice(request, np.arange(rows))], limits.round_up)

    def discard(self, request: PendingRequest) -> bool:
        """Remove a request; return whether any of its rows were queued."""
        is_queued = self._requests.get(request.order) is request
        if is_queued:
            self._remove([request])
        return is_queued

    def close(self) -> list[PendingRequest]:
        """Remove and return all requests."""
        requests = list(self._requests.values())
        self._remove(requests)
        return requests

    def drop(self, now: float) -> None:
        """Move expired and cancelled requests to `dropped`."""
        dropped = [
            request
            for request in self._requests.values()
            if request.is_cancelled or request.is_over or (request.deadline is not None and now > request.deadline)
        ]
        if dropped:
            self._remove(dropped)
            self.dropped += dropped

    def _choose_rows(self) -> list[_QueuedRow]:
        """Return rows that run well together, until the batch is full or would be mostly padding."""
        limits, is_padded = self._limits, self._limits.round_up is None
        chosen: list[_QueuedRow] = []
        longest = tokens = 0
        for row in self._by_distance() if is_padded else self._in_order():
            request, length, _ = row
            if chosen and request is not chosen[0][0] and (request.is_suspect or chosen[0][0].is_suspect):
                continue
            width, count = max(longest, length), len(chosen) + 1
            cost = width * count if is_padded else tokens + length
            padding = cost - tokens - length
            is_fitting = cost <= limits.tokens_per_batch and count <= limits.rows_per_batch
            if chosen and not (is_fitting and padding <= max(FREE_PADDING, MAX_PADDING * cost)):
                # Rows come by distance in length: a later one may still fit, but not much better.
                break
            chosen.append(row)
            longest, tokens = width, tokens + length
        return chosen

    def _in_order(self) -> Iterator[_QueuedRow]:
        for request in sorted(self._requests.values(), key=PendingRequest.sort_key):
            for length, indices in request.rows.items():
                yield from ((request, length, index) for index in indices)

    def _by_distance(self) -> Iterator[_QueuedRow]:
        """Yield the first request's rows of its first length, then all others by distance from that length."""
        first = min(self._requests.values(), key=PendingRequest.sort_key)
        start = next(iter(first.rows))
        yield from ((first, start, index) for index in first.rows[start])
        for length in sorted(self._by_length, key=lambda other: abs(other - start)):
            for request in self._by_length[length].values():
                if request is not first or length != start:
                    yield from ((request, length, index) for index in request.rows[length])

    def _remove(self, requests: Iterable[PendingRequest]) -> None:
        for request in requests:
            for length, indices in request.rows.items():
                self._rows -= len(indices)
                self.tokens -= length * len(indices)
            self._set_rows(request, {})

    def _set_rows(self, request: PendingRequest, rows: dict[int, list[int]]) -> None:
        """Replace the queued rows of a request; without any, the request leaves the queue."""
        for length in request.rows:
            if not rows.get(length):
                of_length = self._by_length[length]
                del of_length[request.order]
                if not of_length:
                    del self._by_length[length]
        request.rows = {length: indices for length, indices in rows.items() if indices}
        if not request.rows:
            del self._requests[request.order]
