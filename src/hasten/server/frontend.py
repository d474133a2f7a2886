"""The sockets of a process that answers clients: HTTP, gRPC, and the end of both."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from hasten.core.errors import missing_package
from hasten.server.app import App
from hasten.server.http.acceptor import Acceptor, bracketed
from hasten.server.http.connection import Connection
from hasten.server.http.state import HttpLimits, HttpState
from hasten.server.settings import Settings
from hasten.server.tls import Tls

if TYPE_CHECKING:
    from hasten.server.grpc.server import GrpcServer

logger = logging.getLogger("hasten")

# Busy keep-alive clients send their next request within this time and learn from its answer that it was the last.
_LINGER_S = 0.5
# Time to send the last gRPC answers.
_FLUSH_S = 1.0


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses that the server listens on."""

    http: str
    grpc: str | None

    @classmethod
    def of(cls, sockets: Sequence[socket.socket], grpc_port: int | None, *, has_tls: bool) -> Addresses:
        """Return the addresses of listening sockets and of gRPC on the same host."""
        host, port = sockets[0].getsockname()[:2]
        grpc = None if grpc_port is None else f"{bracketed(host)}:{grpc_port}"
        return cls(f"{'https' if has_tls else 'http'}://{bracketed(host)}:{port}", grpc)


class Frontend:
    """Answers the clients of an application. Used on the event loop."""

    def __init__(self, app: App, limits: HttpLimits, tls: Tls | None) -> None:
        self._app = app
        self._tls = tls
        self._connections = HttpState(app, limits, app.refusal, app.watch)
        self._acceptor: Acceptor | None = None
        self._grpc: GrpcServer | None = None

    def accept(self, sockets: Sequence[socket.socket], is_our_turn: Callable[[int], bool] = lambda _: True) -> None:
        """Accept HTTP connections."""
        self._acceptor = Acceptor(
            sockets,
            partial(Connection, self._connections),
            tls=None if self._tls is None else self._tls.context,
            handshake_s=self._connections.limits.read_s,
            is_our_turn=is_our_turn,
        )

    @property
    def open_connections(self) -> int:
        """Return the number of HTTP connections."""
        return len(self._connections.open)

    async def accept_grpc(self, address: str, *, shares_port: bool = False) -> int:
        """Accept gRPC connections and return the port; its health service does not report ready yet."""
        # The gRPC core writes lines to stderr that are not in our log format.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        from hasten.server.grpc.server import GrpcServer

        limits, budget = self._connections.limits, self._connections.buffered_bytes
        self._grpc = GrpcServer(self._app, address, limits, budget, self._tls, shares_port=shares_port)
        await self._grpc.start()
        port: int = self._grpc.port
        return port

    def report_ready(self, *, is_ready: bool) -> None:
        """Set what gRPC's health service reports."""
        if self._grpc is not None:
            self._grpc.health.report(is_ready=is_ready)

    async def drain(self, timeout_s: float) -> bool:
        """Close the sockets, answer the requests of open connections with `connection: close`, and close the models.

        Return False if work is left that no client waits for.
        """
        begin = time.monotonic()
        until = begin + timeout_s
        connections, loop = self._connections, asyncio.get_running_loop()
        self._app.is_ready = False
        if self._acceptor is not None:
            self._acceptor.close()
        stopping = None if self._grpc is None else asyncio.ensure_future(self._grpc.stop(timeout_s))
        connections.is_draining = True
        while connections.open and time.monotonic() < min(until, begin + _LINGER_S):
            await asyncio.sleep(0.005)
        connections.drain()
        while connections.open:
            if time.monotonic() > until:
                logger.warning("not all requests were answered, or their answers read, within %g s", timeout_s)
                connections.abort()
                break
            await asyncio.sleep(0.005)
        left = max(0.0, until - time.monotonic())
        is_done = await loop.run_in_executor(None, self._app.close, left)
        if self._grpc is not None and stopping is not None:
            # All requests are answered: calls that are still open watch health or hold an idle stream.
            await self._grpc.stop(_FLUSH_S)
            await stopping
        return is_done

    async def close(self) -> None:
        """Stop gRPC at once."""
        if self._grpc is not None:
            await self._grpc.stop(0)


def require_packages() -> None:
    """Raise unless the packages that serve HTTP are installed."""
    for package in ("httptools", "orjson", "uvloop"):
        if find_spec(package) is None:
            raise missing_package(package, "serving", "serve")


def allow_connections() -> None:
    """Raise the limit of open files, which shells set low: each connection is one."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def warn_if_open(settings: Settings, *, has_keys: bool) -> None:
    """Log a warning if every client that reaches the server may use it."""
    if not has_keys and not _is_local(settings.host):
        logger.warning("%s is open to everyone who can reach it: no API keys are set (--api-key-file)", settings.host)


def choose_grpc_port(settings: Settings, http_port: int) -> int | None:
    """Return the port that gRPC should listen on, 0 for any, or None if gRPC is disabled."""
    if not settings.grpc:
        return None
    if find_spec("grpc") is None and settings.grpc_port is None:
        logger.warning("gRPC is disabled: the package 'grpcio' is not installed (pip install 'hasten[serve]')")
        return None
    if settings.grpc_port is not None:
        return settings.grpc_port
    return http_port + 1 if settings.port else 0


def _is_local(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
