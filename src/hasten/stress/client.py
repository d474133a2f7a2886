"""HTTP/1.1 connections that cost the one who measures little: each asks, waits, and is used again."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from hasten.core.errors import PlanError, missing_package

# No answer at all: the connection was refused, broke, or was silent for too long.
BROKEN, SILENT = 0, -1


@dataclass(frozen=True, slots=True)
class Target:
    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None

    @classmethod
    def parse(cls, url: str, path: str) -> Target:
        """`path` is where to ask if the address names none."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise PlanError(f"'{url}' is no address", hint="write http://127.0.0.1:8000")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        return cls(parts.hostname, port or (443 if tls else 80), parts.path.rstrip("/") or path, tls)

    def request(self, body: bytes, headers: dict[str, str]) -> bytes:
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"host: {self.host}:{self.port}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Clients:
    """As many connections as requests are under way."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        try:
            import httptools
        except ImportError as error:
            raise missing_package("httptools", "load", "serve") from error
        self._parser = httptools.HttpResponseParser
        self._target = target
        self._timeout_s = timeout_s
        self._idle: list[_Client] = []
        self.opened = 0

    async def ask(self, request: bytes, on_answer: Callable[[int], None]) -> None:
        """The status goes to `on_answer`; one that broke off before it answered is told as `BROKEN`."""
        client = await self._free()
        if client is None:
            on_answer(BROKEN)
            return
        client.ask(request, on_answer, self._timeout_s)

    async def _free(self) -> _Client | None:
        while self._idle:
            client = self._idle.pop()
            if client.is_open:
                return client
        target = self._target
        loop = asyncio.get_running_loop()
        try:
            opening = loop.create_connection(
                lambda: _Client(self._parser, self._idle), target.host, target.port, ssl=target.tls
            )
            _, client = await asyncio.wait_for(opening, self._timeout_s)
        except (OSError, TimeoutError):
            return None
        self.opened += 1
        return client

    def close(self) -> None:
        for client in self._idle:
            client.close()


class _Client(asyncio.Protocol):
    def __init__(self, parser: Any, idle: list[_Client]) -> None:
        self._make_parser = parser
        self._parser = parser(self)
        self._idle = idle
        self._transport: Any = None
        self._on_answer: Callable[[int], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def ask(self, request: bytes, on_answer: Callable[[int], None], timeout_s: float) -> None:
        self._on_answer = on_answer
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._give_up)
        self._transport.write(request)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        status, is_kept = self._parser.get_status_code(), self._parser.should_keep_alive()
        self._parser = self._make_parser(self)
        self._answered(status)
        if is_kept:
            self._idle.append(self)
        else:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
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
