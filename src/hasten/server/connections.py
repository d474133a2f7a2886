"""All connections of a server, and what they are allowed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from hasten.server.connection import Connection
from hasten.server.exchange import Exchange, Response
from hasten.server.watch import Watcher

_FEW = 4


@dataclass(frozen=True, slots=True)
class HttpLimits:
    body_bytes: int = 32 * 2**20
    # From the first byte of a request to its last, and between requests; who takes nothing for so long is cut off too.
    read_s: float = 30.0
    idle_s: float = 75.0
    connections: int = 4096
    # Of all bodies that are being received or answered.
    held_bytes: int = 2**29


class Connections:
    """All that are open, so that they can be counted, refused and closed."""

    def __init__(
        self,
        app: Callable[[Exchange], None],
        limits: HttpLimits,
        # Of a method, a path and headers: why a large body is not read, if so; and who is told of what was refused.
        refusal: Callable[[str, str, Mapping[str, str]], Response | None] = lambda *_: None,
        watch: Watcher = lambda _: None,
    ) -> None:
        self.app = app
        self.limits = limits
        self.refusal = refusal
        self.watch = watch
        self.open: set[Connection] = set()
        # Answers that threads have given, and may have sent, for the loop to settle before it takes anything else:
        # whoever has its answer finds it counted.
        self.answered: deque[tuple[Connection, Response]] = deque()
        self._is_called = False
        self.held_bytes = 0
        # Requests that are being answered.
        self.under_way = 0
        # Answers are the last of their connection; those that are idle are closed.
        self.is_draining = self.is_drained = False

    def __call__(self) -> Connection:
        return Connection(self)

    @property
    def has_few(self) -> bool:
        """Whether threads send answers. Where many are waited for the loop has to run anyway, for all at once, and a
        thread that writes would let go of the interpreter and wait for it anew, each time.
        """
        return self.under_way <= _FEW

    def call(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have it settle what was answered, from any thread; one call is for all that come before it is heard."""
        if not self._is_called:
            self._is_called = True
            with suppress(RuntimeError):  # the loop is closed, and with it all connections
                loop.call_soon_threadsafe(self.settle)

    def settle(self) -> None:
        # Before the rest: who answers from now on calls again.
        self._is_called = False
        for _ in range(len(self.answered)):
            connection, response = self.answered.popleft()
            connection.settle(response)

    def drain(self) -> None:
        """Answer what was asked, take nothing more, close what is idle."""
        self.is_draining = self.is_drained = True
        for connection in list(self.open):
            connection.close_if_idle()

    def abort(self) -> None:
        """Whoever has not sent or read all by now."""
        for connection in list(self.open):
            connection.abort()
