"""The life cycle that both engines share: admit requests, answer each once, detect stalls, drain and close."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Generic, TypeVar

from hasten.backends import Decoder, Session
from hasten.core.errors import DeadlineError, HastenError, ServeError, StageError, UnavailableError
from hasten.server.scheduling.admission import Admission, PeerRequests
from hasten.server.scheduling.core_scheduler import Share

logger = logging.getLogger("hasten")

Request = TypeVar("Request")
Resource = TypeVar("Resource", Session, Decoder)

# A batch or step may take this many times as long per token as recent ones before it counts as stalled: the attention
# of long rows and busy cores cost more. The seconds per token before any was timed fit billions of weights on one core.
_STALL_FACTOR, _UNTIMED_S_PER_TOKEN = 10, 0.1
# Weight of earlier batches in the time per token.
_TIMING_DECAY = 0.9
# Time for idle threads to end.
_CLOSE_S = 1.0
# A session that fails on its warm-up row, and again after each of these pauses, is broken: errors of a GPU are sticky,
# and only a new process gets rid of them.
_RETRY_S = (0.5, 1.0)


class RetiredError(UnavailableError):
    """The model was replaced, unloaded or stopped after it was looked up: look it up again."""


@dataclass(slots=True, eq=False)
class EngineWorker(Generic[Resource]):
    """A thread and the session or decoder that it owns."""

    resource: Resource
    # Whether another process runs its batches: that process is watched, and replaced if it stalls or breaks.
    is_remote: bool = False
    thread: threading.Thread = field(init=False)
    # When the thread took the batch or step that it runs or waits to run; None while it is idle.
    busy_since: float | None = field(init=False, default=None)
    # Until when it may run before it counts as stalled; None while it waits for cores.
    allowed_until: float | None = field(init=False, default=None)
    # Why the warm-up row failed after a batch had failed; empty while the resource works.
    failure: str = field(init=False, default="")
    is_broken: bool = field(init=False, default=False)


class ThreadPool(ThreadPoolExecutor):
    """A pool that knows its threads, so that one that has ended is noticed: no task would reach it any more."""

    def __init__(self, count: int, name: str) -> None:
        self.threads: list[threading.Thread] = []
        super().__init__(count, name, lambda: self.threads.append(threading.current_thread()))
        # Start a thread now: a caller that starts it later, such as the event loop, waits until it runs.
        self.submit(lambda: None)


class EngineLifecycle(ABC, Generic[Request]):
    """The base class of engines, which fill in `_workers`. Public methods are thread-safe."""

    _workers: Sequence[EngineWorker[Any]]

    def __init__(self, admission: Admission, share: Share) -> None:
        self._lock = threading.Lock()
        self._change = threading.Condition(self._lock)
        self._open: set[Request] = set()
        self._is_closing = False
        self._admission = admission
        self._share = share
        # Of recent batches or steps: tokens and seconds.
        self._timed_tokens = self._timed_s = 0.0

    def count_with(self, peers: PeerRequests) -> None:
        """Count open requests together with other processes that serve this model; call before the first request."""
        self._admission.peers = peers

    def submit(self, request: Request) -> None:
        """Accept a request, or raise an error if the engine is closing or overloaded."""
        with self._lock:
            if self._is_closing:
                raise RetiredError("model is being unloaded")
            self._admission.check(len(self._open))
            self._open.add(request)
            if self._admission.peers is not None:
                self._admission.peers.add(1)
            self._enqueue(request)

    @abstractmethod
    def cancel(self, request: Request) -> None:
        """Drop a request whose client disconnected; `on_done` is not called."""

    @abstractmethod
    def expire(self, now: float) -> None:
        """Fail the queued requests whose deadline has passed, even while all workers are busy."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Return the number of queued requests."""

    def stalled_for_s(self, now: float) -> float:
        """Return for how long a batch or step has been overdue: beyond the time that its tokens may take.

        One that waits for cores is overdue once the runs that hold them are.
        """
        starts = []
        for worker in self._workers:
            if worker.is_remote:
                continue
            since, until = worker.busy_since, worker.allowed_until
            if since is not None:
                starts.append(max(since, self._share.scheduler.allowed_until) if until is None else until)
        return max((now - start for start in starts if start < now), default=0.0)

    @property
    def is_recovering(self) -> bool:
        """Return whether a session failed on its warm-up row and is being tried again, or is broken."""
        return any(worker.failure for worker in self._workers)

    def fault(self) -> str | None:
        """Return why only a new process would serve this model again, or None."""
        if self._is_closing:
            return None
        if not all(thread.is_alive() for thread in self._threads()):
            return "a worker thread has ended"
        return next((f"every batch fails: {worker.failure}" for worker in self._workers if worker.is_broken), None)

    def drain(self, timeout_s: float) -> bool:
        """Stop accepting requests and wait for the open ones; return whether all were answered in time."""
        until = time.monotonic() + timeout_s
        with self._lock:
            self._stop_accepting()
            while self._open and (left := until - time.monotonic()) > 0:
                self._change.wait(left)
            return not self._open

    def close(self) -> None:
        """Fail the requests that are left, end the threads, and close what the ended threads owned."""
        with self._lock:
            self._stop_accepting()
        self._abort(UnavailableError("model was unloaded before the request was answered"))
        until = time.monotonic() + _CLOSE_S
        for thread in self._threads():
            thread.join(max(0.0, until - time.monotonic()))
        for worker in self._workers:
            if not worker.thread.is_alive():
                worker.resource.close()
        if not any(worker.thread.is_alive() for worker in self._workers):
            self._share.scheduler.retire(self._share)

    @abstractmethod
    def _enqueue(self, request: Request) -> None:
        """Hand an accepted request to a thread. Caller must hold the lock."""

    @abstractmethod
    def _abort(self, error: HastenError) -> None:
        """Fail the requests that no thread will finish."""

    @abstractmethod
    def _warm_up(self, worker: Any) -> None:
        """Run the smallest batch that the worker's session is known to answer."""

    def _works(self, worker: EngineWorker[Any]) -> bool:
        """Return whether the session of a failed batch still answers its warm-up row: then a request is at fault."""
        worker.busy_since = time.monotonic()
        try:
            self._warm_up(worker)
            worker.failure = ""
        except ServeError:  # too little memory for now is no failure of the session
            worker.failure = ""
        except BaseException as error:
            worker.failure = str(error) or type(error).__name__
        worker.busy_since = None
        return not worker.failure

    def _await_recovery(self, worker: EngineWorker[Any]) -> None:
        """Try a session that failed on its warm-up row again; it is broken if that fails to the end.

        A remote session is tried until it works or is lost: its process knows whether it is broken, and ends.
        """
        for delay_s in () if worker.is_broken else cycle(_RETRY_S) if worker.is_remote else _RETRY_S:
            with self._lock:
                is_closing = self._change.wait_for(lambda: self._is_closing, delay_s)
            if self._works(worker) or (is_closing and worker.is_remote):
                return
        worker.is_broken = True

    def _threads(self) -> Sequence[threading.Thread]:
        return [worker.thread for worker in self._workers]

    def _wake(self) -> None:
        """Wake all threads that wait, to end if nothing is left to do. Caller must hold the lock."""
        self._change.notify_all()

    @contextmanager
    def _run_on_cores(self, worker: EngineWorker[Any], tokens: int, cost: int | None = None) -> Iterator[None]:
        """Wait for cores, and hold them for a batch or step; `cost` is its share of them if not its tokens."""
        timed_tokens, timed_s = self._timed_tokens, self._timed_s
        allowed_s = tokens * (_STALL_FACTOR * timed_s / timed_tokens if timed_tokens else _UNTIMED_S_PER_TOKEN)
        worker.busy_since = time.monotonic()
        try:
            with self._share.turn(tokens if cost is None else cost, allowed_s):
                begin = time.monotonic()
                worker.allowed_until = begin + allowed_s
                yield
                seconds = time.monotonic() - begin
        finally:
            worker.busy_since = worker.allowed_until = None
        with self._lock:
            self._timed_tokens = _TIMING_DECAY * self._timed_tokens + tokens
            self._timed_s = _TIMING_DECAY * self._timed_s + seconds

    def _stop_accepting(self) -> None:
        self._is_closing = True
        self._wake()

    def _release(self, request: Request) -> None:
        """Count a request as answered. Caller must hold the lock."""
        if request in self._open:
            self._open.remove(request)
            if self._admission.peers is not None:
                self._admission.peers.add(-1)
        if self._is_closing and not self._open:
            self._wake()

    def _guarded(self, call: Callable[[], None], failure: str) -> None:
        """Call back a client or an observer; an error must not end the engine's thread."""
        try:
            call()
        except Exception:
            logger.exception(failure)


def model_failure(error: BaseException) -> HastenError:
    """Return the error to report for a failed batch or step; details of unexpected errors stay in the log."""
    return error if isinstance(error, HastenError) else StageError(f"the model failed: {type(error).__name__}")


def deadline_exceeded(seconds: float, *, was_running: bool = False) -> DeadlineError:
    """Return the error of a request that waited or ran for longer than it was allowed."""
    return DeadlineError(
        f"deadline exceeded after {seconds:.3f} s {'of processing' if was_running else 'in the queue'}"
    )
