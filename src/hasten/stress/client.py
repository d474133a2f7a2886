"""HTTP/1.1 connections that cost the one who measures little: each asks, waits, and is used again."""

from __future__ import annotations

import asyncio
import http.client
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from hasten.core.errors import PlanError, UnavailableError, missing_package

# No answer at all: the connection was refused, broke, or was silent for too long.
BROKEN, SILENT = 0, -1
_OVERLOADED = 429
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Target:
    """Where to ask, and with which headers beside those that every request has."""

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, url: str, path: str, headers: Mapping[str, str]) -> Target:
        """`path` is where to ask if the address names none."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise PlanError(f"'{url}' is no address", hint="write http://127.0.0.1:8000")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        return cls(parts.hostname, port or (443 if tls else 80), parts.path.rstrip("/") or path, tls, headers)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def request(self, body: bytes) -> bytes:
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"host: {self}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    def probe(self, body: bytes, timeout_s: float) -> None:
        """One request, to see whether anyone is there who answers it."""
        if self.tls is None:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        else:
            connection = http.client.HTTPSConnection(self.host, self.port, timeout=timeout_s, context=self.tls)
        try:
            connection.request("POST", self.path, body, {"content-type": "application/json", **self.headers})
            answer = connection.getresponse()
            status, content = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            shown = why if why.isprintable() else "it does not speak HTTP/1.1"
            raise UnavailableError(f"{self} gives no answer: {shown}", hint="is the server running there?") from error
        finally:
            connection.close()
        if status not in (http.client.OK, _OVERLOADED):
            raise UnavailableError(f"{self} answers {status} to POST {self.path}: {_reason(content)}")


class Clients:
    """As many connections as requests are under way."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        try:
            import httptools
        except ImportError as error:
            raise missing_package("httptools", "load", "serve") from error
        self._http = httptools
        self._target = target
        self._timeout_s = timeout_s
        self._idle: list[_Client] = []
        self._open: set[_Client] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self.opened = 0

    def ask(self, request: bytes, on_answer: Callable[[int], None]) -> None:
        """The status goes to `on_answer`, or `BROKEN`, or `SILENT`."""
        while self._idle:
            client = self._idle.pop()
            if client.is_open:
                client.ask(request, on_answer, self._timeout_s)
                return
        task = asyncio.ensure_future(self._open_and_ask(request, on_answer))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def close(self) -> None:
        for client in self._open:
            client.close()
        # With TLS a connection takes a few turns of the loop to end.
        while self._open:
            await asyncio.sleep(0)

    async def _open_and_ask(self, request: bytes, on_answer: Callable[[int], None]) -> None:
        target, loop = self._target, asyncio.get_running_loop()
        begin = loop.time()
        try:
            opening = loop.create_connection(
                lambda: _Client(self._http, self._idle, self._open), target.host, target.port, ssl=target.tls
            )
            _, client = await asyncio.wait_for(opening, self._timeout_s)
        except TimeoutError:
            on_answer(SILENT)
        except OSError:
            on_answer(BROKEN)
        else:
            self.opened += 1
            client.ask(request, on_answer, self._timeout_s - (loop.time() - begin))


class _Client(asyncio.Protocol):
    def __init__(self, http: Any, idle: list[_Client], open_: set[_Client]) -> None:
        self._http = http
        self._parser = http.HttpResponseParser(self)
        self._idle, self._open = idle, open_
        self._transport: Any = None
        self._on_answer: Callable[[int], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def ask(self, request: bytes, on_answer: Callable[[int], None], timeout_s: float) -> None:
        self._on_answer = on_answer
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._give_up)
        self._transport.write(request)

    def close(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._open.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except self._http.HttpParserError:
            self._transport.abort()

    def on_message_complete(self) -> None:
        status, is_kept = self._parser.get_status_code(), self._parser.should_keep_alive()
        if is_kept:
            self._idle.append(self)
        else:
            self._transport.close()
        # Last, since whoever hears of the answer may ask again at once.
        self._answered(status)

    def connection_lost(self, error: Exception | None) -> None:
        self._open.discard(self)
        self._answered(BROKEN)

    def _give_up(self) -> None:
        self._answered(SILENT)
        self._transport.abort()

    def _answered(self, status: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        on_answer, self._on_answer = self._on_answer, None
        if on_answer is not None:
            on_answer(status)


def _reason(content: bytes) -> str:
    """What a server says of an error: its own words where it has any, else the beginning of the page."""
    try:
        found = msgspec.json.decode(content, type=dict[str, Any]).get("error", "")
    except msgspec.MsgspecError:
        found = ""
    text = found if isinstance(found, str) and found else content.decode(errors="replace")
    return " ".join(text.split())[:_SHOWN_CHARACTERS] or "nothing more is said"
