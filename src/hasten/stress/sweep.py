"""Search for the highest rate that meets a latency objective: double the rate until it fails, then bisect."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from hasten.stress.load import LoadResult

# The search ends within this factor of the limit: the noise of a short run is larger.
_PRECISION = 1.1
_MIN_RATE = 1.0
_MAX_RUNS = 24
# Time to answer the requests that are open when the last was sent, as a share of the run and as a multiple of the
# median latency. Beyond capacity the backlog grows with the run, and a short run shows it here before it shows in p99.
_MAX_BACKLOG_SHARE, _MAX_BACKLOG_LATENCIES = 0.05, 1.5


@dataclass(frozen=True, slots=True)
class Sweep:
    """The result of a search."""

    objective_ms: float
    # The run with the highest rate that met the objective; None if no run did.
    best: LoadResult | None
    runs: tuple[LoadResult, ...]


def meets(run: LoadResult, objective_ms: float) -> bool:
    """Return whether all requests were answered, without a growing backlog and with p99 within the objective."""
    backlog_s = run.seconds - run.duration_s
    has_kept_up = backlog_s <= max(_MAX_BACKLOG_SHARE * run.duration_s, _MAX_BACKLOG_LATENCIES * run.p50_ms / 1e3)
    return run.errors == 0 and run.p99_ms <= objective_ms and has_kept_up


async def sweep(run_at: Callable[[float], Awaitable[LoadResult]], rate: float, objective_ms: float) -> Sweep:
    """Run at several rates, from this one on, and return the results."""
    runs: list[LoadResult] = []
    best: LoadResult | None = None
    failed_rate: float | None = None
    while len(runs) < _MAX_RUNS:
        run = await run_at(rate)
        runs.append(run)
        if meets(run, objective_ms):
            best = run
        else:
            failed_rate = rate
        if failed_rate is None:
            rate *= 2
        elif best is None:
            rate /= 2
            if rate < _MIN_RATE:
                break
        elif failed_rate < _PRECISION * best.rate:
            break
        else:
            rate = (best.rate * failed_rate) ** 0.5
    return Sweep(objective_ms, best, tuple(runs))
