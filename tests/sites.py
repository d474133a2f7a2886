"""HTTP on a real socket, with an application that answers when it is told to, and a client that writes bytes."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hasten.server.connections import Connections, HttpLimits
from hasten.server.exchange import Exchange, Response
from hasten.server.watch import Seen


def until(condition: Callable[[], bool]) -> None:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < 20, "it did not come to that"
        time.sleep(0.002)


class Site:
    """A server in a thread; paths that begin with /held are answered when the test says so."""

    def __init__(self, **limits: Any) -> None:
        self.asked: list[Exchange] = []
        self.seen: list[Seen] = []
        self.connections = Connections(self._app, HttpLimits(**limits), self._refusal, self.seen.append)
        import uvloop

        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = self.call(self._loop.create_server(self.connections, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]

    def _app(self, exchange: Exchange) -> None:
        self.asked.append(exchange)
        if not exchange.path.startswith("/held"):
            exchange.reply(Response.text(f"{exchange.method} {exchange.path} {len(exchange.body)}"))

    def _refusal(self, method: str, path: str, headers: Mapping[str, str]) -> Response | None:
        is_known = "authorization" in headers or path != "/guarded"
        return None if is_known else Response.text(f"{method} without a key", 401)

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def drain(self) -> None:
        async def drain() -> None:
            self.connections.drain()

        self.call(drain())

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def close(self) -> None:
        async def close() -> None:
            self._server.close()
            for connection in list(self.connections.open):
                connection._transport.abort()

        self.call(close())
        until(lambda: not self.connections.open)
        assert (self.connections.held_bytes, self.connections.under_way) == (0, 0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def get(path: str, *headers: str, version: str = "1.1") -> bytes:
    return "\r\n".join([f"GET {path} HTTP/{version}", "host: x", *headers]).encode() + b"\r\n\r\n"


def post(path: str, body: bytes, *headers: str) -> bytes:
    return (
        "\r\n".join([f"POST {path} HTTP/1.1", f"content-length: {len(body)}", *headers]).encode() + b"\r\n\r\n" + body
    )


def all_of(raw: socket.socket) -> bytes:
    """Until the server closes."""
    received = b""
    while data := raw.recv(2**16):
        received += data
    return received


def statuses(received: bytes) -> list[int]:
    return [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]]


@contextmanager
def standstill(site: Site) -> Iterator[None]:
    """The loop does nothing meanwhile."""
    begun, go_on = threading.Event(), threading.Event()

    def stand() -> None:
        begun.set()
        go_on.wait(20)

    site._loop.call_soon_threadsafe(stand)
    assert begun.wait(20)
    try:
        yield
    finally:
        go_on.set()
