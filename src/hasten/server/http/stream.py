"""A response body that is produced while it is sent: written by any thread, read by the connection.

Writing never blocks: a client that reads more slowly than a model generates must not hold up the other requests in its
batch. Unread parts are buffered up to a limit; past it the response is aborted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

EVENTS = "text/event-stream"
# In addition to the socket buffers. A token as an event takes about 200 bytes: responses of thousands of tokens fit.
_MAX_BUFFERED_BYTES = 2**20


class Stream:
    """A bounded buffer between the thread that produces a response and the connection that sends it. Thread-safe."""

    def __init__(self, status: int, on_end: Callable[[], None], max_bytes: int = _MAX_BUFFERED_BYTES) -> None:
        # Clients receive the status at the beginning. Records take it at the end, when an error may have changed it.
        self.status = status
        self._on_end = on_end
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._parts: list[bytes] = []
        self._size = 0
        self._wake: Callable[[], None] | None = None
        # The reader was woken and has not read since.
        self._is_reader_woken = False
        self._is_ended = self._is_discarded = False
        # More was written than is buffered for a client that does not read.
        self.is_overfull = False

    # For the producer

    def write(self, part: bytes) -> None:
        """Append a part and wake the reader. Ignored once the stream has ended, overflowed or been discarded."""
        with self._lock:
            if not part or self._is_ended or self._is_discarded or self.is_overfull:
                return
            if self._size > self._max_bytes:
                self.is_overfull, self._is_reader_woken = True, False
                self._parts, self._size = [], 0
            else:
                self._parts.append(part)
                self._size += len(part)
        self._wake_reader()

    def end(self, status: int | None = None) -> None:
        """End the stream; pass a status if it failed after it had begun."""
        with self._lock:
            if self._is_ended:
                return
            self._is_ended = True
            self.status = status or self.status
        self._on_end()
        self._wake_reader()

    # For the reader

    def follow(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, from any thread, once after each read when there is something new."""
        with self._lock:
            self._wake = wake

    def read(self) -> tuple[bytes, bool]:
        """Return what was written since the last read, and whether the stream has ended."""
        with self._lock:
            parts, self._parts, self._size = self._parts, [], 0
            self._is_reader_woken = False
            return b"".join(parts), self._is_ended

    def discard(self) -> None:
        """Drop everything written so far and from now on: the client has disconnected."""
        with self._lock:
            self._is_discarded, self._wake = True, None
            self._parts, self._size = [], 0

    def _wake_reader(self) -> None:
        with self._lock:
            wake = None if self._is_reader_woken else self._wake
            self._is_reader_woken = wake is not None
        if wake is not None:
            wake()
