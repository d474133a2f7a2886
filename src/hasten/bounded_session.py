"""Run the batches of a CPU session within the memory limit of the process.

Runtimes allocate the activations of a batch and retain them for later batches, so that memory grows to the largest
batch of every session. How much a batch allocates is measured once, on the longest row: activations grow linearly with
tokens and attention scores with their square, so that a shorter row never needs more per token.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import numpy as np

from hasten.backends import LIMITED_BUCKET_TOKENS, Session, uniform_batch
from hasten.core.errors import HastenError, OverloadedError, PlanError, TooLargeError
from hasten.core.system.hardware import resident_memory_bytes
from hasten.core.system.memory_limit import MemoryLimit, megabytes, trim_heap
from hasten.core.tensors import Batch, Outputs, Shape, gather

logger = logging.getLogger("hasten")

# The first row that is measured; longer ones follow while four times its memory is left.
_FIRST_LENGTH = 128
# A row of twice the length needs at most four times the memory, all of it attention scores.
_GROWTH = 4
# Memory beside the activations: kernels that a runtime compiles for a new shape, inputs.
_MARGIN_BYTES = 8 * 2**20
_MIN_TOKEN_BYTES = 2**10
# Outputs are copied when padding is removed and when parts of a batch are gathered.
_OUTPUT_COPIES = 2
# Before a batch is split, its session releases everything, which may take as long as loading it, but only once in as
# many batches.
_BATCHES_PER_RELEASE = 32


class BoundedSession(Session):
    """A session whose batches are split, or wait, while the process has too little memory for them."""

    def __init__(self, session: Session, limit: MemoryLimit) -> None:
        self.spec = session.spec
        self._session, self._limit = session, limit
        # Held while a batch runs: other threads release memory of idle sessions. Reentrant, since a batch that waits
        # also releases that of its own.
        self._lock = threading.RLock()
        # Batches since memory was released, and since everything was.
        self._batches = self._batches_since_all = 0
        with limit.measuring():
            session.warm([Shape(1, 1)])
            session.release_memory()
            trim_heap()
            if (left := limit.left_bytes()) < _MARGIN_BYTES:
                raise PlanError(
                    f"the process needs {megabytes(limit.limit_bytes - left + _MARGIN_BYTES)} before the first request,"
                    f" and its memory limit is {megabytes(limit.limit_bytes)}",
                    hint="raise the limit, or load fewer models or sessions",
                )
        self._length, self._row_bytes = self._measure()
        # The most that was left for a batch while none ran: a text that needs more never fits.
        with limit.measuring():
            self._capacity = limit.left_bytes()
        limit.add_session(self)

    def close(self) -> None:
        with self._lock:
            self._batches = self._batches_since_all = 0
            self._session.close()

    def run(self, batch: Batch) -> Outputs:
        with self._limit.using(), self._lock:
            return self._run(batch)

    def warm(self, shapes: Sequence[Shape]) -> None:
        """Run a batch of each shape; one that does not fit is left out."""
        for shape in shapes:
            try:
                super().warm([shape])
            except (TooLargeError, OverloadedError) as error:
                logger.warning("not warmed up: %s", error.message)

    def release_if_idle(self, *, everything: bool = False) -> bool:
        """Release the memory that the runtime retains, unless a batch is running. Thread-safe."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._release(everything=everything)
        except HastenError:
            logger.exception("a session could not release memory")
            return False
        finally:
            self._lock.release()

    def _run(self, batch: Batch) -> Outputs:
        size = self._bytes(batch)
        if len(batch) == 1:
            self._check_capacity(size, batch.longest)
        elif not self._make_room(size):
            parts = np.array_split(np.argsort(batch.lengths, kind="stable"), 2)
            return gather([(rows, self._run(batch.take(rows))) for rows in parts], batch, self.spec.signature)
        with self._limit.reserve(size, f"a text of {batch.longest} tokens"):
            self._batches += 1
            self._batches_since_all += 1
            return self._session.run(batch)

    def _check_capacity(self, size: int, tokens: int) -> None:
        """Reject a text that would not fit if it were alone: waiting would only stop other batches."""
        if size > self._capacity:
            self._capacity = max(self._capacity, self._limit.left_bytes())
        if size > self._capacity:
            raise TooLargeError(
                f"a text of {tokens} tokens needs about {megabytes(size)} of memory; the memory limit of"
                f" {megabytes(self._limit.limit_bytes)} leaves {megabytes(self._capacity)}"
            )

    def _make_room(self, size: int) -> bool:
        """Release memory until a batch of several rows fits; return whether it does."""
        if size > self._limit.left_bytes() and self._release():
            trim_heap()
        if self._limit.fits(size):
            return True
        if self._batches_since_all >= _BATCHES_PER_RELEASE and self._release(everything=True):
            trim_heap()
        return self._limit.fits(size)

    def _release(self, *, everything: bool = False) -> bool:
        if not (self._batches_since_all if everything else self._batches):
            return False
        self._batches = 0
        if everything:
            self._batches_since_all = 0
        self._session.release_memory(everything=everything)
        return True

    def _bytes(self, batch: Batch) -> int:
        """Return the memory that a batch allocates at most."""
        padded = -(-batch.longest // LIMITED_BUCKET_TOKENS) * LIMITED_BUCKET_TOKENS
        scale = min(padded, self.spec.signature.max_length) / self._length
        return int(len(batch) * self._row_bytes * max(scale, scale**2)) + _MARGIN_BYTES

    def _measure(self) -> tuple[int, int]:
        """Return the longest length that was measured, and the memory that a row of it allocates."""
        max_length = self.spec.signature.max_length
        length, allocated = min(_FIRST_LENGTH, max_length), 0
        while True:
            # Batches of other sessions may run between two lengths.
            with self._limit.measuring():
                allocated = max(allocated, self._measure_row(length))
            if length == max_length:
                return length, allocated
            if _GROWTH * allocated + _MARGIN_BYTES > self._limit.left_bytes():
                logger.warning("texts of more than about %d tokens may not fit into the memory limit", length)
                return length, allocated
            length = min(2 * length, max_length)

    def _measure_row(self, length: int) -> int:
        """Return the memory that one row of this length allocates, outputs included."""
        batch = uniform_batch(Shape(1, length), self.spec.signature)
        before = resident_memory_bytes() or 0
        outputs = self._session.run(batch)
        allocated = max((resident_memory_bytes() or 0) - before, length * _MIN_TOKEN_BYTES)
        allocated += _OUTPUT_COPIES * sum(value.nbytes for value in outputs.values())
        del outputs
        self._session.release_memory()
        trim_heap()
        return allocated
