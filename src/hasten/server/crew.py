"""The threads that serve a model: workers that own a session each, encoders that do chores beside them, and who waits.

A chore is to encode a request or to decode its outputs. An idle worker does chores itself, so that a lone request
changes threads once on its way in; while all run batches, encoders do them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hasten.backends import Session

Chore = Callable[[], None]


@dataclass(slots=True, eq=False)
class Worker:
    session: Session
    wake: threading.Condition
    thread: threading.Thread = field(init=False)
    # When it took what it runs, or waits to run; None while there is nothing.
    busy_since: float | None = None


class Crew:
    """It shares its owner's lock: whoever calls holds it, but for `start`, `join` and `hung_s`."""

    def __init__(self, sessions: Sequence[Session], encoders: int, lock: threading.Lock) -> None:
        self.workers = [Worker(session, threading.Condition(lock)) for session in sessions]
        self._lock = lock
        self._encoders_wake = threading.Condition(lock)
        self._encoders = [threading.Thread(target=self._encode, daemon=True) for _ in range(encoders)]
        self.idle_encoders = 0
        # Who was busy last is last, and is woken first: a session that has just run is still in the caches.
        self._idle: list[Worker] = []
        self.chores: deque[Chore] = deque()
        self._is_dismissed = False

    def start(self, work: Callable[[Worker], None]) -> None:
        """Each worker's thread does this until it returns."""
        for worker in self.workers:
            worker.thread = threading.Thread(target=work, args=[worker], daemon=True)
        for thread in (*(worker.thread for worker in self.workers), *self._encoders):
            thread.start()

    def join(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        for thread in (*(worker.thread for worker in self.workers), *self._encoders):
            thread.join(max(0.0, until - time.monotonic()))

    def hung_s(self, now: float) -> float:
        """How long the batch that was taken first, and is not done, has been running or waiting for its turn."""
        return max((now - since for worker in self.workers if (since := worker.busy_since) is not None), default=0.0)

    # What is to be done

    def add(self, chore: Chore) -> None:
        """For whoever is idle, or will be first."""
        self.chores.append(chore)
        if not self.wake_worker() and self.idle_encoders:
            self._encoders_wake.notify()

    def add_for_encoder(self, chore: Chore) -> None:
        """Where one is idle: for a worker that has something better to do."""
        self.chores.append(chore)
        self._encoders_wake.notify()

    def take(self) -> Chore | None:
        """The one that was added first."""
        return self.chores.popleft() if self.chores else None

    def call_encoders(self) -> None:
        """Where chores are left: whoever added them took the worker that now runs a batch for idle."""
        self._encoders_wake.notify(len(self.chores))

    # Who waits

    def rest(self, worker: Worker, timeout_s: float | None) -> None:
        """Until it is woken, or the time is over."""
        self._idle.append(worker)
        worker.wake.wait(timeout_s)
        if worker in self._idle:
            self._idle.remove(worker)

    def wake_worker(self) -> bool:
        """Whether one was idle."""
        if self._idle:
            self._idle.pop().wake.notify()
            return True
        return False

    def wake_all(self) -> None:
        for worker in self.workers:
            worker.wake.notify()
        self._encoders_wake.notify_all()

    def dismiss(self) -> None:
        """No chore will be added any more."""
        self._is_dismissed = True
        self.wake_all()

    def _encode(self) -> None:
        while True:
            with self._lock:
                while not self.chores:
                    if self._is_dismissed:
                        return
                    self.idle_encoders += 1
                    self._encoders_wake.wait()
                    self.idle_encoders -= 1
                chore = self.chores.popleft()
            chore()
