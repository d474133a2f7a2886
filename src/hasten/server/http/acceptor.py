"""Listen on TCP sockets and accept waiting connections in batches.

libuv accepts one connection per iteration of the event loop: of 128 clients that connect at once to a busy loop, the
last waits for 128 iterations.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Sequence

from hasten.core.errors import UnavailableError

logger = logging.getLogger("hasten")

# Connections accepted in one iteration of the event loop.
_MAX_ACCEPTED_PER_ITERATION = 64
# Connections that the kernel keeps until they are accepted.
_BACKLOG = 2048
# Pause after an error that only time repairs, such as too many open files.
_ERROR_PAUSE_S = 1.0
# How long a process leaves waiting connections to others that have fewer, and how often in a row: then it accepts a
# batch, since one of the others may be stalled.
_TURN_PAUSE_S = 0.001
_MAX_TURN_PAUSES = 20


def listen(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen on every address of a host; port 0 picks a free port, the same for all of them."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((entry[0], entry[4]) for entry in found):
            chosen = port or (sockets[0].getsockname()[1] if sockets else 0)
            listener = socket.socket(family, socket.SOCK_STREAM)
            sockets.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.setblocking(False)
            listener.bind((address[0], chosen, *address[2:]))
            listener.listen(_BACKLOG)
    except OSError as error:
        for listener in sockets:
            listener.close()
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        hint = "choose another --port" if is_port else "choose a --host of this machine, or 0.0.0.0 for all"
        problem = f"cannot listen on {bracketed(host)}:{port}"
        raise UnavailableError(f"{problem}: {error.strerror or error}", hint=hint) from error
    return sockets


def reserve(host: str, port: int) -> socket.socket:
    """Return a socket that keeps a port for several processes, which bind it with SO_REUSEPORT; 0 picks a free one.

    It does not listen, so that the kernel gives it no connections.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # Two servers of one user could share the port by mistake: it must be free of others that listen.
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
        reserved = socket.socket(family, kind)
        try:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind(address)
        except OSError:
            reserved.close()
            raise
    except OSError as error:
        hint = "choose another port with --grpc-port"
        raise UnavailableError(f"cannot listen on {bracketed(host)}:{port}", hint=hint) from error
    return reserved


def bracketed(host: str) -> str:
    """Return a host as URLs and addresses with a port write it."""
    return f"[{host}]" if ":" in host else host


class Acceptor:
    """Accepts the connections of listening sockets, which it owns. Used on the event loop."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        make_protocol: Callable[[], asyncio.BaseProtocol],
        *,
        tls: ssl.SSLContext | None = None,
        handshake_s: float | None = None,
        is_our_turn: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """Start to accept.

        While `is_our_turn` returns False, connections are left to other processes for a moment. Its argument is the
        number of accepted connections whose protocols do not know them yet.
        """
        self._loop = asyncio.get_running_loop()
        self._sockets = list(sockets)
        self._make_protocol = make_protocol
        self._tls = tls
        self._handshake_s = handshake_s if tls is not None else None
        self._is_our_turn = is_our_turn
        self._pauses = 0
        # Accepted connections whose protocols do not know them yet.
        self._opening: set[socket.socket] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        for listener in self._sockets:
            self._loop.add_reader(listener, self._accept, listener)

    def close(self) -> None:
        """Accept the connections that wait, so that none of them is reset, and close the sockets."""
        self._is_our_turn = lambda _: True
        for listener in self._sockets:
            for _ in range(_BACKLOG // _MAX_ACCEPTED_PER_ITERATION):  # others may come as fast
                if not self._accept(listener):
                    break
            self._loop.remove_reader(listener)
            listener.close()
        self._sockets.clear()

    def _accept(self, listener: socket.socket) -> bool:
        """Accept a batch of connections; return whether more may wait."""
        for _ in range(_MAX_ACCEPTED_PER_ITERATION):
            if not self._is_our_turn(len(self._opening)) and self._pauses < _MAX_TURN_PAUSES:
                self._pauses += 1
                self._pause(listener, _TURN_PAUSE_S)
                return False
            try:
                client, _ = listener.accept()
            except (BlockingIOError, InterruptedError):
                self._pauses = 0
                return False
            except ConnectionAbortedError:  # the client has left the queue
                continue
            except OSError as error:
                if listener in self._sockets:
                    logger.error("cannot accept connections: %s", error.strerror or error)
                    self._pause(listener, _ERROR_PAUSE_S)
                return False
            client.setblocking(False)
            self._opening.add(client)
            task = self._loop.create_task(self._open(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._pauses = 0
        return True

    async def _open(self, client: socket.socket) -> None:
        def make_protocol() -> asyncio.BaseProtocol:
            if self._tls is None:  # its connection_made is called next
                self._loop.call_soon(self._opening.discard, client)
            return self._make_protocol()

        try:
            await self._loop.connect_accepted_socket(
                make_protocol, client, ssl=self._tls, ssl_handshake_timeout=self._handshake_s
            )
        except OSError:
            client.close()  # a scanner, or a client that refuses the certificate
        finally:
            self._opening.discard(client)

    def _pause(self, listener: socket.socket, seconds: float) -> None:
        self._loop.remove_reader(listener)
        self._loop.call_later(seconds, self._resume, listener)

    def _resume(self, listener: socket.socket) -> None:
        if listener in self._sockets:
            self._loop.add_reader(listener, self._accept, listener)
