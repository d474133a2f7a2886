"""Keep the resident memory of this process below a limit that all its CPU sessions share."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol
from weakref import WeakSet

from hasten.core.errors import OverloadedError, TooLargeError, UnsupportedError
from hasten.core.system.hardware import resident_memory_bytes

_RETRY_S = 1.0
# A batch waits for others to end, and looks again after this time: other parts of the process free memory, too. If no
# batch runs, it is rejected after the longer time.
_POLL_S, _PATIENCE_S = 0.02, 1.0


class Releasable(Protocol):
    """A session that retains memory between batches."""

    def release_if_idle(self) -> bool:
        """Return memory to the system unless a batch is running; return whether there was any to return."""


class MemoryLimit:
    """The limit, and the memory that running batches may still allocate. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        if resident_memory_bytes() is None:
            raise UnsupportedError("a memory limit needs Linux: other systems do not report resident memory")
        self.limit_bytes = limit_bytes
        self._change = threading.Condition()
        self._reserved_bytes = self._running = 0
        self._sessions: WeakSet[Releasable] = WeakSet()

    def add(self, session: Releasable) -> None:
        """Let other sessions ask this one to release memory."""
        with self._change:
            self._sessions.add(session)

    def left_bytes(self) -> int:
        """Return the memory that a further batch may allocate."""
        return self.limit_bytes - (resident_memory_bytes() or 0) - self._reserved_bytes

    def fits(self, size: int) -> bool:
        """Return whether a batch that allocates this many bytes may run now, after idle sessions released memory."""
        if size <= self.left_bytes():
            return True
        with self._change:
            sessions = list(self._sessions)
        released = [session.release_if_idle() for session in sessions]
        if any(released):
            trim_heap()
        return size <= self.left_bytes()

    def check(self, size: int, baseline_bytes: int, subject: str) -> None:
        """Raise an error if a batch will never fit beside the memory that the process takes without batches."""
        left = max(0, self.limit_bytes - baseline_bytes)
        if size > left:
            raise TooLargeError(
                f"{subject} needs about {megabytes(size)} of memory; the limit of {megabytes(self.limit_bytes)}"
                f" (--max-memory) leaves {megabytes(left)}"
            )

    @contextmanager
    def reserve(self, size: int, subject: str) -> Iterator[None]:
        """Hold memory for a batch; if there is too little, wait for other batches to end."""
        self._await(size, subject)
        try:
            yield
        finally:
            with self._change:
                self._reserved_bytes -= size
                self._running -= 1
                self._change.notify_all()

    def _await(self, size: int, subject: str) -> None:
        until = time.monotonic() + _PATIENCE_S
        while True:
            is_fitting = self.fits(size)
            with self._change:
                if is_fitting and size <= self.left_bytes():
                    self._reserved_bytes += size
                    self._running += 1
                    return
                if self._running:
                    until = time.monotonic() + _PATIENCE_S
                elif time.monotonic() > until:
                    message = f"{subject} needs about {megabytes(size)} of memory, which other requests occupy"
                    raise OverloadedError(message, retry_after_s=_RETRY_S)
                self._change.wait(_POLL_S)


@cache
def memory_limit(limit_bytes: int) -> MemoryLimit:
    """Return the limit of this process: all sessions with the same one share it."""
    return MemoryLimit(limit_bytes)


def megabytes(size: int) -> str:
    """Return a size as text."""
    return f"{size / 2**20:.0f} MB"


def trim_heap() -> None:
    """Return freed memory to the system where the C library keeps it, as glibc does."""
    if sys.platform == "linux" and (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> ctypes._NamedFuncPointer | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None
