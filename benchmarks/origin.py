"""Where a result comes from: what every result file carries."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from hasten.core.errors import HastenError
from hasten.core.hardware import this_machine


def origin() -> dict[str, Any]:
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": msgspec.to_builtins(this_machine()),
    }


def run(main: Callable[[], None]) -> None:
    """What is wrong with what was asked for is a line, as on hasten's own command line."""
    try:
        main()
    except HastenError as error:
        raise SystemExit(f"error: {error}") from None


def needs_gpu() -> None:
    """Before anything is loaded or written: results of a machine without one would take the place of others."""
    if not this_machine().gpus:
        raise SystemExit("error: there is no NVIDIA GPU here, and this is about one")


def commit() -> str | None:
    """With a word where the code is not as it was committed; None where it came without its history."""
    words = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.check_output(words, text=True, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return None
