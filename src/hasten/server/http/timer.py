"""A restartable timer on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Timer:
    """Calls a function once after a delay. Starting it again replaces the pending call.

    A connection starts and stops its timer with every request: the loop's own timer is left running meanwhile, and
    checks what is due when it ends.
    """

    __slots__ = ("_callback", "_due", "_handle", "_handle_due", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._callback: Callable[[], None] | None = None
        self._handle: asyncio.TimerHandle | None = None
        self._due = self._handle_due = 0.0

    @property
    def is_set(self) -> bool:
        """Return whether the timer was started and not stopped since."""
        return self._callback is not None

    def start(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call the function after this many seconds, in place of any pending call."""
        self._callback, self._due = callback, self._loop.time() + seconds
        if self._handle is None or self._handle_due > self._due:
            self.cancel()
            self._schedule()

    def stop(self) -> None:
        """Drop the pending call, if any."""
        self._callback = None

    def cancel(self) -> None:
        """End the loop's timer, which would keep what the callback refers to in memory."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _schedule(self) -> None:
        self._handle_due = self._due
        self._handle = self._loop.call_later(self._due - self._loop.time(), self._end)

    def _end(self) -> None:
        self._handle, callback = None, self._callback
        if callback is None:
            return
        if self._loop.time() < self._due:
            self._schedule()
        else:
            self._callback = None
            callback()
