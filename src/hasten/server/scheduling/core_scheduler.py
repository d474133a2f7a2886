"""Share CPU cores fairly between models: the model served the fewest tokens runs next (start-time fair queueing)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Share:
    """One model's account of the tokens it has been served."""

    scheduler: CoreScheduler
    # Cores that one run of this model occupies.
    cores: int = 1
    served: float = 0.0
    waiting: int = 0

    def turn(self, tokens: int, allowed_s: float = 0.0) -> AbstractContextManager[None]:
        """Return a context that holds the cores for one run, which is not stalled before `allowed_s` have passed."""
        return self.scheduler.turn(self, tokens, allowed_s)


class CoreScheduler:
    """Runs as many sessions at once as there are cores for. Thread-safe."""

    def __init__(self, cores: int) -> None:
        # Until when (of `time.monotonic`) the runs that have begun may hold the cores before they count as stalled.
        self.allowed_until = 0.0
        self._cores = self._free = cores
        self._shares: list[Share] = []
        # The start tag of the latest run: what its model had been served before it.
        self._virtual_time = 0.0
        self._waiting = 0
        self._lock = threading.Lock()
        self._change = threading.Condition(self._lock)

    def join(self, cores: int = 1) -> Share:
        """Add a model whose sessions use this many cores each."""
        with self._lock:
            # A new model starts at the current virtual time, without a claim to what others were served before.
            share = Share(self, min(cores, self._cores), self._virtual_time)
            self._shares.append(share)
            return share

    def retire(self, share: Share) -> None:
        """Remove a model."""
        with self._lock:
            self._shares.remove(share)

    @contextmanager
    def turn(self, share: Share, tokens: int, allowed_s: float = 0.0) -> Iterator[None]:
        """Wait until it is the model's turn and its cores are free, and hold them for one run."""
        with self._lock:
            if not share.waiting:
                # An idle model earns no credit: it resumes at the current virtual time.
                share.served = max(share.served, self._virtual_time)
            if self._waiting or self._free < share.cores:
                self._wait(share)
            self._virtual_time = max(self._virtual_time, share.served)
            share.served += tokens
            self.allowed_until = max(self.allowed_until, time.monotonic() + allowed_s)
            self._free -= share.cores
            if self._free and self._waiting:
                self._change.notify_all()
        try:
            yield
        finally:
            with self._lock:
                self._free += share.cores
                if self._waiting:
                    self._change.notify_all()

    def _wait(self, share: Share) -> None:
        share.waiting += 1
        self._waiting += 1
        while self._free < share.cores or self._next() is not share:
            self._change.wait()
        share.waiting -= 1
        self._waiting -= 1

    def _next(self) -> Share:
        return min((share for share in self._shares if share.waiting), key=lambda share: share.served)
