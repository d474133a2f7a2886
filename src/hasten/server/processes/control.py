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
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hasten.core import errors
from hasten.core.errors import HastenError, StageError, UnavailableError
from hasten.server.settings import Settings

logger = logging.getLogger("hasten")

_HEADER_BYTES = 4
# Merged metrics are the largest message.
_MAX_MESSAGE_BYTES = 2**26


class Message(msgspec.Struct, tag=True, frozen=True):
    """The base of all requests and replies."""


class ModelVersion(msgspec.Struct, frozen=True):
    """One generation of a model: a hot reload serves the next one beside it until it is drained."""

    name: str
    generation: int
    path: str
    # The digest of its manifest, which must be unchanged when a process that was started again opens it.
    digest: str


class Configure(Message, frozen=True):
    """Start a child process. The reply is Done for an engine, which then loads models, and for a worker, which listens.

    File descriptors are inherited ones.
    """

    settings: bytes
    # Among the children of its kind.
    index: int
    workers: int
    engines: int
    # Of the Unix sockets of the engines; private to this server.
    directory: str
    # For workers: the listening sockets, the shared counters, the address of gRPC, and the paths of models by name, of
    # which those in `expected` will be loaded.
    listeners: tuple[int, ...] = ()
    counters: int = -1
    grpc_address: str = ""
    known: dict[str, str] = {}
    expected: tuple[str, ...] = ()


class LoadModel(Message, frozen=True):
    """Have an engine load a model. Replied by Done."""

    version: ModelVersion


class UnloadModel(Message, frozen=True):
    """Have an engine unload a model that no worker uses. Replied by Done."""

    version: ModelVersion


class PrepareModel(Message, frozen=True):
    """Have a worker open a model without serving it. `column` is that of its open requests. Replied by ModelLoaded."""

    version: ModelVersion
    column: int


class SwapModel(Message, frozen=True):
    """Have a worker serve a prepared model instead of the one of that name. Replied by Done."""

    version: ModelVersion


class RetireModel(Message, frozen=True):
    """Have a worker serve a model no longer, and drain it. Replied by Done; unknown models are ignored."""

    version: ModelVersion
    drain_s: float


class ReadStatus(Message, frozen=True):
    """Ask a child for its Status."""


class ReadMetrics(Message, frozen=True):
    """Ask a child for its metrics, or the parent for those of all processes. Replied by MetricsText."""


class SetHealth(Message, frozen=True):
    """Tell a worker what to report. Replied by Done."""

    is_alive: bool
    is_ready: bool


class ReloadCredentials(Message, frozen=True):
    """Have a worker read API keys and certificates again. Replied by Done."""


class ChangeModel(Message, frozen=True):
    """Ask the parent to load, refresh (if it has changed) or unload a model for a client. Replied by Done."""

    action: str
    name: str


class Drain(Message, frozen=True):
    """Have a child accept nothing more and answer what it has. Replied by Done."""

    timeout_s: float


class Done(Message, frozen=True):
    """The request succeeded."""


class ModelLoaded(Message, frozen=True):
    """The model was opened, and runs this variant."""

    variant: str


class Status(Message, frozen=True):
    """The state of a child: why only a new process would serve again, and whether it can serve now."""

    fault: str | None
    can_serve: bool


class MetricsText(Message, frozen=True):
    """Metrics in Prometheus text format."""

    text: bytes


class Failed(Message, frozen=True):
    """The request failed with an error of this class."""

    kind: str
    message: str
    hint: str | None = None


Request = (
    Configure
    | LoadModel
    | UnloadModel
    | PrepareModel
    | SwapModel
    | RetireModel
    | ReadStatus
    | ReadMetrics
    | SetHealth
    | ReloadCredentials
    | ChangeModel
    | Drain
)
Reply = Done | ModelLoaded | Status | MetricsText | Failed
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


def encode_settings(settings: Settings) -> bytes:
    """Encode settings for another process."""
    return msgspec.json.encode(settings, enc_hook=_encode_path)


def decode_settings(data: bytes) -> Settings:
    """Decode settings from another process."""
    return msgspec.json.decode(data, type=Settings, dec_hook=_decode_path)


def _encode_path(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def _decode_path(kind: type, value: Any) -> object:
    if issubclass(kind, Path):
        return Path(value)
    raise NotImplementedError(f"cannot decode {kind.__name__}")


def _to_error(failed: Failed) -> HastenError:
    kind = getattr(errors, failed.kind, StageError)
    with suppress(TypeError):  # a class whose constructor takes more than message and hint
        error: HastenError = kind(failed.message, hint=failed.hint)
        return error
    return UnavailableError(failed.message, hint=failed.hint)
