"""Run the batches of a CPU session within the memory limit of the process.

Runtimes allocate the activations of a batch and retain them for later batches, so that memory grows to the largest
batch of every session. How much a batch allocates is measured once, on the longest row: activations grow linearly with
tokens and attention scores with their square, so that a shorter row never needs more per token.
"""

from __future__ import annotations

import logging
import threading

import numpy as np

from hasten.backends import Session
from hasten.core.errors import PlanError
from hasten.core.system.hardware import resident_memory_bytes
from hasten.core.system.memory_limit import MemoryLimit, megabytes, trim_heap
from hasten.core.tensors import Batch, Outputs, Shape, gather

logger = logging.getLogger("hasten")

# The first row that is measured; longer ones follow while four times its memory is left.
_FIRST_LENGTH = 128
# A row of twice the length needs at most four times the memory, all of it attention scores.
_GROWTH = 4
# Memory beside the activations: kernels that a runtime compiles for a new shape, inputs and outputs.
_MARGIN_BYTES = 8 * 2**20
_MIN_TOKEN_BYTES = 2**10


class BoundedSession(Session):
    """A session whose batches are split, or wait, while the process has too little memory for them."""

    def __init__(self, session: Session, limit: MemoryLimit) -> None:
        self.spec = session.spec
        self._session, self._limit = session, limit
        # Held while a batch runs: other threads release memory of idle sessions.
        self._lock = threading.Lock()
        self._is_retaining = False
        session.warm([Shape(1, 1)])
        self._release()
        self._baseline_bytes = resident_memory_bytes() or 0
        if self._baseline_bytes + _MARGIN_BYTES > limit.limit_bytes:
            raise PlanError(
                f"the process needs {megabytes(self._baseline_bytes + _MARGIN_BYTES)} before the first request, and its"
                f" memory limit is {megabytes(limit.limit_bytes)}",
                hint="raise --max-memory, or serve fewer models or sessions (--instances 1)",
            )
        self._length, self._row_bytes = self._measure()
        limit.add(self)

    def close(self) -> None:
        with self._lock:
            self._is_retaining = False
            self._session.close()

    def run(self, batch: Batch) -> Outputs:
        with self._lock:
            return self._run(batch)

    def release_if_idle(self) -> bool:
        """Release the memory that the runtime retains, unless a batch is running. Thread-safe."""
        if not self._is_retaining or not self._lock.acquire(blocking=False):
            return False
        try:
            return self._release()
        finally:
            self._lock.release()

    def _run(self, batch: Batch) -> Outputs:
        size, longest = self._bytes(batch), int(batch.lengths.max(initial=0))
        subject = f"a text of {longest} tokens"
        if size > self._limit.left_bytes() and self._release():
            trim_heap()
        if len(batch) == 1:
            self._limit.check(size, self._baseline_bytes, subject)
        elif not self._limit.fits(size):
            halves = np.array_split(np.argsort(batch.lengths, kind="stable"), 2)
            return gather([(rows, self._run(batch.take(rows))) for rows in halves], batch, self.spec.signature)
        with self._limit.reserve(size, subject):
            self._is_retaining = True
            return self._session.run(batch)

    def _release(self) -> bool:
        was_retaining, self._is_retaining = self._is_retaining, False
        if was_retaining:
            self._session.release_memory()
        return was_retaining

    def _bytes(self, batch: Batch) -> int:
        """Return the memory that a batch allocates at most."""
        scale = int(batch.lengths.max(initial=1)) / self._length
        return int(len(batch) * self._row_bytes * max(scale, scale**2)) + _MARGIN_BYTES

    def _measure(self) -> tuple[int, int]:
        """Return the longest length that was measured, and the memory that a row of it allocates."""
        max_length = self.spec.signature.max_length
        length = min(_FIRST_LENGTH, max_length)
        while True:
            before = resident_memory_bytes() or 0
            self._session.warm([Shape(1, length)])
            allocated = max((resident_memory_bytes() or 0) - before, length * _MIN_TOKEN_BYTES)
            self._is_retaining = True
            self._release()
            trim_heap()
            if length == max_length:
                return length, allocated
            if _GROWTH * allocated + _MARGIN_BYTES > self._limit.left_bytes():
                logger.warning("texts of more than about %d tokens do not fit into the memory limit", length)
                return length, allocated
            length = min(2 * length, max_length)
