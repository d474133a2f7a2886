"""One load run at a fixed rate, with the latency and status of each request.

Requests are due at random times (a Poisson process), as independent users send them. Latency counts from the time when
a request was due, not from when it was sent, so a stall counts for all requests that were due in it (no coordinated
omission).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from hasten.core.tensors import FloatArray, IntArray
from hasten.stress.client import BROKEN, SILENT, ClientPool, StressTarget

_PERCENTILES = (50.0, 90.0, 99.0, 99.9)
_BARS = 20
_OK, _TOO_MANY_REQUESTS = 200, 429
# An event loop's timers wake up to a millisecond late, which is not counted as latency; any further delay is.
_TIMER_S = 0.001
# Beyond this delay a request counts as late: the client is the bottleneck.
_LATE_S = 0.005
_PROGRESS_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of the histogram: answers that took up to this time, and longer than those of the bar before."""

    up_to_ms: float
    count: int


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The result of a run; times are those of answers with status 200."""

    rate: float
    duration_s: float
    # From the first request to the last answer.
    seconds: float
    sent: int
    answered: int
    per_second: float
    # Answers by status; 0: the connection broke, -1: no answer in time.
    statuses: dict[int, int]
    # NaN if nothing was answered.
    percentiles_ms: dict[str, float]
    max_ms: float
    mean_ms: float
    # Latency of rejections and other errors.
    failed_p99_ms: float | None
    connections: int
    # The share of requests that this process sent late.
    late: float
    histogram: tuple[Bar, ...]
    # With a fixed number of clients: the answers of the slowest client over those of the median client.
    fairness: float | None = None

    @property
    def p50_ms(self) -> float:
        """Return the median latency."""
        return self.percentiles_ms["p50"]

    @property
    def p99_ms(self) -> float:
        """Return the 99th percentile of the latency."""
        return self.percentiles_ms["p99"]

    @property
    def errors(self) -> int:
        """Return the number of requests without a 200 answer."""
        return self.sent - self.answered

    def describe_errors(self) -> str:
        """Return the errors by kind, or an empty text."""
        names = {BROKEN: "connection lost", SILENT: "timed out", _TOO_MANY_REQUESTS: "rejected (429)"}
        failed = {status: count for status, count in sorted(self.statuses.items()) if status != _OK}
        return ", ".join(f"{count} {names.get(status, f'answered {status}')}" for status, count in failed.items())


@dataclass(frozen=True, slots=True)
class LoadStatus:
    """The progress of a run."""

    elapsed_s: float
    answered: int
    in_flight: int
    errors: int


def arrivals(rate: float, seconds: float, seed: int) -> FloatArray:
    """Return the times at which requests are due, in seconds from the first."""
    random = np.random.default_rng(seed)
    gaps = random.exponential(1 / rate, int(rate * seconds * 1.5) + 50)
    due: FloatArray = np.cumsum(gaps) - gaps[0]
    return due[due < seconds]


async def load(
    target: StressTarget,
    requests: Sequence[bytes],
    rate: float,
    seconds: float,
    *,
    timeout_s: float = 30.0,
    seed: int = 0,
    on_progress: Callable[[LoadStatus], None] = lambda _: None,
) -> LoadResult:
    """Send requests, in random order, at this rate."""
    due = arrivals(rate, seconds, seed)
    sent, ended = np.zeros(len(due)), np.zeros(len(due))
    status = np.zeros(len(due), np.int64)
    clients = ClientPool(target, timeout_s)
    order = np.random.default_rng(seed).integers(len(requests), size=len(due))
    sent_count = done = errors = 0
    is_over = asyncio.Event()
    begin = time.perf_counter()

    def on_answer(index: int, code: int) -> None:
        nonlocal done, errors
        ended[index], status[index] = time.perf_counter() - begin, code
        done += 1
        errors += code != _OK
        if done == len(due):
            is_over.set()

    async def report() -> None:
        while True:
            on_progress(LoadStatus(time.perf_counter() - begin, done - errors, sent_count - done, errors))
            await asyncio.sleep(_PROGRESS_INTERVAL_S)

    reporting = asyncio.ensure_future(report())
    for index, due_at in enumerate(due):
        while (ahead := due_at - (time.perf_counter() - begin)) > 0:
            await asyncio.sleep(ahead)
        sent[index] = time.perf_counter() - begin
        clients.ask(requests[order[index]], partial(on_answer, index))
        sent_count += 1
        if index % 16 == 0:
            await asyncio.sleep(0)  # receive answers, even if requests are due faster than they can be sent
    await is_over.wait()
    reporting.cancel()
    await clients.close()
    counted_from = np.minimum(sent, due + _TIMER_S)
    late = float((sent - due > _LATE_S).mean())
    return _result(rate, seconds, float(ended.max()), (ended - counted_from) * 1e3, status, clients.opened, late)


async def closed_loop(
    target: StressTarget,
    requests: Sequence[bytes],
    count: int,
    seconds: float,
    *,
    timeout_s: float = 30.0,
    seed: int = 0,
    on_progress: Callable[[LoadStatus], None] = lambda _: None,
) -> LoadResult:
    """Run clients that each send a random request once their last was answered.

    The rate follows from the latency, which a stall therefore hides: compare servers by throughput and fairness.
    """
    pools = [ClientPool(target, timeout_s) for _ in range(count)]
    random = np.random.default_rng(seed)
    times: list[float] = []
    statuses: list[int] = []
    answered = [0] * count
    running, is_over = count, asyncio.Event()
    begin = time.perf_counter()

    def send(client: int) -> None:
        nonlocal running
        if time.perf_counter() - begin < seconds:
            pools[client].ask(
                requests[int(random.integers(len(requests)))], partial(on_answer, client, time.perf_counter())
            )
            return
        running -= 1
        if not running:
            is_over.set()

    def on_answer(client: int, sent: float, code: int) -> None:
        times.append(time.perf_counter() - sent)
        statuses.append(code)
        answered[client] += code == _OK
        # Later, so that a client whose connections fail at once does not recurse.
        asyncio.get_running_loop().call_soon(send, client)

    async def report() -> None:
        while True:
            done = sum(answered)
            on_progress(LoadStatus(time.perf_counter() - begin, done, running, len(statuses) - done))
            await asyncio.sleep(_PROGRESS_INTERVAL_S)

    reporting = asyncio.ensure_future(report())
    for client in range(count):
        send(client)
    await is_over.wait()
    reporting.cancel()
    elapsed_s = time.perf_counter() - begin
    for pool in pools:
        await pool.close()
    connections = sum(pool.opened for pool in pools)
    milliseconds = np.array(times) * 1e3
    result = _result(len(times) / elapsed_s, seconds, elapsed_s, milliseconds, np.array(statuses), connections, 0.0)
    return replace(result, fairness=min(answered) / max(1.0, float(np.median(answered))))


def _result(
    rate: float, duration_s: float, seconds: float, times: FloatArray, status: IntArray, connections: int, late: float
) -> LoadResult:
    ok, failed = times[status == _OK], times[status != _OK]
    ok_or_nan = ok if len(ok) else np.array([np.nan])
    levels = np.percentile(ok_or_nan, _PERCENTILES)
    return LoadResult(
        rate=rate,
        duration_s=duration_s,
        seconds=seconds,
        sent=len(times),
        answered=len(ok),
        per_second=len(ok) / max(seconds, duration_s),
        statuses={int(code): count for code, count in Counter(status.tolist()).items()},
        percentiles_ms={f"p{level:g}": float(value) for level, value in zip(_PERCENTILES, levels, strict=True)},
        max_ms=float(ok_or_nan.max()),
        mean_ms=float(ok_or_nan.mean()),
        failed_p99_ms=float(np.percentile(failed, 99)) if len(failed) else None,
        connections=connections,
        late=late,
        histogram=_histogram(ok),
    )


def _histogram(times: FloatArray) -> tuple[Bar, ...]:
    """Return bars on a logarithmic scale."""
    if not len(times):
        return ()
    edges = np.geomspace(max(times.min(), 1e-3), times.max() * 1.001, _BARS + 1)
    counts, _ = np.histogram(times, edges)
    return tuple(Bar(float(edge), int(count)) for edge, count in zip(edges[1:], counts, strict=True))
