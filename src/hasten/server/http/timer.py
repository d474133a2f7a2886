"""A restartable timer on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Timer:
    """Calls a function once after a delay. Starting it again replaces the pending call."""

    __slots__ = ("_handle", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        """Return whether the timer was started and not stopped since."""
        return self._handle is not None

    def start(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call the function after this many seconds, in place of any pending call."""
        self.stop()
        self._handle = self._loop.call_later(seconds, callback)

    def stop(self) -> None:
        """Cancel the pending call, if any."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
