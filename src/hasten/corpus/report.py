"""Report the speed of a job while it runs, and its result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hasten.core.progress import Progress
from hasten.corpus.job_records import Placement
from hasten.corpus.operator import StageSeconds, stage_shares


@dataclass(frozen=True, slots=True)
class MapReport:
    """The counts and timings of one process, and the state of the whole output."""

    output: str
    # Whether every shard of every input is answered; other processes may still do theirs.
    is_complete: bool
    # Of this process: rows with an answer, seconds of work, and the share of each stage.
    rows: int
    seconds: float
    rows_per_s: float
    tokens_per_s: float
    stages: dict[str, float]
    cost_per_million_rows: float | None
    # Of the whole output so far.
    total_rows: int
    total_rejected: int
    total_truncated: int
    files: int
    placement: Placement
    proof: dict[str, Any]


class ProgressMeter:
    """Shows the speed, the time that is left and the share of each stage."""

    def __init__(self, progress: Progress, expected: float, begin: float, stages: Sequence[StageSeconds]) -> None:
        self._progress, self._expected, self._begin, self._stages = progress, expected, begin, stages
        self._rows = self._tokens = 0

    def advance(self, rows: int, tokens: int) -> None:
        """Count the rows of a window."""
        self._rows += rows
        self._tokens += tokens
        elapsed = time.perf_counter() - self._begin
        left = max(0.0, self._expected - self._rows) * elapsed / max(1, self._rows)
        shares = " ".join(f"{stage} {share:.0%}" for stage, share in stage_shares(self._stages).items())
        note = (
            f"{self._rows / elapsed:,.0f} rows/s, {self._tokens / elapsed:,.0f} tokens/s, {left:,.0f} s left; {shares}"
        )
        self._progress.advance(rows, note)
