"""How long work tells what it is doing. The command line draws it; a program may ignore it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    def start(self, what: str, total: float | None = None) -> None: ...

    def advance(self, amount: float = 1, note: str | None = None) -> None: ...

    def finish(self, note: str = "", *, ok: bool = True) -> None: ...


class Silent:
    """The default for programs."""

    def start(self, what: str, total: float | None = None) -> None:
        pass

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        pass

    def finish(self, note: str = "", *, ok: bool = True) -> None:
        pass


@contextmanager
def step(progress: Progress, what: str, total: float | None = None) -> Iterator[Progress]:
    progress.start(what, total)
    ok = False
    try:
        yield progress
        ok = True
    finally:
        progress.finish(ok=ok)
