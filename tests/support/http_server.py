"""An HTTP server on a real socket whose responses the test controls, and a client that sends raw bytes."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

from hasten.server.http.acceptor import Acceptor, listen
from hasten.server.http.connection import Connection
from hasten.server.http.exchange import Exchange, Response
from hasten.server.http.state import HttpLimits, HttpState
from hasten.server.request_records import RequestRecord
from support.wait import wait_until


class ControlledServer:
    """A server in a thread. Requests to paths that begin with /held are answered by the test."""

    def __init__(self, **limits: Any) -> None:
        self.exchanges: list[Exchange] = []
        self.records: list[RequestRecord] = []
        self.state = HttpState(self._app, HttpLimits(**limits), self._reject_early, self.records.append)
        import uvloop

        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        sockets = listen("127.0.0.1", 0)
        self.port = sockets[0].getsockname()[1]
        self._acceptor = self.run(self._accept(sockets))

    async def _accept(self, sockets: list[socket.socket]) -> Acceptor:
        return Acceptor(sockets, partial(Connection, self.state))

    def _app(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        if not exchange.path.startswith("/held"):
            exchange.reply(Response.text(f"{exchange.method} {exchange.path} {len(exchange.body)}"))

    def _reject_early(self, method: str, path: str, headers: Mapping[str, str]) -> Response | None:
        is_authorized = "authorization" in headers or path != "/guarded"
        return None if is_authorized else Response.text(f"{method} without a key", 401)

    def run(self, coroutine: Any) -> Any:
        """Run a coroutine on the server's loop and return its result."""
        return self.submit(coroutine).result(20)

    def submit(self, coroutine: Any) -> Future[Any]:
        """Schedule a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def drain(self) -> None:
        """Drain the connections, on the loop."""

        async def drain() -> None:
            self.state.drain()

        self.run(drain())

    def connect(self) -> socket.socket:
        """Open a client connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def close(self) -> None:
        """Stop the server, and check that no connection is left in the counters."""

        async def close() -> None:
            self._acceptor.close()
            self.state.abort()

        self.run(close())
        wait_until(lambda: not self.state.open)
        assert (self.state.buffered_bytes.used, self.state.in_flight) == (0, 0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def get(path: str, *headers: str, version: str = "1.1") -> bytes:
    """Return a GET request."""
    return "\r\n".join([f"GET {path} HTTP/{version}", "host: x", *headers]).encode() + b"\r\n\r\n"


def post(path: str, body: bytes, *headers: str) -> bytes:
    """Return a POST request."""
    head = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def receive_all(client: socket.socket) -> bytes:
    """Receive until the server closes the connection."""
    received = b""
    while data := client.recv(2**16):
        received += data
    return received


def statuses(received: bytes) -> list[int]:
    """Return the status of each response."""
    return [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]]


@contextmanager
def blocked_loop(server: ControlledServer) -> Iterator[None]:
    """Block the server's event loop inside the context."""
    is_blocked, can_resume = threading.Event(), threading.Event()

    def block() -> None:
        is_blocked.set()
        can_resume.wait(20)

    server._loop.call_soon_threadsafe(block)
    assert is_blocked.wait(20)
    try:
        yield
    finally:
        can_resume.set()
