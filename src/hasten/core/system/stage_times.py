"""Measure the stages of a start."""

from __future__ import annotations

import os
import time
from pathlib import Path


class StageTimes:
    """The seconds of consecutive stages; the first begins now, or `elapsed_s` ago."""

    def __init__(self, elapsed_s: float = 0.0) -> None:
        self._begin = self._last = time.monotonic() - elapsed_s
        self._seconds: dict[str, float] = {}

    def finish(self, stage: str) -> None:
        """End a stage; the next one begins."""
        now = time.monotonic()
        self._seconds[stage] = now - self._last
        self._last = now

    def __str__(self) -> str:
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in self._seconds.items())
        return f"{self._last - self._begin:.1f} s ({stages})"


def process_age_s() -> float:
    """Return the seconds since this process started; zero on systems other than Linux."""
    try:
        # The name of the program, in parentheses, may contain spaces.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0
