"""Record the provenance of a result: date, commit and machine."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from hasten.core.errors import HastenError
from hasten.core.system.hardware import this_machine


def provenance() -> dict[str, Any]:
    """Return the date, commit and machine of a run."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": msgspec.to_builtins(this_machine()),
    }


def run_main(main: Callable[[], None]) -> None:
    """Call `main` and report hasten's errors in one line, as its command line does."""
    try:
        main()
    except HastenError as error:
        raise SystemExit(f"error: {error}") from None


def require_gpu() -> None:
    """Exit where there is no GPU, before anything is loaded and before published results are overwritten."""
    if not this_machine().gpus:
        raise SystemExit("error: this benchmark needs an NVIDIA GPU, and this machine has none")


def commit() -> str | None:
    """Return the commit, marked `-dirty` if files other than results have changed; None without a git history."""
    try:
        name = _git("rev-parse", "--short", "HEAD")
        changes = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude,top)benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{name}-dirty" if changes else name


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent
    return subprocess.check_output(["git", *arguments], text=True, cwd=folder, stderr=subprocess.DEVNULL).strip()
