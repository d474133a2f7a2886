"""Wait for a condition instead of sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_INTERVAL_S = 0.005


def wait_until(condition: Callable[[], T], description: str = "the condition", timeout_s: float = 60.0) -> T:
    """Poll the condition until its result is true, and return it; fail the test after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"{description} did not come true within {timeout_s:g} s"
        time.sleep(_INTERVAL_S)
    return result
