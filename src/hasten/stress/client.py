"""A lightweight HTTP/1.1 client with keep-alive connections, for measuring servers."""

from __future__ import annotations

import asyncio
import http.client
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import msgspec

from hasten.core.errors import PlanError, UnavailableError, missing_package

# Statuses of requests without an answer: the connection was refused or broke, or it timed out.
BROKEN, SILENT = 0, -1
_MAX_REASON_CHARS = 200


@dataclass(frozen=True, slots=True)
class StressTarget:
    """The address of a server, and the headers to add to each request."""

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, url: str, path: str, headers: Mapping[str, str]) -> StressTarget:
        """Parse an address; `path` is the default path."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise PlanError(f"'{url}' is not an HTTP address", hint="write http://127.0.0.1:8000")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        return cls(parts.hostname, port or (443 if tls else 80), parts.path.rstrip("/") or path, tls, headers)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def request(self, body: bytes) -> bytes:
        """Return the bytes of a POST request."""
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"host: {self}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    def probe(self, body: bytes, timeout_s: float) -> None:
        """Send one request, and raise an error if the server does not answer it."""
        kind = (
            http.client.HTTPConnection if self.tls is None else partial(http.client.HTTPSConnection, context=self.tls)
        )
        connection = kind(self.host, self.port, timeout=timeout_s)
        try:
            connection.request("POST", self.path, body, {"content-type": "application/json", **self.headers})
            answer = connection.getresponse()
            status, content = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            shown = reason if reason.isprintable() else "it does not speak HTTP/1.1"
            raise UnavailableError(f"{self} does not answer: {shown}", hint="check that the server runs") from error
        finally:
            connection.close()
        if status not in (http.client.OK, http.client.TOO_MANY_REQUESTS):
            raise UnavailableError(f"{self} answered POST {self.path} with {status}: {_reason(content)}")


class ClientPool:
    """A pool of connections that grows with the number of requests in flight."""

    def __init__(self, target: StressTarget, timeout_s: float) -> None:
        try:
            import httptools
        except ImportError as error:
            raise missing_package("httptools", "load", "serve") from error
        self.http = httptools
        self._target = target
        self._timeout_s = timeout_s
        self.idle: list[_Client] = []
        self.open: set[_Client] = set()
        self._opening: set[asyncio.Task[None]] = set()
        # Connections opened so far.
        self.opened = 0

    def ask(self, request: bytes, on_answer: Callable[[int], None]) -> None:
        """Send a request; `on_answer` receives the status, `BROKEN` or `SILENT`."""
        while self.idle:
            client = self.idle.pop()
            if not client.transport.is_closing():
                client.ask(request, on_answer, self._timeout_s)
                return
        task = asyncio.ensure_future(self._open_and_ask(request, on_answer))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def close(self) -> None:
        """Close all connections."""
        for client in self.open:
            client.transport.abort()
        # A TLS connection takes a few iterations of the event loop to close.
        while self.open:
            await asyncio.sleep(0)

    async def _open_and_ask(self, request: bytes, on_answer: Callable[[int], None]) -> None:
        target, loop = self._target, asyncio.get_running_loop()
        begin = loop.time()
        try:
            opening = loop.create_connection(partial(_Client, self), target.host, target.port, ssl=target.tls)
            _, client = await asyncio.wait_for(opening, self._timeout_s)
        except TimeoutError:
            on_answer(SILENT)
        except OSError:
            on_answer(BROKEN)
        else:
            self.opened += 1
            client.ask(request, on_answer, self._timeout_s - (loop.time() - begin))


class _Client(asyncio.Protocol):
    def __init__(self, pool: ClientPool) -> None:
        self._pool = pool
        self._parser = pool.http.HttpResponseParser(self)
        self.transport: Any = None
        self._on_answer: Callable[[int], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def ask(self, request: bytes, on_answer: Callable[[int], None], timeout_s: float) -> None:
        self._on_answer = on_answer
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._on_timeout)
        self.transport.write(request)

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._pool.open.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except self._pool.http.HttpParserError:
            self.transport.abort()

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._parser.should_keep_alive():
            self._pool.idle.append(self)
        else:
            self.transport.close()
        # Last, since the callback may send the next request at once.
        self._finish(status)

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.open.discard(self)
        self._finish(BROKEN)

    def _on_timeout(self) -> None:
        self._finish(SILENT)
        self.transport.abort()

    def _finish(self, status: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        on_answer, self._on_answer = self._on_answer, None
        if on_answer is not None:
            on_answer(status)


def _reason(content: bytes) -> str:
    """Return the error message of an answer, or else the beginning of its body."""
    try:
        message = msgspec.json.decode(content, type=dict[str, Any]).get("error", "")
    except msgspec.MsgspecError:
        message = ""
    text = message if isinstance(message, str) and message else content.decode(errors="replace")
    return " ".join(text.split())[:_MAX_REASON_CHARS] or "no message"
