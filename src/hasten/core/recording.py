"""CUDA graphs are recorded by one session at a time, and meanwhile no other session allocates, frees or copies.

ONNX Runtime records in the mode in which whatever another thread does of that kind is an error, there and here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Recording:
    """One records, or any number work as usual; whoever wants to record goes before those who come later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._working, self._waiting, self._is_recorded = 0, 0, False

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._working and not self._is_recorded)
            finally:  # also of who is interrupted while it waits
                self._waiting -= 1
                self._changed.notify_all()
            self._is_recorded = True
        try:
            yield
        finally:
            with self._changed:
                self._is_recorded = False
                self._changed.notify_all()

    @contextmanager
    def beside_others(self) -> Iterator[None]:
        """Not one in another: who records may have come between the two."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_recorded and not self._waiting)
            self._working += 1
        try:
            yield
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()


# Of the process: which session records is no matter to CUDA.
recording = Recording()
