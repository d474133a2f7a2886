"""Engine of one encoder model: tokenize, batch across requests, run and decode.

request ─▶ task: tokenize ─▶ queue ─▶ session thread: run ─▶ task: decode ─▶ answer
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from hasten.backends import Session
from hasten.core.errors import (
    DeadlineError,
    HastenError,
    InputError,
    OverloadedError,
    ServeError,
    StageError,
    UnavailableError,
)
from hasten.core.tensors import Outputs, Shape, Signature, gather
from hasten.server.request_records import RequestStats
from hasten.server.scheduling.admission import TokenAdmission
from hasten.server.scheduling.core_scheduler import CoreScheduler, Share
from hasten.server.scheduling.engine_lifecycle import EngineLifecycle, RetiredError, deadline_exceeded, model_failure
from hasten.server.scheduling.lost_session import ReconnectingSession, SessionLostError
from hasten.server.scheduling.queue import BatchJob, Limits, PendingRequest, Queue
from hasten.server.scheduling.worker_pool import SessionWorker, WorkerPool
from hasten.tasks import Encoded

logger = logging.getLogger("hasten")

Answer = TypeVar("Answer")

# How often a lost session is tried.
_RECONNECT_S = 0.05
# With fewer open requests than this, none is tokenized on the event loop, and no batch waits for others.
_MIN_GATHERED = 5
# The row that tells a broken session from a request that makes it fail.
_PROBE = Shape(1, 8)


class EncoderRequest(msgspec.Struct, Generic[Answer], eq=False):
    """A request: how to tokenize it and how to decode its outputs. Both run off the caller's thread."""

    encode: Callable[[], Encoded]
    decode: Callable[[Outputs, Encoded], Answer]
    # Called once, from any thread.
    on_done: Callable[[Answer | HastenError, RequestStats | None], None]
    priority: int = 0
    deadline: float | None = None
    # Given for a short text that is submitted on an event loop: under load it is tokenized there, in less time than
    # waking a thread takes. Schedules a call after the other requests that the loop has received.
    call_soon: Callable[[Callable[[], None]], object] | None = None
    pending: PendingRequest | None = None
    is_cancelled: bool = False
    # As in PendingRequest.
    on_start: Callable[[], None] | None = None
    is_suspect: bool = False


class EngineObserver:
    """Observes batches for metrics; this base class ignores them."""

    def on_batch(self, job: BatchJob, seconds: float) -> None:
        """Record a batch that has run."""


