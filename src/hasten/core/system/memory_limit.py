"""Keep the resident memory of this process below a limit. All sessions on CPUs share what is left."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

from hasten.core.errors import OverloadedError, UnsupportedError
from hasten.core.system.hardware import resident_memory_bytes

_RETRY_S = 1.0
# A batch that waits for others looks again after this time: other parts of the process free memory, too.
_POLL_S = 0.02
# How long a batch waits while no other runs, and at most: a longer wait would look like a stalled session.
_IDLE_WAIT_S, _MAX_WAIT_S = 0.3, 10.0
# Batches that need more than what was left when one was rejected are rejected at once for this time, so that they do
# not stop all others again and again.
_SHORTAGE_S = 10.0
# A collection of garbage takes 0.2 s and more beside torch and transformers: not for less memory than this.
_WORTH_COLLECTING_BYTES = 2**26


class Releasable(Protocol):
    """A session that retains memory between batches."""

    def release_if_idle(self, *, everything: bool = False) -> bool:
        """Return memory to the system unless a batch is running; return whether there was any to return."""


class GrowingCache(Protocol):
    """A decoder, whose KV cache grows while it runs."""

    @property
    def cache_bytes(self) -> int:
        """Return the memory that the cache has committed; zero once the decoder is closed."""

    def max_cache_bytes(self, prompt_tokens: int) -> int:
        """Return the size of the cache when all slots are full; zero once the decoder is closed."""


class _Process:
    """The reservations, sessions and KV caches under all limits of this process. Guarded by `change`."""

    def __init__(self) -> None:
        self.change = threading.Condition()
        self.reserved_bytes = self.running = 0
        # Threads that run or prepare a batch. None starts while a session is measured.
        self.users = 0
        self.is_measuring = False
        # Batches that wait, the oldest first: no other overtakes it.
        self.waiting: deque[object] = deque()
        # What was left when a batch was last rejected, and until when that counts.
        self.shortage_bytes, self.shortage_end = 0, 0.0
        self.sessions: WeakSet[Releasable] = WeakSet()
        # KV caches with the longest prompt that an encoder reads.
        self.caches: WeakKeyDictionary[GrowingCache, int] = WeakKeyDictionary()
        # Resident memory after the last collection of garbage.
        self.collected_bytes = 0


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

    def add_cache(self, cache: GrowingCache, prompt_tokens: int) -> None:
        """Keep room for the growth of a KV cache: running sequences cannot be rejected."""
        with _PROCESS.change:
            _PROCESS.caches[cache] = prompt_tokens

    def left_bytes(self) -> int:
        """Return the memory that a further batch may allocate."""
        with _PROCESS.change:
            caches = list(_PROCESS.caches.items())
            growth = sum(max(0, cache.max_cache_bytes(tokens) - cache.cache_bytes) for cache, tokens in caches)
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
        """Let no batch run, and no session release memory, while memory is measured or reserved for long."""
        with _PROCESS.change:
            _PROCESS.change.wait_for(lambda: not _PROCESS.is_measuring)
            _PROCESS.is_measuring = True
        try:
            with _PROCESS.change:
                _PROCESS.change.wait_for(lambda: not _PROCESS.users)
            self.fits(self.limit_bytes)  # idle sessions release what they retain
            yield
        finally:
            with _PROCESS.change:
                _PROCESS.is_measuring = False
                _PROCESS.change.notify_all()

    @contextmanager
    def using(self) -> Iterator[None]:
        """Prepare and run a batch while no session is measured; raise OverloadedError if that takes too long."""
        with _PROCESS.change:
            if not _PROCESS.change.wait_for(lambda: not _PROCESS.is_measuring, _MAX_WAIT_S):
                raise OverloadedError("another model is being loaded within the memory limit", retry_after_s=_RETRY_S)
            _PROCESS.users += 1
        try:
            yield
        finally:
            with _PROCESS.change:
                _PROCESS.users -= 1
                _PROCESS.change.notify_all()

    @contextmanager
    def reserve(self, size: int, subject: str) -> Iterator[None]:
        """Hold memory for a batch; if there is too little, wait for other batches to end.

        Raise OverloadedError if it does not fit although no other batch runs, or if others run for too long.
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
            if begin < _PROCESS.shortage_end and size > max(_PROCESS.shortage_bytes, self.left_bytes()):
                raise self._overloaded(size, subject)
            _PROCESS.waiting.append(ticket)
        try:
            while True:
                with _PROCESS.change:
                    is_next = _PROCESS.waiting[0] is ticket
                is_fitting = is_next and self.fits(size, everything=time.monotonic() - idle_since > _IDLE_WAIT_S / 2)
                with _PROCESS.change:
                    left, now = self.left_bytes(), time.monotonic()
                    if is_fitting and size <= left:
                        _PROCESS.reserved_bytes += size
                        _PROCESS.running += 1
                        return
                    if _PROCESS.running or not is_next:
                        idle_since = now
                    if now - idle_since > _IDLE_WAIT_S:
                        _PROCESS.shortage_bytes, _PROCESS.shortage_end = max(0, left), now + _SHORTAGE_S
                        raise self._overloaded(size, subject)
                    if now - begin > _MAX_WAIT_S:
                        raise self._overloaded(size, subject)
                    _PROCESS.change.wait(_POLL_S)
        finally:
            with _PROCESS.change:
                _PROCESS.waiting.remove(ticket)
                _PROCESS.change.notify_all()

    def _overloaded(self, size: int, subject: str) -> OverloadedError:
        return OverloadedError(
            f"{subject} needs about {megabytes(size)} of memory; the memory limit of {megabytes(self.limit_bytes)}"
            f" leaves {megabytes(max(0, self.left_bytes()))} at the moment",
            retry_after_s=_RETRY_S,
        )


def megabytes(size: int) -> str:
    """Return a size as text."""
    return f"{size / 2**20:.0f} MB"


def free_memory() -> None:
    """Collect objects that refer to each other, and return freed memory to the system, if memory has grown."""
    resident = resident_memory_bytes()
    if resident is None or resident - _PROCESS.collected_bytes > _WORTH_COLLECTING_BYTES:
        gc.collect()
        trim_heap()
        _PROCESS.collected_bytes = resident_memory_bytes() or 0


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
