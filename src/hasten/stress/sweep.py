"""The highest rate at which a server keeps a promise: doubled until it breaks, then narrowed down."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from hasten.stress.load import Run

# How close to the truth is close enough: the noise of a run of seconds is larger.
_CLOSE = 1.1
_MOST_RUNS = 24
# A queue that grows shows in what is answered before it shows in the times.
_KEPT_UP = 0.95


@dataclass(frozen=True, slots=True)
class Sweep:
    objective_ms: float
    # The last run that kept the objective; None where not even the first rate did.
    best: Run | None
    runs: tuple[Run, ...]


def keeps(run: Run, objective_ms: float) -> bool:
    """Every request answered, nearly as fast as they came, and 99 of 100 within the objective."""
    return run.errors == 0 and run.p99_ms <= objective_ms and run.per_second >= _KEPT_UP * run.sent / run.seconds


async def sweep(run_at: Callable[[float], Awaitable[Run]], rate: float, objective_ms: float) -> Sweep:
    runs: list[Run] = []
    best: Run | None = None
    too_much: float | None = None
    while len(runs) < _MOST_RUNS:
        run = await run_at(rate)
        runs.append(run)
        if keeps(run, objective_ms):
            if best is None or run.rate > best.rate:
                best = run
        else:
            too_much = min(rate, too_much or rate)
        if too_much is None:
            rate *= 2
        elif best is None:
            rate /= 2
            if rate < 1:
                break
        elif too_much < _CLOSE * best.rate:
            break
        else:
            rate = (best.rate * too_much) ** 0.5
    return Sweep(objective_ms, best, tuple(runs))
