"""A reply that is made while it is sent: what is written from any thread, and taken by whoever sends it.

Nobody who writes ever waits: a client that reads more slowly than a model writes must not hold up the others that are
in a batch with it. What it has not taken is kept for it, so much and no more; then its reply is broken off.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

EVENTS = "text/event-stream"
# Beside what sockets keep. A token written as an event takes some 200 bytes: answers of thousands of them fit.
_MOST_BYTES = 2**20


class Stream:
    def __init__(self, status: int, on_end: Callable[[], None], most_bytes: int = _MOST_BYTES) -> None:
        # What the client is told at the beginning; those who watch are told at the end, when it may be another.
        self.status = status
        self._on_end = on_end
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._parts: list[bytes] = []
        self._size = 0
        self._wake: Callable[[], None] | None = None
        # Whoever sends was woken, and has not looked since.
        self._is_told = False
        self._is_over = self._is_cut = False
        # More was written than is kept for a client that does not read.
        self.is_overfull = False

    # Whoever writes

    def write(self, part: bytes) -> None:
        with self._lock:
            if not part or self._is_over or self._is_cut or self.is_overfull:
                return
            if self._size > self._most_bytes:
                self.is_overfull, self._is_told = True, False
                self._parts, self._size = [], 0
            else:
                self._parts.append(part)
                self._size += len(part)
        self._tell()

    def end(self, status: int | None = None) -> None:
        """There is no more of it; with a status, where it did not end well."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            self.status = status or self.status
        self._on_end()
        self._tell()

    # Whoever sends

    def follow(self, wake: Callable[[], None]) -> None:
        """Have it called, from any thread, when there is something to take that was not there when it was looked."""
        with self._lock:
            self._wake = wake

    def take(self) -> tuple[bytes, bool]:
        """What was written since, and whether it is over."""
        with self._lock:
            parts, self._parts, self._size = self._parts, [], 0
            self._is_told = False
            return b"".join(parts), self._is_over

    def cut(self) -> None:
        """The client has gone: nothing is kept any more."""
        with self._lock:
            self._is_cut, self._wake = True, None
            self._parts, self._size = [], 0

    def _tell(self) -> None:
        with self._lock:
            wake = None if self._is_told else self._wake
            self._is_told = wake is not None
        if wake is not None:
            wake()
