"""A model being served: requests on their way through its threads (`crew.py`) and the queue between them.

request ─▶ chore: encode ─▶ queue ─▶ session thread: run ─▶ chore: decode ─▶ answer
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

import msgspec
import numpy as np

from hasten.backends import Session
from hasten.core.errors import DeadlineError, HastenError, InputError, StageError, UnavailableError
from hasten.core.tensors import Outputs, Signature, gather
from hasten.server.admission import Admission
from hasten.server.crew import Crew, Worker
from hasten.server.fairness import Seat, Turns
from hasten.server.queue import Job, Limits, Queue, Work
from hasten.tasks import Encoded

logger = logging.getLogger("hasten")

Answer = TypeVar("Answer")

# For threads to end that have nothing left to do.
_CLOSE_S = 1.0


class RetiredError(UnavailableError):
    """Asked after it was replaced, taken away or stopped: whoever still found it may look again."""


class Measured(msgspec.Struct, frozen=True):
    """What one request cost, for metrics and logs."""

    rows: int
    tokens: int
    encode_s: float
    queue_s: float
    compute_s: float


class Request(msgspec.Struct, Generic[Answer], eq=False):
    """What a protocol asks for: how to make rows of it, and what to make of their outputs. Both run off its thread."""

    encode: Callable[[], Encoded]
    decode: Callable[[Outputs, Encoded], Answer]
    # Called once, from any thread.
    on_done: Callable[[Answer | HastenError, Measured | None], None]
    priority: int = 0
    deadline: float | None = None
    work: Work | None = None
    is_cancelled: bool = False


class Observer:
    """What metrics see of a batch; the default sees nothing."""

    def on_batch(self, job: Job, seconds: float) -> None: ...


class Engine:
    """One model's. `submit` may be called from any thread."""

    def __init__(
        self,
        sessions: Sequence[Session],
        limits: Limits,
        *,
        encoders: int,
        seat: Seat | None = None,
        observer: Observer | None = None,
        max_wait_s: float = 0.0,
    ) -> None:
        self._signature: Signature = sessions[0].spec.signature
        self._queue = Queue(limits)
        self._admission = Admission(limits, len(sessions))
        self._lock = threading.Lock()
        self._all_done = threading.Condition(self._lock)
        self._open = 0
        self._is_closing = False
        self._seat = seat or Turns(len(sessions)).join()
        self._observer = observer or Observer()
        self._max_wait_s = max_wait_s
        self._crew = Crew(sessions, encoders, self._lock)
        self._crew.start(self._work)

    # What protocols call

    def submit(self, request: Request[Answer]) -> None:
        with self._lock:
            if self._is_closing:
                raise RetiredError("the model is being taken away")
            self._admission.check(self._open)
            self._open += 1
            self._crew.add(lambda: self._prepare(request))

    def cancel(self, request: Request[Answer]) -> None:
        """The client has left: what was not begun is not done, and makes room at once. Nobody is told."""
        with self._lock:
            request.is_cancelled = True
            work = request.work
            if work is None:
                return
            work.is_cancelled = True
            was_waiting = self._queue.discard(work)
        if was_waiting:
            self._end(work, _why_dropped(work))

    def expire(self, now: float) -> None:
        """Tell those that wait, and whose time is over, also while no session is free."""
        with self._lock:
            self._queue.drop(now)
            dropped, self._queue.dropped = self._queue.dropped, []
        for work in dropped:
            self._end(work, _why_dropped(work))

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def hung_s(self, now: float) -> float:
        """How long the batch that was taken first, and is not done, has been running or waiting for its turn."""
        return self._crew.hung_s(now)

    def drain(self, timeout_s: float) -> bool:
        """Take nothing more, and wait until all that was taken is answered."""
        until = time.monotonic() + timeout_s
        with self._lock:
            self._stop_taking()
            while self._open and (left := until - time.monotonic()) > 0:
                self._all_done.wait(left)
            return not self._open

    def close(self) -> None:
        with self._lock:
            self._stop_taking()
            waiting = self._queue.close()
        for work in waiting:
            self._end(work, UnavailableError("the model was taken away before it was answered"))
        self._crew.join(_CLOSE_S)
        workers = self._crew.workers
        for worker in workers:
            if not worker.thread.is_alive():
                worker.session.close()
        if not any(worker.thread.is_alive() for worker in workers):
            self._seat.turns.retire(self._seat)

    def _stop_taking(self) -> None:
        self._is_closing = True
        if self._open:
            self._crew.wake_all()  # no more will come that a batch could wait for
        else:
            self._crew.dismiss()

    # What its threads do

    def _work(self, worker: Worker) -> None:
        crew = self._crew
        while True:
            with self._lock:
                while not (is_ready := self._is_ready()) and not crew.chores:
                    if self._is_closing and not self._open:
                        return
                    crew.rest(worker, self._patience())
                job = self._queue.take(time.monotonic()) if is_ready else None
                dropped, self._queue.dropped = self._queue.dropped, []
                # Runs what waits before it prepares more: others can do that meanwhile.
                chore = crew.take() if job is None else None
                crew.call_encoders()
            for work in dropped:
                self._end(work, _why_dropped(work))
            if job is not None:
                self._run(worker, job)
            elif chore is not None:
                chore()

    def _is_ready(self) -> bool:
        """Whether a batch should start now, rather than wait for more to go with it."""
        if not self._queue:
            return False
        # At the end no more will come.
        is_pressing = self._max_wait_s == 0 or self._is_closing or self._queue.is_full
        return is_pressing or self._patience() == 0

    def _patience(self) -> float | None:
        oldest = self._queue.oldest
        return None if oldest is None else max(0.0, oldest + self._max_wait_s - time.monotonic())

    # The way of a request

    def _prepare(self, request: Request[Answer]) -> None:
        begin = time.monotonic()
        try:
            if request.is_cancelled:
                raise UnavailableError("the client has left")
            if request.deadline is not None and begin > request.deadline:
                raise DeadlineError("its time was over before it was begun")
            encoded = request.encode()
            arrived = time.monotonic()
            encode_s = arrived - begin
            work = Work(
                encoded.batch,
                arrived,
                lambda outputs: self._finish(request, encoded, outputs, encode_s),
                request.priority,
                request.deadline,
            )
            if not work.rows or 0 in work.rows:
                raise InputError("there is no token in it, or in one of its texts")
            with self._lock:
                request.work = work
                work.is_cancelled = request.is_cancelled
                self._queue.put(work)
                self._admission.encoded(work.tokens)
                self._crew.wake_worker()
        except HastenError as error:
            self._answer(request, error, None)
        except BaseException as error:  # a panic of the tokenizer is not an Exception, and would end the thread
            logger.exception("a request could not be encoded")
            self._answer(request, StageError(f"it could not be encoded: {type(error).__name__}"), None)

    def _run(self, worker: Worker, job: Job) -> None:
        worker.busy_since = time.monotonic()
        tokens = job.tokens
        try:
            with self._seat.turn(tokens):
                begin = time.monotonic()
                outputs = worker.session.run(job.batch)
                seconds = time.monotonic() - begin
            parts = self._apart(job, outputs)
        except BaseException as error:
            worker.busy_since = None
            self._isolate(worker, job, error)
            return
        worker.busy_since = None
        self._hand_out(job, parts, seconds)
        # Counted when those who wait have their answers.
        with self._lock:
            self._admission.ran(tokens, len(job.slices), seconds)
        try:
            self._observer.on_batch(job, seconds)
        except Exception:
            logger.exception("a batch could not be counted")

    def _isolate(self, worker: Worker, job: Job, error: BaseException) -> None:
        """A batch failed: it is run again in halves, until the one at fault is by itself."""
        if len(job.slices) > 1:
            half = len(job.slices) // 2
            for slices in (job.slices[:half], job.slices[half:]):
                self._run(worker, Job.of(slices, job.rounded))
            return
        logger.error("a batch of %d rows failed: %s", len(job.batch), error)
        failure = error if isinstance(error, HastenError) else StageError(f"the model failed: {type(error).__name__}")
        self._end(job.slices[0].work, failure)

    def _hand_out(self, job: Job, parts: Sequence[Outputs], seconds: float) -> None:
        """To each request the outputs of its rows; whoever has all of them is answered."""
        complete: list[Work] = []
        with self._lock:
            for part, own in zip(job.slices, parts, strict=True):
                work = part.work
                work.parts.append((part.rows, own))
                work.compute_s += seconds
                work.missing -= len(part.rows)
                if not work.missing:
                    complete.append(work)
            # Decoded here if nothing else is to be run, by others if so.
            others = min(len(complete), self._crew.idle_encoders) if self._queue else 0
            for place in range(others):
                self._crew.add_for_encoder(partial(self._complete, complete[place::others]))
        if not others:
            self._complete(complete)

    def _complete(self, works: Sequence[Work]) -> None:
        for work in works:
            self._end(work, self._outcome(work))

    def _outcome(self, work: Work) -> Outputs | HastenError:
        if work.is_cancelled:
            return UnavailableError("the client has left")
        if len(work.parts) == 1:
            return work.parts[0][1]
        try:
            return gather(work.parts, work.batch, self._signature)
        except Exception as error:
            logger.exception("outputs do not fit together")
            return StageError(f"the model failed: {type(error).__name__}")

    def _end(self, work: Work, outcome: Outputs | HastenError) -> None:
        """Once, whatever else becomes of its rows: some may still wait or run when others have failed."""
        with self._lock:
            was_over, work.is_over = work.is_over, True
        if not was_over:
            work.on_done(outcome)

    def _apart(self, job: Job, outputs: Outputs) -> list[Outputs]:
        if len(job.slices) == 1:
            return [outputs]
        counts = {spec.name: self._signature.counts(spec, job.batch) for spec in self._signature.outputs}
        ends = np.cumsum([len(part.rows) for part in job.slices])
        cuts = {name: np.cumsum(count)[ends - 1][:-1] for name, count in counts.items()}
        split = {name: np.split(value, cuts[name]) for name, value in outputs.items()}
        return [{name: pieces[place] for name, pieces in split.items()} for place in range(len(job.slices))]

    def _finish(
        self, request: Request[Answer], encoded: Encoded, outputs: Outputs | HastenError, encode_s: float
    ) -> None:
        work = request.work
        assert work is not None
        if isinstance(outputs, HastenError):
            self._answer(request, outputs, None)
            return
        queue_s = max(0.0, time.monotonic() - work.arrived - work.compute_s)
        measured = Measured(len(encoded.batch), work.tokens, encode_s, queue_s, work.compute_s)
        try:
            answer = request.decode(outputs, encoded)
        except HastenError as error:
            self._answer(request, error, measured)
        except BaseException as error:
            logger.exception("an answer could not be decoded")
            self._answer(request, StageError(f"the answer could not be decoded: {type(error).__name__}"), measured)
        else:
            self._answer(request, answer, measured)

    def _answer(self, request: Request[Answer], answer: Answer | HastenError, measured: Measured | None) -> None:
        with self._lock:
            self._open -= 1
            if request.work is not None:
                self._admission.answered(request.work.tokens)
                # They know each other: without this only the garbage collector, which stops all threads, frees them.
                request.work = None
            if self._is_closing and not self._open:
                self._all_done.notify_all()
                self._crew.dismiss()
        if not request.is_cancelled:
            try:
                request.on_done(answer, measured)
            except Exception:
                # Whoever asked is told no more; all others still are.
                logger.exception("an answer could not be given")


def _why_dropped(work: Work) -> HastenError:
    if work.is_cancelled:
        return UnavailableError("the client has left")
    return DeadlineError(f"it waited {time.monotonic() - work.arrived:.3f} s, longer than it was given")
