"""A readers-writer lock around CUDA graph capture: meanwhile no other session may allocate, free or copy.

ONNX Runtime captures in the mode in which such a call of any thread fails, and makes the capture fail too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class CaptureLock:
    """Held by one thread that captures, or by any number that do other work; waiting captures have priority."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._shared_holders, self._exclusive_waiters, self._is_exclusive = 0, 0, False

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock for a capture."""
        with self._changed:
            self._exclusive_waiters += 1
            try:
                self._changed.wait_for(lambda: not self._shared_holders and not self._is_exclusive)
            finally:  # also when the wait is interrupted
                self._exclusive_waiters -= 1
                self._changed.notify_all()
            self._is_exclusive = True
        try:
            yield
        finally:
            with self._changed:
                self._is_exclusive = False
                self._changed.notify_all()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock for work other than captures. Not reentrant: a waiting capture would cause a deadlock."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_exclusive and not self._exclusive_waiters)
            self._shared_holders += 1
        try:
            yield
        finally:
            with self._changed:
                self._shared_holders -= 1
                self._changed.notify_all()


# One per process, since a capture affects all sessions.
capture_lock = CaptureLock()
