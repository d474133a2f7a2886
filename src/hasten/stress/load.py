"""One run at one rate: when each request was due, when it was answered, and with what.

Requests are due at random moments (a Poisson process), as independent users send them. A request's time counts from
when it was due, not from when it could be sent: a server that stalls is charged for all who wait, not for one of them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from hasten.core.tensors import FloatArray, IntArray
from hasten.stress.client import BROKEN, SILENT, Clients, Target

_PERCENTILES = (50.0, 90.0, 99.0, 99.9)
_BARS = 20
_OK, _REFUSED = 200, 429
# An event loop's timers wake up to a millisecond late, which is nobody's fault; what is more than that is counted.
_TIMER_S = 0.001
# Who cannot send in time measures itself.
_LATE_S = 0.005
_TELL_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Bar:
    """So many answers took up to this time, and longer than the bar before."""

    up_to_ms: float
    count: int


@dataclass(frozen=True, slots=True)
class Run:
    """What came of it; times are of what was answered with 200."""

    rate: float
    duration_s: float
    # Until the last answer.
    seconds: float
    sent: int
    answered: int
    per_second: float
    # Answers by status; 0 for connections that broke, -1 for silence.
    statuses: dict[int, int]
    # Not a number where nothing was answered.
    percentiles_ms: dict[str, float]
    max_ms: float
    mean_ms: float
    # Of answers other than 200: how long it took to say no.
    refused_p99_ms: float | None
    connections: int
    # The share of requests that this process could not send in time.
    late: float
    histogram: tuple[Bar, ...]

    @property
    def p50_ms(self) -> float:
        return self.percentiles_ms["p50"]

    @property
    def p99_ms(self) -> float:
        return self.percentiles_ms["p99"]

    @property
    def errors(self) -> int:
        return self.sent - self.answered

    def describe_errors(self) -> str:
        names = {BROKEN: "broke off", SILENT: "no answer in time", _REFUSED: "refused (429)"}
        bad = {status: count for status, count in sorted(self.statuses.items()) if status != _OK}
        return ", ".join(f"{count} {names.get(status, f'answered {status}')}" for status, count in bad.items())


@dataclass(frozen=True, slots=True)
class Standing:
    """How a run stands, for whoever watches it."""

    elapsed_s: float
    answered: int
    under_way: int
    errors: int


def arrivals(rate: float, seconds: float, seed: int) -> FloatArray:
    """When requests are due, from the first on."""
    random = np.random.default_rng(seed)
    gaps = random.exponential(1 / rate, int(rate * seconds * 1.5) + 50)
    due: FloatArray = np.cumsum(gaps) - gaps[0]
    return due[due < seconds]


async def load(
    target: Target,
    requests: Sequence[bytes],
    rate: float,
    seconds: float,
    *,
    timeout_s: float = 30.0,
    seed: int = 0,
    on_progress: Callable[[Standing], None] = lambda _: None,
) -> Run:
    """Requests in any order, at this rate."""
    due = arrivals(rate, seconds, seed)
    sent, ended = np.zeros(len(due)), np.zeros(len(due))
    status = np.zeros(len(due), np.int64)
    clients = Clients(target, timeout_s)
    order = np.random.default_rng(seed).integers(len(requests), size=len(due))
    asked = done = errors = 0
    is_over = asyncio.Event()
    begin = time.perf_counter()

    def answered(place: int, code: int) -> None:
        nonlocal done, errors
        ended[place], status[place] = time.perf_counter() - begin, code
        done += 1
        errors += code != _OK
        if done == len(due):
            is_over.set()

    async def tell() -> None:
        while True:
            on_progress(Standing(time.perf_counter() - begin, done - errors, asked - done, errors))
            await asyncio.sleep(_TELL_EVERY_S)

    telling = asyncio.ensure_future(tell())
    for place, moment in enumerate(due):
        while (ahead := moment - (time.perf_counter() - begin)) > 0:
            await asyncio.sleep(ahead)
        sent[place] = time.perf_counter() - begin
        clients.ask(requests[order[place]], partial(answered, place))
        asked += 1
        if place % 16 == 0:
            await asyncio.sleep(0)  # let answers in, also where requests are due faster than they can be sent
    await is_over.wait()
    telling.cancel()
    await clients.close()
    begun = np.minimum(sent, due + _TIMER_S)
    late = float((sent - due > _LATE_S).mean())
    return _run(rate, seconds, float(ended.max()), (ended - begun) * 1e3, status, clients.opened, late)


def _run(
    rate: float, duration_s: float, seconds: float, times: FloatArray, status: IntArray, connections: int, late: float
) -> Run:
    good, refused = times[status == _OK], times[status != _OK]
    some = good if len(good) else np.array([np.nan])
    levels = np.percentile(some, _PERCENTILES)
    return Run(
        rate=rate,
        duration_s=duration_s,
        seconds=seconds,
        sent=len(times),
        answered=len(good),
        per_second=len(good) / max(seconds, duration_s),
        statuses={int(code): count for code, count in Counter(status.tolist()).items()},
        percentiles_ms={f"p{level:g}": float(value) for level, value in zip(_PERCENTILES, levels, strict=True)},
        max_ms=float(some.max()),
        mean_ms=float(some.mean()),
        refused_p99_ms=float(np.percentile(refused, 99)) if len(refused) else None,
        connections=connections,
        late=late,
        histogram=_histogram(good),
    )


def _histogram(times: FloatArray) -> tuple[Bar, ...]:
    """In steps of equal ratio: what is slow is slow by a factor."""
    if not len(times):
        return ()
    edges = np.geomspace(max(times.min(), 1e-3), times.max() * 1.001, _BARS + 1)
    counts, _ = np.histogram(times, edges)
    return tuple(Bar(float(edge), int(count)) for edge, count in zip(edges[1:], counts, strict=True))
