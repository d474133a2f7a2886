"""The highest rate at which a server keeps a promise: doubled until it breaks, then narrowed down."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from hasten.stress.load import Run

# How close to the truth is close enough: the noise of a run of seconds is larger.
_CLOSE = 1.1
_LOWEST = 1.0
_MOST_RUNS = 24
# What is still to be answered when all was sent: a few percent of the run, or what a request takes anyway. Where more
# comes than is answered it grows with the run, and shows here before a short run shows it in the times.
_LEFT_OVER, _AS_USUAL = 0.05, 1.5


@dataclass(frozen=True, slots=True)
class Sweep:
    objective_ms: float
    # The fastest run that kept the objective; None where not even the slowest did.
    best: Run | None
    runs: tuple[Run, ...]


def keeps(run: Run, objective_ms: float) -> bool:
    """Every request answered, as fast as they came, and 99 of 100 within the objective."""
    left_over_s = run.seconds - run.duration_s
    has_kept_up = left_over_s <= max(_LEFT_OVER * run.duration_s, _AS_USUAL * run.p50_ms / 1e3)
    return run.errors == 0 and run.p99_ms <= objective_ms and has_kept_up


async def sweep(run_at: Callable[[float], Awaitable[Run]], rate: float, objective_ms: float) -> Sweep:
    runs: list[Run] = []
    best: Run | None = None
    too_much: float | None = None
    while len(runs) < _MOST_RUNS:
        run = await run_at(rate)
        runs.append(run)
        if keeps(run, objective_ms):
            best = run
        else:
            too_much = rate
        if too_much is None:
            rate *= 2
        elif best is None:
            rate /= 2
            if rate < _LOWEST:
                break
        elif too_much < _CLOSE * best.rate:
            break
        else:
            rate = (best.rate * too_much) ** 0.5
    return Sweep(objective_ms, best, tuple(runs))
