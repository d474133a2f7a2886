"""The control channel between the parent and its child processes: typed requests and replies, in both directions.

A message is its length in four bytes, then msgpack. Both ends run on an event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from hasten.core import errors
from hasten.core.errors import HastenError, StageError, UnavailableError
from hasten.server.processes.messages import Done, Failed, MetricsText, ModelLoaded, Reply, Request, Status

logger = logging.getLogger("hasten")

_HEADER_BYTES = 4
# Merged metrics are the largest message.
_MAX_MESSAGE_BYTES = 2**26


AnyReply = TypeVar("AnyReply", Done, ModelLoaded, Status, MetricsText)
Handler = Callable[[Request], Awaitable[Reply]]


class _Envelope(msgspec.Struct, array_like=True, frozen=True):
    # Requests count up from 1; a reply has the number of its request.
    number: int
    body: Request | Reply


class ChannelClosedError(UnavailableError):
    """The process at the other end has ended."""


class ControlChannel(asyncio.Protocol):
    """One end of a control channel. Used on the event loop, except for `call_from_thread`."""

    def __init__(self, handle: Handler) -> None:
        self._handle = handle
        self._loop = asyncio.get_running_loop()
        self._decoder = msgspec.msgpack.Decoder(_Envelope)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        # Set when the process at the other end has ended or closed the channel.
        self.closed = asyncio.Event()

    @classmethod
    async def open(cls, end: socket.socket, handle: Handler) -> ControlChannel:
        """Return the channel over one end of a socket pair; `handle` answers the requests of the other end."""
        end.setblocking(False)
        _, channel = await asyncio.get_running_loop().create_unix_connection(lambda: cls(handle), sock=end)
        return channel

    async def call(self, request: Request, kind: type[AnyReply], timeout_s: float | None = None) -> AnyReply:
        """Send a request and return its reply; raise the error that it failed with."""
        if self._transport is None or self.closed.is_set():
            raise ChannelClosedError("the process has ended")
        number = next(self._numbers)
        reply = self._waiting[number] = self._loop.create_future()
        self._send(number, request)
        try:
            answer = await asyncio.wait_for(reply, timeout_s)
        except TimeoutError as error:
            raise UnavailableError(f"no reply to {type(request).__name__} within {timeout_s:g} s") from error
        finally:
            self._waiting.pop(number, None)
        if isinstance(answer, Failed):
            raise _to_error(answer)
        if not isinstance(answer, kind):
            raise StageError(f"{type(request).__name__} was answered with {type(answer).__name__}")
        return answer

    def call_from_thread(self, request: Request, kind: type[AnyReply], timeout_s: float | None = None) -> AnyReply:
        """Call from any thread but the loop's, and wait for the reply."""
        return asyncio.run_coroutine_threadsafe(self.call(request, kind, timeout_s), self._loop).result()

    def close(self) -> None:
        """Close the channel, at which a child process ends."""
        if self._transport is not None:
            self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= _HEADER_BYTES:
            size = int.from_bytes(self._received[:_HEADER_BYTES], "little")
            if size > _MAX_MESSAGE_BYTES:
                self._fail(f"a message of {size} bytes")
                return
            end = _HEADER_BYTES + size
            if len(self._received) < end:
                return
            frame = bytes(self._received[_HEADER_BYTES:end])
            del self._received[:end]
            try:
                envelope = self._decoder.decode(frame)
            except msgspec.MsgspecError as error:
                self._fail(str(error))
                return
            self._take(envelope)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(ChannelClosedError("the process has ended"))

    def _take(self, envelope: _Envelope) -> None:
        body = envelope.body
        if isinstance(body, Reply):
            reply = self._waiting.get(envelope.number)
            if reply is not None and not reply.done():
                reply.set_result(body)
            return
        task = self._loop.create_task(self._answer(envelope.number, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, request: Request) -> None:
        reply: Reply
        try:
            reply = await self._handle(request)
        except HastenError as error:
            reply = Failed(type(error).__name__, error.message, error.hint)
        except Exception as error:
            logger.exception("%s failed", type(request).__name__)
            reply = Failed("StageError", f"internal error: {type(error).__name__}: {error}")
        self._send(number, reply)

    def _send(self, number: int, body: Request | Reply) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        frame = msgspec.msgpack.encode(_Envelope(number, body))
        self._transport.write(len(frame).to_bytes(_HEADER_BYTES, "little") + frame)

    def _fail(self, problem: str) -> None:
        logger.error("the control channel is broken: %s", problem)
        if self._transport is not None:
            self._transport.abort()


def _to_error(failed: Failed) -> HastenError:
    kind = getattr(errors, failed.kind, StageError)
    with suppress(TypeError):  # a class whose constructor takes more than message and hint
        error: HastenError = kind(failed.message, hint=failed.hint)
        return error
    return UnavailableError(failed.message, hint=failed.hint)
