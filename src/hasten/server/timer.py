"""What happens later, unless something else comes first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Timer:
    """One at a time: what is asked for last."""

    __slots__ = ("_handle", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        return self._handle is not None

    def start(self, seconds: float, then: Callable[[], None]) -> None:
        self.stop()
        self._handle = self._loop.call_later(seconds, then)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