class Engine(EngineLifecycle[EncoderRequest[Any]]):
    """The engine of one encoder model. Public methods are thread-safe."""

    def __init__(
        self,
        sessions: Sequence[Session],
        limits: Limits,
        *,
        encoders: int,
        share: Share | None = None,
        observer: EngineObserver | None = None,
        max_batch_delay_s: float = 0.0,
    ) -> None:
        self._admission: TokenAdmission
        super().__init__(TokenAdmission(limits, len(sessions)), share or CoreScheduler(len(sessions)).join())
        self._workers: list[SessionWorker] = [SessionWorker(session, self._lock) for session in sessions]
        self._signature: Signature = sessions[0].spec.signature
        self._queue = Queue(limits)
        self._observer = observer or EngineObserver()
        self._max_batch_delay_s = max_batch_delay_s
        # Whether the event loop has yet to submit requests that it has received.
        self._is_gathering = False
        self._pool = WorkerPool(self._workers, encoders, self._lock)
        self._is_aborted = False
        self._pool.start(self._work)

    def submit(self, request: EncoderRequest[Answer]) -> None:
        super().submit(request)
        if request.call_soon is not None:
            self._prepare(request)

    def submit_encoded(self, request: EncoderRequest[Answer]) -> None:
        """Accept a request that another process has admitted and tokenized: `encode` returns its rows at once."""
        pending = self._pend(request, request.encode(), 0.0)
        with self._lock:
            if self._is_closing:
                raise RetiredError("model is being unloaded")
            self._open.add(request)
            self._put(request, pending)

    def cancel(self, request: EncoderRequest[Answer]) -> None:
        """Drop a request whose client disconnected: queued rows do not run and their room is free at once."""
        with self._lock:
            request.is_cancelled = True
            pending = request.pending
            if pending is None:
                return
            pending.is_cancelled = True
            was_queued = self._queue.discard(pending)
        if was_queued:
            self._end(pending, _drop_error(pending))

    def expire(self, now: float) -> None:
        with self._lock:
            self._queue.drop(now)
            dropped, self._queue.dropped = self._queue.dropped, []
        for pending in dropped:
            self._end(pending, _drop_error(pending))

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def _enqueue(self, request: EncoderRequest[Answer]) -> None:
        if len(self._open) < _MIN_GATHERED:
            request.call_soon = None
        if request.call_soon is None:
            self._pool.add(lambda: self._prepare(request))
        elif not self._is_gathering:
            # An idle worker would take the first request alone, and delay the others by waiting for the interpreter.
            self._is_gathering = True
            request.call_soon(self._end_gathering)

    def _end_gathering(self) -> None:
        with self._lock:
            self._is_gathering = False
            if self._queue:
                self._pool.wake_worker()

    def _abort(self, error: HastenError) -> None:
        with self._lock:
            self._is_aborted = True
            self._change.notify_all()
            queued = self._queue.close()
        for pending in queued:
            self._end(pending, error)

    def _threads(self) -> Sequence[threading.Thread]:
        return self._pool.threads

    def _wake(self) -> None:
        super()._wake()
        if self._open:
            self._pool.wake_all()  # no further request will come for a batch to wait for
        else:
            self._pool.dismiss()

    # Worker threads

    def _work(self, worker: SessionWorker) -> None:
        pool = self._pool
        while True:
            with self._lock:
                while not (is_ready := self._is_batch_ready()) and not pool.tasks:
                    if self._is_closing and not self._open:
                        return
                    pool.rest(worker, self._batch_delay_left_s())
                job = self._queue.take(time.monotonic()) if is_ready else None
                is_loaded = bool(self._queue)
                if job is not None and is_loaded:
                    pool.wake_worker()
                dropped, self._queue.dropped = self._queue.dropped, []
                # Batches before tasks: tokenizer threads can run those meanwhile.
                task = pool.tasks.popleft() if job is None and pool.tasks else None
                pool.call_encoders()
            for pending in dropped:
                self._end(pending, _drop_error(pending))
            if job is not None:
                self._run(worker, job, is_loaded=is_loaded)
            elif task is not None:
                task()

    def _is_batch_ready(self) -> bool:
        """Return whether a batch should start now rather than wait for more requests."""
        if not self._queue:
            return False
        # While the engine closes, no more requests come.
        if self._is_closing or self._queue.is_full:
            return True
        return not self._is_gathering and (self._max_batch_delay_s == 0 or self._batch_delay_left_s() == 0)

    def _batch_delay_left_s(self) -> float | None:
        oldest = self._queue.oldest
        if oldest is None or self._is_gathering:
            return None
        return max(0.0, oldest + self._max_batch_delay_s - time.monotonic())

    # Request lifecycle

    def _prepare(self, request: EncoderRequest[Answer]) -> None:
        begin = time.monotonic()
        try:
            if request.is_cancelled:
                raise UnavailableError("client disconnected")
            if request.deadline is not None and begin > request.deadline:
                raise DeadlineError("deadline exceeded before processing started")
            encoded = request.encode()
            pending = self._pend(request, encoded, time.monotonic() - begin)
            with self._lock:
                self._put(request, pending)
        except HastenError as error:
            self._answer(request, error, None)
        except BaseException as error:  # a panic of the tokenizer is not an Exception, and would end the thread
            logger.exception("a request could not be tokenized")
            self._answer(request, StageError(f"the request could not be tokenized: {type(error).__name__}"), None)

    def _pend(self, request: EncoderRequest[Answer], encoded: Encoded, encode_s: float) -> PendingRequest:
        pending = PendingRequest(
            encoded.batch,
            time.monotonic(),
            lambda outputs: self._finish(request, encoded, outputs, encode_s),
            request.priority,
            request.deadline,
            on_start=request.on_start,
            is_suspect=request.is_suspect,
        )
        if not pending.rows or 0 in pending.rows:
            raise InputError("the input, or one of its texts, has no tokens")
        return pending

    def _put(self, request: EncoderRequest[Answer], pending: PendingRequest) -> None:
        """Queue the rows of a request. Caller must hold the lock."""
        request.pending = pending
        pending.is_cancelled = request.is_cancelled
        self._queue.put(pending)
        self._admission.on_encoded(pending.tokens)
        if not self._is_gathering or self._queue.is_full:
            self._pool.wake_worker()

    def _run(self, worker: SessionWorker, job: BatchJob, *, is_loaded: bool = False) -> None:
        tokens = job.tokens
        try:
            with self._run_on_cores(worker, tokens):
                for part in job.slices:
                    if part.request.on_start is not None:
                        part.request.on_start()
                begin = time.monotonic()
                outputs = _run_batch(worker.resource, job)
                seconds = time.monotonic() - begin
            parts = self._split(job, outputs)
        except SessionLostError as error:
            self._put_back(worker, job, error)
            return
        except BaseException as error:
            self._isolate(worker, job, error)
            return
        self._distribute(job, parts, seconds)
        # Statistics come after the answers, so that clients do not wait for them.
        with self._lock:
            self._admission.on_batch(tokens, len(job.slices), seconds, is_loaded=is_loaded)
        self._guarded(lambda: self._observer.on_batch(job, seconds), "a batch could not be counted")

    def _put_back(self, worker: SessionWorker, job: BatchJob, error: SessionLostError) -> None:
        """Queue the rows of a lost batch again, and keep the worker until its session works again.

        A request that ran when a session was lost runs alone from then on, and fails if the session is lost again.
        """
        failed: list[PendingRequest] = []
        with self._lock:
            worker.failure = error.message
            for part in job.slices:
                pending = part.request
                if self._is_aborted or (error.was_running and pending.is_suspect):
                    failed.append(pending)
                elif not pending.is_over:
                    pending.is_suspect |= error.was_running
                    self._queue.put_back(pending, part.rows)
            self._pool.wake_worker()
        for pending in failed:
            self._end(pending, _lost_error(error, is_closing=self._is_aborted))
        logger.warning("%s: %d rows are queued again", error.message, len(job.batch))
        assert isinstance(worker.resource, ReconnectingSession)
        while not worker.resource.reconnect():
            with self._lock:
                if self._change.wait_for(self._is_over, _RECONNECT_S):
                    return
        worker.failure = ""

    def _is_over(self) -> bool:
        return self._is_aborted or (self._is_closing and not self._open)

    def _isolate(self, worker: SessionWorker, job: BatchJob, error: BaseException) -> None:
        """Run a failed batch again split in two until the request at fault is alone, if the session still works."""
        # An error of the server itself, such as a text that exceeds the memory limit, is not a failure of the session.
        is_rejected = isinstance(error, ServeError)
        works = is_rejected or self._works(worker)
        # A request that is too large is alone at fault; too little memory for now would make each part wait again.
        if works and not isinstance(error, OverloadedError) and len(job.slices) > 1:
            half = len(job.slices) // 2
            for slices in (job.slices[:half], job.slices[half:]):
                self._run(worker, BatchJob.of(slices, job.round_up))
            return
        if not is_rejected:
            logger.error("a batch of %d rows failed: %s", len(job.batch), error)
        for part in job.slices:
            self._end(part.request, model_failure(error))
        if not works:
            self._await_recovery(worker)

    def _warm_up(self, worker: SessionWorker) -> None:
        worker.resource.warm([_PROBE])

    def _distribute(self, job: BatchJob, parts: Sequence[Outputs], seconds: float) -> None:
        """Give each request the outputs of its rows, and answer the requests that are complete."""
        complete: list[PendingRequest] = []
        with self._lock:
            for part, outputs in zip(job.slices, parts, strict=True):
                pending = part.request
                pending.parts.append((part.rows, outputs))
                pending.compute_s += seconds
                pending.missing -= len(part.rows)
                if not pending.is_over:
                    is_whole = len(part.rows) == len(pending.batch.lengths)
                    ran = pending.tokens if is_whole else int(pending.batch.lengths[part.rows].sum())
                    pending.tokens_left -= ran
                    self._admission.on_run(ran)
                if not pending.missing:
                    complete.append(pending)
            # Decode on this thread if no batch waits for it, otherwise on idle tokenizer threads.
            threads = min(len(complete), self._pool.idle_encoders) if self._queue else 0
            for index in range(threads):
                self._pool.add_for_encoder(partial(self._complete, complete[index::threads]))
        if not threads:
            self._complete(complete)

    def _complete(self, requests: Sequence[PendingRequest]) -> None:
        for pending in requests:
            self._end(pending, self._outcome(pending))

    def _outcome(self, pending: PendingRequest) -> Outputs | HastenError:
        if pending.is_cancelled:
            return UnavailableError("client disconnected")
        if len(pending.parts) == 1:
            return pending.parts[0][1]
        try:
            return gather(pending.parts, pending.batch, self._signature)
        except Exception as error:
            logger.exception("the outputs of a request do not fit together")
            return model_failure(error)

    def _end(self, pending: PendingRequest, outcome: Outputs | HastenError) -> None:
        """Answer a request once: rows may still be queued or running after others have failed."""
        with self._lock:
            was_over, pending.is_over = pending.is_over, True
        if not was_over:
            pending.on_done(outcome)

    def _split(self, job: BatchJob, outputs: Outputs) -> list[Outputs]:
        """Split the outputs of a batch into those of its slices."""
        if len(job.slices) == 1:
            return [outputs]
        counts = {spec.name: self._signature.counts(spec, job.batch) for spec in self._signature.outputs}
        ends = np.cumsum([len(part.rows) for part in job.slices])
        bounds = {name: np.cumsum(count)[ends - 1][:-1] for name, count in counts.items()}
        split = {name: np.split(value, bounds[name]) for name, value in outputs.items()}
        return [{name: parts[index] for name, parts in split.items()} for index in range(len(job.slices))]

    def _finish(
        self, request: EncoderRequest[Answer], encoded: Encoded, outputs: Outputs | HastenError, encode_s: float
    ) -> None:
        pending = request.pending
        assert pending is not None
        if isinstance(outputs, HastenError):
            self._answer(request, outputs, None)
            return
        queue_s = max(0.0, time.monotonic() - pending.arrived - pending.compute_s)
        stats = RequestStats(len(encoded.batch), pending.tokens, encode_s, queue_s, pending.compute_s)
        answer: Answer | HastenError
        try:
            answer = request.decode(outputs, encoded)
        except HastenError as error:
            answer = error
        except BaseException as error:
            logger.exception("an answer could not be decoded")
            answer = StageError(f"the answer could not be decoded: {type(error).__name__}")
        self._answer(request, answer, stats)

    def _answer(
        self, request: EncoderRequest[Answer], answer: Answer | HastenError, stats: RequestStats | None
    ) -> None:
        with self._lock:
            if request.pending is not None:
                self._admission.on_answered(request.pending.tokens_left)
                # Break the reference cycle: otherwise only the garbage collector, which stops all threads, frees them.
                request.pending = None
            self._release(request)
        if not request.is_cancelled:
            self._guarded(lambda: request.on_done(answer, stats), "an answer could not be delivered")


def _run_batch(session: Session, job: BatchJob) -> Outputs:
    if job.slices[0].request.is_suspect and isinstance(session, ReconnectingSession):
        return session.run_alone(job.batch)
    return session.run(job.batch)


def _lost_error(error: SessionLostError, *, is_closing: bool) -> HastenError:
    if is_closing:
        return error
    return StageError("the engine process ended twice while it ran this request")


def _drop_error(pending: PendingRequest) -> HastenError:
    if pending.is_cancelled:
        return UnavailableError("client disconnected")
    return deadline_exceeded(time.monotonic() - pending.arrived)
