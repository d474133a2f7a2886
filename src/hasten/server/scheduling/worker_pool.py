"""Thread pool of one model: one worker per session, plus tokenizer threads.

A task tokenizes a request or decodes its outputs. Idle workers run tasks too, so a lone request needs a single thread
hand-off; while all workers run batches, the tokenizer threads run them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from hasten.backends import Session
from hasten.server.scheduling.engine_lifecycle import EngineWorker
from hasten.server.scheduling.lost_session import ReconnectingSession

Task = Callable[[], None]


class SessionWorker(EngineWorker[Session]):
    """A worker thread, its session, and the condition that wakes it."""

    def __init__(self, session: Session, lock: threading.Lock) -> None:
        super().__init__(session, isinstance(session, ReconnectingSession))
        self.wake = threading.Condition(lock)

    @property
    def load(self) -> int:
        """Return the tokens in flight in the process of a remote session."""
        return self.resource.load if isinstance(self.resource, ReconnectingSession) else 0


class WorkerPool:
    """Shares its engine's lock, which callers must hold except in `start`."""

    def __init__(self, workers: Sequence[SessionWorker], encoders: int, lock: threading.Lock) -> None:
        self._workers = workers
        self._lock = lock
        self._encoders_wake = threading.Condition(lock)
        self.threads = [threading.Thread(target=self._encode, daemon=True) for _ in range(encoders)]
        self.idle_encoders = 0
        # The worker that was busy last is last and is woken first: its session is still in the CPU caches.
        self._idle: list[SessionWorker] = []
        self.tasks: deque[Task] = deque()
        self._is_dismissed = False
        self._is_remote = any(worker.is_remote for worker in workers)

    def start(self, work: Callable[[SessionWorker], None]) -> None:
        """Start all threads; each worker's thread ends when `work` returns."""
        for worker in self._workers:
            worker.thread = threading.Thread(target=work, args=[worker], daemon=True)
        # Workers come first, so that they are joined first: only they own sessions, which must be closed.
        self.threads[:0] = [worker.thread for worker in self._workers]
        for thread in self.threads:
            thread.start()

    def add(self, task: Task) -> None:
        """Add a task for the first thread that is idle."""
        self.tasks.append(task)
        if not self.wake_worker() and self.idle_encoders:
            self._encoders_wake.notify()

    def add_for_encoder(self, task: Task) -> None:
        """Add a task for an idle tokenizer thread, while the calling worker runs the next batch."""
        self.tasks.append(task)
        self._encoders_wake.notify()

    def call_encoders(self) -> None:
        """Wake tokenizer threads for the tasks left over by a worker that now runs a batch."""
        self._encoders_wake.notify(len(self.tasks))

    def rest(self, worker: SessionWorker, timeout_s: float | None) -> None:
        """Wait until the worker is woken or the time is over."""
        self._idle.append(worker)
        worker.wake.wait(timeout_s)
        if worker in self._idle:
            self._idle.remove(worker)

    def wake_worker(self) -> bool:
        """Wake an idle worker, if they are remote that of the least loaded process; return whether there was one."""
        if not self._idle:
            return False
        # The first minimum is the worker that was busy last.
        worker = min(reversed(self._idle), key=lambda idle: idle.load) if self._is_remote else self._idle[-1]
        self._idle.remove(worker)
        worker.wake.notify()
        return True

    def wake_all(self) -> None:
        """Wake all threads."""
        for worker in self._workers:
            worker.wake.notify()
        self._encoders_wake.notify_all()

    def dismiss(self) -> None:
        """End the tokenizer threads: no task will be added any more."""
        self._is_dismissed = True
        self.wake_all()

    def _encode(self) -> None:
        while True:
            with self._lock:
                while not self.tasks:
                    if self._is_dismissed:
                        return
                    self.idle_encoders += 1
                    self._encoders_wake.wait()
                    self.idle_encoders -= 1
                task = self.tasks.popleft()
            task()
