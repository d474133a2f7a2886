"""A child process that is started again whenever it ends, unless it ends too often."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable

from hasten.core.errors import HastenError
from hasten.server.processes.child import ChildProcess
from hasten.server.processes.control import AnyReply, ChannelClosedError
from hasten.server.processes.messages import ReadStatus, Request, Status

logger = logging.getLogger("hasten")

# A process that ends this often within this time cannot be helped by starting it again.
_MAX_ENDS = 5
_WINDOW_S = 60.0
_CHECK_S = 0.5


class SupervisedChild:
    """A child process and its successors. Used on the event loop."""

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[ChildProcess]],
        take_up: Callable[[], Awaitable[None]],
        on_change: Callable[[], None],
        *,
        max_silence_s: float,
    ) -> None:
        """`take_up` brings a started process into the state of the others and sets `is_up`.

        `on_change` is called when what `can_serve` and `fault` return may have changed.
        """
        self.name = name
        self._start = start
        self._take_up = take_up
        self._on_change = on_change
        # Time for a process to report its status; then it counts as stalled.
        self._max_silence_s = max_silence_s
        self._child: ChildProcess | None = None
        self._ends: deque[float] = deque(maxlen=_MAX_ENDS)
        self._status = Status(None, can_serve=False)
        # Set once the first process is configured; errors before are those of the start.
        self.configured = asyncio.Event()
        # Set while the process has all models.
        self.up = asyncio.Event()
        # Why starting it again does not help; None while it does.
        self.fault: str | None = None
        # Why the first process could not be configured.
        self.error: HastenError | None = None
        # While stopping, it is not started again.
        self.is_stopping = False

    @property
    def is_up(self) -> bool:
        """Return whether the process has all models."""
        return self.up.is_set()

    @is_up.setter
    def is_up(self, is_up: bool) -> None:
        if is_up:
            self.up.set()
        else:
            self.up.clear()

    @property
    def is_running(self) -> bool:
        """Return whether there is a process at present."""
        return self._child is not None

    @property
    def can_serve(self) -> bool:
        """Return whether the process has all models and reports that it can serve."""
        return self.is_up and self._status.can_serve

    @property
    def id(self) -> int | None:
        """Return the id of the present process."""
        return None if self._child is None else self._child.id

    async def call(self, request: Request, kind: type[AnyReply], timeout_s: float | None = None) -> AnyReply:
        """Send a request to the present process and return its reply."""
        if self._child is None:
            raise ChannelClosedError(f"{self.name} has ended")
        try:
            return await self._child.channel.call(request, kind, timeout_s)
        except ChannelClosedError as error:
            raise ChannelClosedError(f"{self.name} has ended") from error

    async def keep_running(self, on_end: Callable[[], None]) -> None:
        """Start the process, and start it again whenever it has ended, until it is stopping or ends too often."""
        while self._may_start():
            child = self._child = await self._start()
            watching = asyncio.ensure_future(self._watch())
            how = await child.wait()
            watching.cancel()
            self._child, self.is_up = None, False
            on_end()
            if not self.is_stopping:
                self._count_end(how)
            self._on_change()

    def _may_start(self) -> bool:
        return not self.is_stopping and self.fault is None

    def _count_end(self, how: str) -> None:
        now = time.monotonic()
        self._ends.append(now)
        if len(self._ends) == _MAX_ENDS and now - self._ends[0] < _WINDOW_S:
            self.fault = f"{self.name} has ended {_MAX_ENDS} times within {_WINDOW_S:g} s, at last with {how}"
        else:
            logger.error("%s has ended with %s: starting it again", self.name, how)

    async def _watch(self) -> None:
        """Take up a started process, then kill it once it reports a fault or nothing at all."""
        child = self._child
        assert child is not None
        try:
            await self._take_up()
            self._status = Status(None, can_serve=True)
            self._on_change()
            while True:
                await asyncio.sleep(_CHECK_S)
                self._status = await self.call(ReadStatus(), Status, self._max_silence_s)
                self._on_change()
                if self._status.fault is not None:
                    logger.critical("%s: %s", self.name, self._status.fault)
                    break
        except ChannelClosedError:
            return
        except HastenError as error:
            if not self.configured.is_set():
                self.error = error
            else:
                logger.critical("%s: %s", self.name, error)
        except Exception:
            logger.exception("%s cannot be supervised", self.name)
        child.kill()

    def kill(self) -> None:
        """End the process at once."""
        if self._child is not None:
            self._child.kill()

    def end(self) -> None:
        """Ask the process to end, and do not start it again."""
        self.is_stopping = True
        if self._child is not None:
            self._child.end()
