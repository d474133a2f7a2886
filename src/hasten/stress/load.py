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

from hasten.core.tensors import FloatArray
from hasten.stress.client import BROKEN, SILENT, Clients, Target

_PERCENTILES = (50.0, 90.0, 99.0, 99.9)
_REFUSED = 429
# Who cannot send in time measures itself.
_LATE_S = 0.005
_TELL_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Run:
    """What came of it; times in milliseconds."""

    rate: float
    seconds: float
    sent: int
    answered: int
    # Answers by status; 0 for connections that broke, -1 for silence.
    statuses: dict[int, int]
    percentiles: dict[str, float]
    max_ms: float
    mean_ms: float
    # Of answers other than 200: how long it took to say no.
    refused_p99_ms: float | None
    connections: int
    # The share of requests that this process could not send in time.
    late: float
    times_ms: tuple[float, ...]

    @property
    def per_second(self) -> float:
        return self.answered / self.seconds

    @property
    def p99_ms(self) -> float:
        return self.percentiles["p99"]

    @property
    def errors(self) -> int:
        return self.sent - self.answered

    def describe_errors(self) -> str:
        names = {BROKEN: "broke off", SILENT: "no answer in time", _REFUSED: "refused (429)"}
        bad = {status: count for status, count in sorted(self.statuses.items()) if status != 200}
        return ", ".join(f"{count} {names.get(status, f'answered {status}')}" for status, count in bad.items())


def arrivals(rate: float, seconds: float, seed: int) -> FloatArray:
    """When requests are due, from the start."""
    random = np.random.default_rng(seed)
    gaps = random.exponential(1 / rate, int(rate * seconds * 1.5) + 50)
    due: FloatArray = np.cumsum(gaps)
    return due[due < seconds]


async def load(
    target: Target,
    requests: Sequence[bytes],
    rate: float,
    seconds: float,
    *,
    timeout_s: float = 30.0,
    seed: int = 0,
    on_progress: Callable[[float, int], None] = lambda *_: None,
) -> Run:
    """Requests in turn, at this rate."""
    due = arrivals(rate, seconds, seed)
    ended = np.full(len(due), np.nan)
    status = np.zeros(len(due), np.int64)
    clients = Clients(target, timeout_s)
    order = np.random.default_rng(seed).integers(len(requests), size=len(due))
    left = len(due)
    is_over = asyncio.Event()
    late = 0
    begin = time.perf_counter()

    def answered(place: int, code: int) -> None:
        nonlocal left
        ended[place], status[place] = time.perf_counter() - begin, code
        left -= 1
        if not left:
            is_over.set()

    tasks: set[asyncio.Task[None]] = set()
    told = 0.0
    for place, moment in enumerate(due):
        while (ahead := moment - (time.perf_counter() - begin)) > 0:
            await asyncio.sleep(ahead)
        late += time.perf_counter() - begin - moment > _LATE_S
        task = asyncio.ensure_future(clients.ask(requests[order[place]], partial(answered, place)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        if moment - told > _TELL_EVERY_S:
            on_progress(moment - told, place + 1 - (len(due) - left))
            told = moment
        if place % 64 == 0:
            await asyncio.sleep(0)  # let answers in, also where requests are due faster than they can be sent
    if left:
        await is_over.wait()
    clients.close()
    return _run(rate, due, ended, status, clients.opened, late)


def _run(rate: float, due: FloatArray, ended: FloatArray, status: FloatArray, connections: int, late: int) -> Run:
    times = (ended - due) * 1e3
    good = times[status == 200]
    some = good if len(good) else np.zeros(1)
    refused = times[status != 200]
    levels = np.percentile(some, _PERCENTILES)
    return Run(
        rate=rate,
        seconds=float(max(ended.max(), due.max())) if len(due) else 0.0,
        sent=len(due),
        answered=len(good),
        statuses={int(code): int(count) for code, count in Counter(status.tolist()).items()},
        percentiles={f"p{level:g}": float(value) for level, value in zip(_PERCENTILES, levels, strict=True)},
        max_ms=float(some.max()),
        mean_ms=float(some.mean()),
        refused_p99_ms=float(np.percentile(refused, 99)) if len(refused) else None,
        connections=connections,
        late=late / max(1, len(due)),
        times_ms=tuple(np.round(good, 3).tolist()),
    )
