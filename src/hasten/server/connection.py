"""HTTP/1.1 over httptools, straight to the application: no coroutine, no task, no dictionary a request need not have.

Measured against uvicorn with the same application: docs/decisions/http.md.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from hasten.core.errors import InputError, TooLargeError
from hasten.server.exchange import REQUEST_ID, Exchange, Response, failure

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
_MOST_HEADER_BYTES = 2**16
_MOST_HEADERS = 200
# Requests that a client may send ahead of their answers on one connection.
_MOST_AHEAD = 64


@dataclass(frozen=True, slots=True)
class HttpLimits:
    body_bytes: int = 32 * 2**20
    # From the first byte of a request to its last, and between requests.
    read_s: float = 30.0
    idle_s: float = 75.0
    connections: int = 4096


class Connections:
    """All that are open, so that they can be counted, refused and closed."""

    def __init__(self, app: Callable[[Exchange], None], limits: HttpLimits) -> None:
        self.app = app
        self.limits = limits
        self.open: set[Connection] = set()
        self.is_draining = False

    def __call__(self) -> Connection:
        return Connection(self)

    def drain(self) -> None:
        """Answer what was asked, take nothing more, close what is idle."""
        self.is_draining = True
        for connection in list(self.open):
            connection.close_if_idle()

    def abort(self) -> None:
        """Whoever has not sent or read all by now."""
        for connection in list(self.open):
            connection.abort()


class Connection(asyncio.Protocol):
    def __init__(self, owner: Connections) -> None:
        import httptools

        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._timer: asyncio.TimerHandle | None = None
        # Answered in the order they came, one at a time.
        self._waiting: deque[tuple[Exchange, bool]] = deque()
        self._current: Exchange | None = None
        self._is_keeping = True
        self._is_refused = False
        self._is_reading = False
        self._reset()

    # asyncio

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        owner = self._owner
        owner.open.add(self)
        if len(owner.open) > owner.limits.connections or owner.is_draining:
            self._refuse(Response.json({"error": "too many connections"}, 503))
            return
        self._wait(owner.limits.idle_s)

    def connection_lost(self, error: Exception | None) -> None:
        self._owner.open.discard(self)
        self._stop_waiting()
        exchanges = [exchange for exchange, _ in self._waiting]
        for exchange in ([self._current] if self._current else []) + exchanges:
            exchange.leave()
        self._waiting.clear()
        self._current = None

    def data_received(self, data: bytes) -> None:
        import httptools

        if self._is_refused:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(failure(InputError("this server does not upgrade connections")))
        except (httptools.HttpParserError, UnicodeDecodeError):
            if not self._is_refused:
                self._refuse(failure(InputError("this is not HTTP")))

    def eof_received(self) -> bool:
        """A client that has sent all it will may still wait for its answers."""
        self._is_keeping = False
        return self._current is not None or bool(self._waiting)

    def pause_writing(self) -> None:
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._transport.resume_reading()

    # httptools

    def on_message_begin(self) -> None:
        self._is_reading = True
        self._reset()
        self._wait(self._owner.limits.read_s)

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        self._count(len(name) + len(value))
        if len(self._headers) > _MOST_HEADERS:
            self._refuse(Response.json({"error": "too many headers"}, 431))

    def on_headers_complete(self) -> None:
        declared = self._headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > self._owner.limits.body_bytes:
            self._too_large()
        elif self._headers.get("expect", "").lower() == "100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._owner.limits.body_bytes:
            self._too_large()
        else:
            self._body.append(data)

    def on_message_complete(self) -> None:
        if self._is_refused:
            return
        self._is_reading = False
        self._stop_waiting()
        path, _, query = self._url.partition(b"?")
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        exchange = Exchange(
            self._parser.get_method().decode(),
            path.decode("latin-1"),
            query.decode("latin-1"),
            self._headers,
            body,
            self._answered,
            self._owner.limits.body_bytes,
        )
        is_keeping = self._parser.should_keep_alive() and not self._owner.is_draining
        self._waiting.append((exchange, is_keeping))
        if len(self._waiting) > _MOST_AHEAD:
            self._transport.pause_reading()
        if self._current is None:
            self._next()

    # The way back

    def close_if_idle(self) -> None:
        is_idle = self._current is None and not self._waiting and not self._is_reading
        if is_idle and self._transport is not None:
            self._transport.close()
        self._is_keeping = False

    def abort(self) -> None:
        self._transport.abort()

    def _next(self) -> None:
        if not self._waiting:
            self._wait(self._owner.limits.idle_s)
            return
        exchange, is_keeping = self._waiting.popleft()
        if len(self._waiting) == _MOST_AHEAD:
            self._transport.resume_reading()
        self._current = exchange
        self._is_keeping = self._is_keeping and is_keeping
        self._owner.app(exchange)

    def _answered(self, response: Response) -> None:
        """From any thread."""
        with suppress(RuntimeError):  # the loop is closed, and with it the connection
            self._loop.call_soon_threadsafe(self._write, response)

    def _write(self, response: Response) -> None:
        exchange, self._current = self._current, None
        if exchange is None or self._transport.is_closing():
            return
        is_keeping = self._is_keeping and not self._owner.is_draining
        self._transport.write(_bytes_of(response, is_keeping, has_body=exchange.method != "HEAD", request=exchange.id))
        if is_keeping:
            self._next()
        else:
            self._transport.close()

    def _refuse(self, response: Response) -> None:
        """Answer what cannot be read to its end, and close."""
        if self._is_refused:
            return
        self._is_refused = True
        self._stop_waiting()
        self._transport.write(_bytes_of(response, is_keeping=False, has_body=True))
        self._transport.close()

    def _too_large(self) -> None:
        limit = self._owner.limits.body_bytes
        self._refuse(failure(TooLargeError(f"the body is larger than {limit} bytes")))

    # Time and size

    def _reset(self) -> None:
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._size = self._header_bytes = 0

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > _MOST_HEADER_BYTES:
            self._refuse(Response.json({"error": "the headers are too large"}, 431))

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._timer = self._loop.call_later(seconds, self._transport.close)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _bytes_of(response: Response, is_keeping: bool, *, has_body: bool, request: str = "") -> bytes:
    head = [
        b"HTTP/1.1 %d %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n"
        % (response.status, _REASONS.get(response.status, b""), response.content_type.encode(), len(response.body))
    ]
    head += [f"{name}: {value}\r\n".encode("latin-1") for name, value in response.headers.items()]
    if request:
        head.append(f"{REQUEST_ID}: {request}\r\n".encode())
    if not is_keeping:
        head.append(b"connection: close\r\n")
    head.append(b"\r\n")
    if has_body:
        head.append(response.body)
    return b"".join(head)
