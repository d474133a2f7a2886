"""`--require NAME`: fail tests that would be skipped because NAME is missing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

import pytest

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def judged(report: Report, names: Iterable[str]) -> Report:
    """Turn a skip into a failure if its reason mentions one of the names."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if (name := lacking(reason, names)) is not None:
            report.outcome = "failed"
            report.longrepr = f"--require {name}: {reason}"
    return report


def lacking(reason: str, names: Iterable[str]) -> str | None:
    """Return the first name that the reason of a skip mentions."""
    return next((name for name in names if re.search(rf"\b{re.escape(name)}\b", reason, re.IGNORECASE)), None)
