"""Measure how many sessions, of how many threads each, answer the first rows fastest."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from hasten.core.system.hardware import available_memory_bytes, usable_cores
from hasten.corpus.job_records import Placement
from hasten.corpus.operator import Operator
from hasten.corpus.windows import Window

logger = logging.getLogger("hasten")

# Rows that each session answers in a measurement; fewer rows in all do not pay for one.
_MEASURED_ROWS = 128
_MIN_ROWS = 20 * _MEASURED_ROWS
# The threads per session that are tried, besides all cores.
_THREADS = (8, 4, 2, 1)
# Measurements with more sessions would take longer to open than to run.
_MAX_SESSIONS = 16
# The memory of a session over the size of its files, and the share of the free memory that all may take.
_MEMORY_FACTOR, _MEMORY_SHARE = 2.5, 0.5


def measured_placement(
    open_operator: Callable[[int], Operator], sample: Window | None, expected_rows: float, session_bytes: int
) -> Placement:
    """Return the fastest way to share the cores among sessions that fit the memory, measured on the first rows."""
    cores = usable_cores()
    whole = Placement(1, cores)
    if cores == 1 or sample is None or expected_rows < _MIN_ROWS or not sample.rows.num_rows:
        return whole
    limit = min(_MAX_SESSIONS, _fitting_sessions(session_bytes))
    others = [Placement(cores // threads, threads) for threads in _THREADS if threads < cores]
    candidates = [whole, *(placement for placement in others if placement.sessions <= limit)]
    if len(candidates) == 1:
        return whole
    speeds = {placement: _rows_per_s(open_operator, placement, sample) for placement in candidates}
    logger.info(
        "sessions × threads, rows/s: %s",
        ", ".join(f"{placement.sessions}×{placement.threads} {speed:.0f}" for placement, speed in speeds.items()),
    )
    return max(speeds, key=lambda placement: speeds[placement])


def _fitting_sessions(session_bytes: int) -> int:
    available = available_memory_bytes()
    if available is None:
        return _MAX_SESSIONS
    return int(available * _MEMORY_SHARE / max(1.0, session_bytes * _MEMORY_FACTOR))


def _rows_per_s(open_operator: Callable[[int], Operator], placement: Placement, sample: Window) -> float:
    rows: int = min(_MEASURED_ROWS, sample.rows.num_rows)
    window = Window(sample.shard, sample.rows.slice(0, rows), sample.positions[:rows], {}, rows, is_last=True)
    with ExitStack() as opened:
        operators = [open_operator(placement.threads or 1) for _ in range(placement.sessions)]
        for operator in operators:
            opened.callback(operator.close)
        pool = opened.enter_context(ThreadPoolExecutor(placement.sessions))

        def run(operator: Operator) -> None:
            for _ in operator.run([window]):
                pass

        list(pool.map(run, operators))  # the first run allocates
        begin = time.perf_counter()
        list(pool.map(run, operators))
        seconds = time.perf_counter() - begin
    return placement.sessions * rows / seconds
