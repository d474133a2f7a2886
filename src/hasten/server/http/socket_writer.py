"""Write to the socket of a connection: from the event loop, or directly from the thread that has a response.

Waking the loop to write takes a thread switch, at a time when all cores may be busy. With many requests in flight, one
such switch serves all of them (docs/decisions/http.md).
"""

from __future__ import annotations

import fcntl
import os
import sys
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class SocketWriter:
    """Writes to one socket. A partially sent response is finished before anything else is written."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        is_plain = transport.get_extra_info("ssl_object") is None
        self._file: int | None = transport.get_extra_info("socket").fileno() if is_plain else None
        # Whether a thread has sent a response that the loop has not settled yet, and the bytes that did not fit.
        self._has_sent = False
        self._rest = b""

    @property
    def is_plain(self) -> bool:
        """Return whether threads may send; with TLS only the transport can encrypt what goes over the connection."""
        return self._file is not None

    def send(self, data: bytes, announce: Callable[[], None]) -> None:
        """Call `announce`, then send all, some or none of the data without blocking. Thread-safe."""
        with self._lock:
            announce()
            if self._file is None or self._transport.is_closing() or self._transport.get_write_buffer_size():
                return
            with suppress(OSError):  # the socket buffer is full, or the connection broken: the loop will notice
                self._rest = data[os.write(self._file, data) :]
                self._has_sent = True

    def write(self, data: bytes = b"") -> None:
        """Write the rest of a partially sent response, then the data. Call on the event loop."""
        with self._lock:
            data, self._rest = self._rest + data, b""
            if data:
                self._transport.write(data)

    @property
    def has_sent(self) -> bool:
        """Return whether a thread has sent a response that the loop has not settled."""
        with self._lock:
            return self._has_sent

    def settle(self) -> bool:
        """Return whether a thread has sent the response, and mark it as settled."""
        with self._lock:
            had_sent, self._has_sent = self._has_sent, False
            return had_sent

    def close(self) -> None:
        """Forget the file descriptor before the OS can reuse it."""
        with self._lock:
            self._file = None

    def unread_bytes(self) -> int:
        """Return how many bytes the client has not read: buffered here and in the kernel, which keeps megabytes."""
        size = bytearray(4)
        with suppress(OSError):
            fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, size)
        unread: int = self._transport.get_write_buffer_size()
        return unread + int.from_bytes(size, sys.byteorder)
