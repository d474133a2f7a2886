"""Bound the memory that requests of all protocols take together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hasten.core.errors import OverloadedError

_RETRY_S = 1.0


class ByteBudget:
    """The total size of the request bodies and messages that a server holds, and its limit. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self.used = 0

    def add(self, size: int) -> None:
        """Count bytes, or raise an OverloadedError if there would be more than the limit."""
        with self._lock:
            if self.used + size > self._limit:
                raise OverloadedError("too many request bodies are being received", retry_after_s=_RETRY_S)
            self.used += size

    def remove(self, size: int) -> None:
        """Stop counting bytes."""
        with self._lock:
            self.used -= size

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Count bytes within a block."""
        self.add(size)
        try:
            yield
        finally:
            self.remove(size)
