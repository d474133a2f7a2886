"""The way out of a connection: written to by the event loop, or at once by the thread that has an answer.

To wake the loop so that it writes takes a change of threads, at a time when all cores may be busy; where many wait, one
such change is for all of them (docs/decisions/http.md).
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


class Outlet:
    """Whoever writes, what was begun is ended before anything else."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        is_plain = transport.get_extra_info("ssl_object") is None
        self._file: int | None = transport.get_extra_info("socket").fileno() if is_plain else None
        # Whether a thread has sent an answer that the loop has not settled yet, and what did not fit of it.
        self._has_sent = False
        self._rest = b""

    @property
    def is_plain(self) -> bool:
        """Whether threads can send at all; of a TLS connection only the transport knows what goes through it."""
        return self._file is not None

    def send(self, data: bytes, announce: Callable[[], None]) -> None:
        """From any thread, without waiting: all, some or nothing of it, and not before it is announced."""
        with self._lock:
            announce()
            if self._file is None or self._transport.is_closing() or self._transport.get_write_buffer_size():
                return
            with suppress(OSError):  # it is full, or broken: the loop will see
                self._rest = data[os.write(self._file, data) :]
                self._has_sent = True

    def write(self, data: bytes = b"") -> None:
        """From the loop: what was begun, and this."""
        with self._lock:
            data, self._rest = self._rest + data, b""
            if data:
                self._transport.write(data)

    @property
    def has_sent(self) -> bool:
        with self._lock:
            return self._has_sent

    def settle(self) -> bool:
        """Whether a thread has sent the answer that the loop knows of by now."""
        with self._lock:
            had_sent, self._has_sent = self._has_sent, False
            return had_sent

    def close(self) -> None:
        """Before its number is that of another connection."""
        with self._lock:
            self._file = None

    def unread(self) -> int:
        """Bytes that the client has not taken: here, and in the kernel, which keeps a few million."""
        size = bytearray(4)
        with suppress(OSError):
            fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, size)
        unread: int = self._transport.get_write_buffer_size()
        return unread + int.from_bytes(size, sys.byteorder)
