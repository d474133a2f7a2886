"""Receive the messages of gRPC calls, within a deadline and in bounded number.

A call may be opened without ever sending its message. It costs no thread, and calls that do send theirs do not wait for
it: of too many waiting calls, the one that has waited longest is rejected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from hasten.core.errors import DeadlineError, OverloadedError

_RETRY_S = 1.0


class MessageReceiver:
    """Receives the messages of all calls of a server, on its event loop."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        # The reads of calls that wait, in the order in which they began.
        self.waiting: dict[asyncio.Future[Any], None] = {}

    async def receive(
        self, context: Any, timeout_s: float, is_busy: Callable[[], bool] = lambda: False
    ) -> bytes | None:
        """Return the next message of a call, or None if the client sends no more.

        Raise a DeadlineError if there is none in time, unless the call is busy with its earlier messages by then.
        """
        import grpc

        reading = asyncio.ensure_future(context.read())
        self.waiting[reading] = None
        if len(self.waiting) > self._max_waiting:
            oldest = next(iter(self.waiting))
            del self.waiting[oldest]
            oldest.cancel()
        try:
            while not reading.done():
                await asyncio.wait([reading], timeout=timeout_s)
                if not reading.done() and not is_busy():
                    raise DeadlineError(f"no message was received within {timeout_s:g} s")
        finally:
            self.waiting.pop(reading, None)
            reading.cancel()
        if reading.cancelled():
            raise OverloadedError(f"{self._max_waiting} calls are waiting for a message", retry_after_s=_RETRY_S)
        data = reading.result()
        return None if data is grpc.aio.EOF else bytes(data)
