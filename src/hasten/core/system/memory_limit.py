"""Keep the resident memory of this process below a limit. All sessions on CPUs share what is left."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol
from weakref import WeakSet

from hasten.core.errors import OverloadedError, TooLargeError, UnsupportedError
from hasten.core.system.hardware import resident_memory_bytes

_RETRY_S = 1.0
# A batch that waits for others looks again after this time: other parts of the process free memory, too.
_POLL_S = 0.02
# How long a batch waits while no other runs, and at most: a longer wait would look like a stalled session.
_IDLE_WAIT_S, _MAX_WAIT_S = 1.0, 10.0


class Releasable(Protocol):
    """A session that retains memory between batches."""

    def release_if_idle(self, *, everything: bool = False) -> bool:
        """Return memory to the system unless a batch is running; return whether there was any to return."""


class GrowingCache(Protocol):
    """A decoder, whose KV cache grows while it runs."""

    @property
    def max_cache_bytes(self) -> int:
        """Return the size of the cache when all slots are full."""

    @property
    def cache_bytes(self) -> int:
        """Return the size of what the cache holds now."""


class _Process:
    """The reservations of all limits of this process, and what holds memory in it."""

    def __init__(self) -> None:
        self.change = threading.Condition()
        self.reserved_bytes = self.running = 0
        self.is_measuring = False
        # Batches that wait, the oldest first: no other overtakes it.
        self.waiting: deque[object] = deque()
        self.sessions: WeakSet[Releasable] = WeakSet()
        self.caches: WeakSet[GrowingCache] = WeakSet()


_PROCESS = _Process()


class MemoryLimit:
    """A limit of the resident memory of this process. Thread-safe; several limits share one account."""

    def __init__(self, limit_bytes: int) -> None:
        if resident_memory_bytes() is None:
            raise UnsupportedError("a memory limit needs Linux: other systems do not report resident memory")
        self.limit_bytes = limit_bytes

    def add_session(self, session: Releasable) -> None:
        """Let other sessions ask this one to release memory."""
        with _PROCESS.change:
            _PROCESS.sessions.add(session)

    def add_cache(self, cache: GrowingCache) -> None:
        """Keep room for the growth of a KV cache: running sequences cannot be rejected."""
        with _PROCESS.change:
            _PROCESS.caches.add(cache)

    def left_bytes(self) -> int:
        """Return the memory that a further batch may allocate."""
        with _PROCESS.change:
            growth = sum(max(0, cache.max_cache_bytes - cache.cache_bytes) for cache in _PROCESS.caches)
            return self.limit_bytes - (resident_memory_bytes() or 0) - _PROCESS.reserved_bytes - growth

    def fits(self, size: int, *, everything: bool = False) -> bool:
        """Return whether a batch that allocates this many bytes may run now, after idle sessions released memory."""
        if size <= self.left_bytes():
            return True
        with _PROCESS.change:
            sessions = list(_PROCESS.sessions)
        for session in sessions:
            if session.release_if_idle(everything=everything):
                trim_heap()
                if size <= self.left_bytes():
                    return True
        return False

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Let no batch run, and no session release memory, while the memory of a new session is measured."""
        with _PROCESS.change:
            _PROCESS.change.wait_for(lambda: not _PROCESS.is_measuring)
            _PROCESS.is_measuring = True
            _PROCESS.change.wait_for(lambda: not _PROCESS.running)
        try:
            self.fits(self.limit_bytes)  # idle sessions release what they retain
            yield
        finally:
            with _PROCESS.change:
                _PROCESS.is_measuring = False
                _PROCESS.change.notify_all()

    def wait_while_measuring(self) -> None:
        """Wait until no session is measured."""
        with _PROCESS.change:
            _PROCESS.change.wait_for(lambda: not _PROCESS.is_measuring)

    @contextmanager
    def reserve(self, size: int, subject: str) -> Iterator[None]:
        """Hold memory for a batch; if there is too little, wait for other batches to end.

        Raise TooLargeError if it does not fit although no other batch runs, OverloadedError if others run for too long.
        """
        self._await(size, subject)
        try:
            yield
        finally:
            with _PROCESS.change:
                _PROCESS.reserved_bytes -= size
                _PROCESS.running -= 1
                _PROCESS.change.notify_all()

    def _await(self, size: int, subject: str) -> None:
        ticket = object()
        begin = idle_since = time.monotonic()
        with _PROCESS.change:
            _PROCESS.waiting.append(ticket)
        try:
            while True:
                is_fitting = self.fits(size, everything=time.monotonic() - idle_since > _IDLE_WAIT_S / 2)
                with _PROCESS.change:
                    is_next = _PROCESS.waiting[0] is ticket
                    can_run = is_next and not _PROCESS.is_measuring
                    if can_run and is_fitting and size <= self.left_bytes():
                        _PROCESS.reserved_bytes += size
                        _PROCESS.running += 1
                        return
                    now = time.monotonic()
                    if _PROCESS.running or not can_run:
                        idle_since = now
                    if now - idle_since > _IDLE_WAIT_S:
                        raise TooLargeError(
                            f"{subject} needs about {megabytes(size)} of memory; the memory limit of"
                            f" {megabytes(self.limit_bytes)} leaves {megabytes(max(0, self.left_bytes()))}"
                        )
                    if now - begin > _MAX_WAIT_S:
                        raise OverloadedError(
                            f"{subject} needs about {megabytes(size)} of memory, which other batches use",
                            retry_after_s=_RETRY_S,
                        )
                    _PROCESS.change.wait(_POLL_S)
        finally:
            with _PROCESS.change:
                _PROCESS.waiting.remove(ticket)
                _PROCESS.change.notify_all()


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
