"""Counters that all processes of a server read and each writes for itself: open requests and connections.

A row per API worker; its first column counts connections, the others the open requests of one model each.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading

from hasten.server.scheduling.admission import PeerRequests

# Models of one server, loaded or unloaded, whose open requests are counted together.
MAX_MODELS = 1023
_COLUMNS = 1 + MAX_MODELS
_ITEM_BYTES = 8
# The number of connections of a worker that does not accept any.
_ABSENT = -1
# A worker may have this many connections more than another and still accept the next one.
_SLACK = 4


class SharedCounters:
    """The counters in shared memory; `file` is the descriptor that child processes inherit.

    Each entry has one writer, and is read and written as a whole.
    """

    def __init__(self, workers: int, file: int | None = None) -> None:
        """Create the counters, or open those that another process has created."""
        size = workers * _COLUMNS * _ITEM_BYTES
        is_new = file is None
        self.file = _new_file(size) if file is None else file
        self._memory = memoryview(mmap.mmap(self.file, size)).cast("q")
        self._workers = workers
        if is_new:
            for worker in range(workers):
                self.clear(worker)

    def clear(self, worker: int) -> None:
        """Forget what a worker that has ended had open."""
        start = worker * _COLUMNS
        self._memory[start : start + _COLUMNS] = memoryview(bytes(_COLUMNS * _ITEM_BYTES)).cast("q")
        self._memory[start] = _ABSENT

    def set_connections(self, worker: int, connections: int) -> None:
        """Publish how many connections a worker has."""
        self._memory[worker * _COLUMNS] = connections

    def may_accept(self, worker: int, connections: int, limit: int) -> bool:
        """Return whether a worker should accept another connection: no other has far fewer.

        Beyond the limit of a worker, connections are rejected: it leaves them to one that has not reached it.
        """
        self.set_connections(worker, connections)
        others = self._memory[0 : self._workers * _COLUMNS : _COLUMNS].tolist()
        fewest = min((count for count in others if count != _ABSENT), default=connections)
        return connections < fewest + _SLACK and (connections < limit or fewest >= limit)

    def requests(self, worker: int, column: int) -> SharedRequests:
        """Return the open requests of a model, as one worker counts them."""
        return SharedRequests(self._memory, worker, self._workers, 1 + column)


class SharedRequests(PeerRequests):
    """The open requests of one model in all workers."""

    def __init__(self, memory: memoryview, worker: int, workers: int, column: int) -> None:
        self._memory = memory
        self._own = worker * _COLUMNS + column
        self._all = slice(column, workers * _COLUMNS, _COLUMNS)
        # Two generations of a model count in the same entry.
        self._lock = threading.Lock()

    def add(self, change: int) -> None:
        with self._lock:
            self._memory[self._own] += change

    def total(self) -> int:
        return sum(self._memory[self._all].tolist())


def _new_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("hasten-counters")
    else:  # macOS
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, size)
    return file
