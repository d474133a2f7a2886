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
from hasten.server.scheduling.engine_lifecycle import EngineLifecycle, deadline_exceeded, model_failure
from hasten.server.scheduling.queue import BatchJob, Limits, PendingRequest, Queue
from hasten.server.scheduling.worker_pool import SessionWorker, WorkerPool
from hasten.tasks import Encoded

logger = logging.getLogger("hasten")

Answer = TypeVar("Answer")

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
        self._pool.start(self._work)

    def submit(self, request: EncoderRequest[Answer]) -> None:
        super().submit(request)
        if request.call_soon is not None:
            self._prepare(request)

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
            arrived = time.monotonic()
            encode_s = arrived - begin
            pending = PendingRequest(
                encoded.batch,
                arrived,
                lambda outputs: self._finish(request, encoded, outputs, encode_s),
                request.priority,
                request.deadline,
            )
            if not pending.rows or 0 in pending.rows:
                raise InputError("the input, or one of its texts, has no tokens")
            with self._lock:
                request.pending = pending
                pending.is_cancelled = request.is_cancelled
                self._queue.put(pending)
                self._admission.on_encoded(pending.tokens)
                if not self._is_gathering or self._queue.is_full:
                    self._pool.wake_worker()
        except HastenError as error:
            self._answer(request, error, None)
        except BaseException as error:  # a panic of the tokenizer is not an Exception, and would end the thread
            logger.exception("a request could not be tokenized")
            self._answer(request, StageError(f"the request could not be tokenized: {type(error).__name__}"), None)

    def _run(self, worker: SessionWorker, job: BatchJob, *, is_loaded: bool = False) -> None:
        tokens = job.tokens
        try:
            with self._run_on_cores(worker, tokens):
                begin = time.monotonic()
                outputs = worker.resource.run(job.batch)
                seconds = time.monotonic() - begin
            parts = self._split(job, outputs)
        except BaseException as error:
            self._isolate(worker, job, error)
            return
        self._distribute(job, parts, seconds)
        # Statistics come after the answers, so that clients do not wait for them.
        with self._lock:
            self._admission.on_batch(tokens, len(job.slices), seconds, is_loaded=is_loaded)
        self._guarded(lambda: self._observer.on_batch(job, seconds), "a batch could not be counted")

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
                    ran = int(pending.batch.lengths[part.rows].sum())
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


def _drop_error(pending: PendingRequest) -> HastenError:
    if pending.is_cancelled:
        return UnavailableError("client disconnected")
    return deadline_exceeded(time.monotonic() - pending.arrived)
