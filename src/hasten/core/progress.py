"""Report the progress of long work. The command line draws it; programs ignore it by default."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """Receives the progress of nested steps; `advance` and `finish` refer to the innermost one."""

    def start(self, title: str, total: float | None = None) -> None:
        """Begin a step with this title, of `total` units if their number is known."""

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        """Report that `amount` more units are done; `note` replaces the text beside the bar."""

    def finish(self, note: str = "", *, ok: bool = True) -> None:
        """End the step."""


class SilentProgress:
    """Progress that is not shown, the default for programs."""

    def start(self, title: str, total: float | None = None) -> None:
        pass

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        pass

    def finish(self, note: str = "", *, ok: bool = True) -> None:
        pass


@contextmanager
def step(progress: Progress, title: str, total: float | None = None) -> Iterator[Progress]:
    """Run the body as one step; it finishes as failed if the body raises."""
    progress.start(title, total)
    ok = False
    try:
        yield progress
        ok = True
    finally:
        progress.finish(ok=ok)
