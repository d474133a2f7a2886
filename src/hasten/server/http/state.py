"""State that all HTTP connections of a server share: limits, counters, and responses that await the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

from hasten.server.byte_budget import ByteBudget
from hasten.server.http.exchange import DEFAULT_BODY_BYTES, DisconnectedError, Exchange, Response
from hasten.server.http.known_heads import KnownHeads
from hasten.server.request_records import RequestListener

_MAX_IN_FLIGHT_FOR_DIRECT_SEND = 4
# Connections that are closed in one iteration of the event loop. Closing one takes some 30 µs: 500 clients that
# disconnect at once delayed all other requests by 17 ms.
_MAX_CLOSED_PER_ITERATION = 16


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Sizes and times that a server allows its HTTP clients."""

    body_bytes: int = DEFAULT_BODY_BYTES
    # From the first byte of a request to its last. A client that reads nothing for this long is disconnected too.
    read_s: float = 30.0
    # Between two requests of a connection.
    idle_s: float = 75.0
    connections: int = 4096
    # Total size of all HTTP bodies that are being received or processed, as received and decompressed, and of all gRPC
    # messages that are processed.
    buffered_bytes: int = 2**29


class ManagedConnection(Protocol):
    """The part of a connection that the shared state calls."""

    def settle(self, response: Response) -> None:
        """Finish the exchange that this response answers."""

    def close(self) -> None:
        """Close the connection once it has sent what is buffered."""

    def close_if_idle(self) -> None:
        """Close the connection unless it is serving, receiving or rejecting a request."""

    def abort(self) -> None:
        """Close the connection without sending what is buffered."""


@dataclass(slots=True, eq=False)
class HttpState:
    """Open connections with their limits and counters. Used on the event loop unless a method says otherwise."""

    app: Callable[[Exchange], None]
    limits: HttpLimits
    # Returns the response that rejects a request with a large body before the body is read, or None.
    reject_early: Callable[[str, str, Mapping[str, str]], Response | None] = lambda *_: None
    # Receives the records of requests that are rejected before they reach the application.
    on_record: RequestListener = lambda _: None
    heads: KnownHeads = field(default_factory=KnownHeads, init=False)
    open: set[ManagedConnection] = field(default_factory=set)
    # Responses from other threads, which may have sent them already. The event loop settles them before it handles
    # anything else, so that a client that has its response also finds it counted.
    answered: deque[tuple[ManagedConnection, Response]] = field(default_factory=deque)
    # Connections whose clients have disconnected.
    _leaving: deque[ManagedConnection] = field(default_factory=deque, init=False)
    # Used by gRPC as well.
    buffered_bytes: ByteBudget = field(init=False)
    _bytes_lock: Lock = field(default_factory=Lock, init=False)
    # Requests that the application is processing.
    in_flight: int = 0
    # While draining, every response is the last of its connection. Once drained, idle connections are closed as well.
    is_draining: bool = False
    is_drained: bool = False
    _is_settle_scheduled: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.buffered_bytes = ByteBudget(self.limits.buffered_bytes)

    @property
    def is_lightly_loaded(self) -> bool:
        """Return whether threads send responses themselves.

        With many requests in flight the event loop has to run anyway, once for all of them, and a thread that writes
        would release the interpreter lock and wait for it again, each time.
        """
        return self.in_flight <= _MAX_IN_FLIGHT_FOR_DIRECT_SEND

    def reserve(self, size: int, exchange: Exchange | None = None) -> None:
        """Count bytes of a body, or raise an error if the bodies of all requests are too large. Thread-safe.

        Those of an exchange are counted until it is released.
        """
        with self._bytes_lock:
            if exchange is not None and exchange.is_released:
                raise DisconnectedError("client disconnected")
            self.buffered_bytes.add(size)
            if exchange is not None:
                exchange.reserved_bytes += size

    def release(self, exchange: Exchange) -> None:
        """Give back the bytes of an exchange that is finished. Thread-safe."""
        with self._bytes_lock:
            self.buffered_bytes.remove(exchange.reserved_bytes)
            exchange.reserved_bytes, exchange.is_released = 0, True

    def schedule_settle(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the loop settle answered requests. Thread-safe; one scheduled call serves all responses before it."""
        if not self._is_settle_scheduled:
            self._is_settle_scheduled = True
            with suppress(RuntimeError):  # the loop is closed, and with it all connections
                loop.call_soon_threadsafe(self.settle)

    def settle(self) -> None:
        """Finish all exchanges that were answered."""
        # Reset first: a later response schedules another call.
        self._is_settle_scheduled = False
        for _ in range(len(self.answered)):
            connection, response = self.answered.popleft()
            connection.settle(response)

    def close_soon(self, connection: ManagedConnection) -> None:
        """Close a connection whose client has disconnected, in one of the next iterations of the event loop."""
        self._leaving.append(connection)
        if len(self._leaving) == 1:
            asyncio.get_running_loop().call_soon(self._close_leaving)

    def _close_leaving(self) -> None:
        for _ in range(min(len(self._leaving), _MAX_CLOSED_PER_ITERATION)):
            self._leaving.popleft().close()
        if self._leaving:
            asyncio.get_running_loop().call_soon(self._close_leaving)

    def drain(self) -> None:
        """Respond to requests in flight, accept no more, and close idle connections."""
        self.is_draining = self.is_drained = True
        for connection in list(self.open):
            connection.close_if_idle()

    def abort(self) -> None:
        """Close all connections at once, whatever they have left to send or read."""
        for connection in list(self.open):
            connection.abort()
