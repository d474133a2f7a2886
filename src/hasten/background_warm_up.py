"""Serve batches while the remaining buckets of a session are prepared between them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from hasten.backends import PreparesBuckets, Session
from hasten.core.errors import HastenError
from hasten.core.tensors import Batch, Outputs, Shape

logger = logging.getLogger("hasten")


class WarmingSession(Session):
    """A session whose buckets a thread prepares while no batch runs. Until then batches run in larger ones.

    `turn` is shared by the sessions of a model, so that one bucket is prepared at a time; `on_finished` receives the
    number of prepared buckets and the seconds that it took.
    """

    def __init__(
        self,
        session: Session,
        batches: Iterable[Batch],
        turn: threading.Lock,
        on_finished: Callable[[int, float], None],
    ) -> None:
        if not isinstance(session, PreparesBuckets):
            raise TypeError(f"{type(session).__name__} cannot prepare buckets one by one")
        self.spec = session.spec
        self._session, self._buckets, self._turn, self._on_finished = session, session, turn, on_finished
        self._changed = threading.Condition()
        # Batches that run or wait to run; they go before the next bucket.
        self._waiting = self._started = 0
        self._is_in_use = self._is_closing = False
        session.uses_larger_buckets = True
        self._thread = threading.Thread(target=self._prepare, args=[batches], name="hasten-warm-up", daemon=True)
        self._thread.start()

    def run(self, batch: Batch) -> Outputs:
        with self._in_use():
            return self._session.run(batch)

    def warm(self, shapes: Sequence[Shape]) -> None:
        with self._in_use():
            self._session.warm(shapes)

    def release_memory(self, *, everything: bool = False) -> None:
        with self._in_use():
            self._session.release_memory(everything=everything)

    def close(self) -> None:
        """Stop preparing buckets, and close the session."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()
        self._session.close()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: not self._is_in_use)
            self._is_in_use = True
            self._started += 1
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1
                self._is_in_use = False
                self._changed.notify_all()

    def _prepare(self, batches: Iterable[Batch]) -> None:
        begin, done = time.monotonic(), 0
        try:
            for batch in batches:
                started, turn_begin = self._started, time.monotonic()
                with self._turn:
                    if not self._prepare_bucket(batch):
                        return
                done += 1
                if self._started != started:
                    # Under load, leave half of the time to batches.
                    self._rest(time.monotonic() - turn_begin)
            self._on_finished(done, time.monotonic() - begin)
        except HastenError:
            # Batches still run, in larger buckets or in one that is prepared for them.
            logger.exception("a bucket could not be prepared")
        finally:
            with self._changed:
                self._changed.wait_for(lambda: not self._is_in_use)
                self._buckets.uses_larger_buckets = False

    def _rest(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing, seconds)

    def _prepare_bucket(self, batch: Batch) -> bool:
        """Prepare the bucket of a batch once no other batch waits; return False if the session is closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or not (self._waiting or self._is_in_use))
            if self._is_closing:
                return False
            self._is_in_use = True
        try:
            self._buckets.prepare(batch)
        finally:
            with self._changed:
                self._is_in_use = False
                self._changed.notify_all()
        return True
