"""Engine of one generative model: continuous batching of sequences over the slots of its decoders.

request ─▶ tokenizer thread: prompts ─▶ queue ─▶ decode thread: a token per sequence and step ─▶ text deltas ─▶ result
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from hasten.backends import Decoder
from hasten.core.errors import DeadlineError, HastenError, StageError
from hasten.core.generation_types import Finish, SamplingParams
from hasten.generation.prompts import Prompt
from hasten.generation.scheduler import DecodeScheduler
from hasten.generation.sequences import TextDelta, TextSequence
from hasten.server.request_records import RequestStats
from hasten.server.scheduling.admission import SlotAdmission
from hasten.server.scheduling.core_scheduler import CoreScheduler, Share
from hasten.server.scheduling.engine_lifecycle import (
    EngineLifecycle,
    EngineWorker,
    ThreadPool,
    deadline_exceeded,
    model_failure,
)
from hasten.server.scheduling.queue import Limits

logger = logging.getLogger("hasten")

# Cost of a decode step in the tokens by which models share the cores: a step reads all weights for one token of each
# sequence, which takes as long as the prefill of several tokens.
_STEP_TOKENS = 16
_NOT_COUNTED, _NOT_DELIVERED = "a sequence could not be counted", "an answer could not be delivered"


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """A prompt and how to continue it."""

    prompt: Prompt
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The finish reason and token counts of a sequence; its text was delivered as deltas."""

    finish: Finish
    prompt_tokens: int
    tokens: int


@dataclass(slots=True, eq=False)
class GenerationRequest:
    """A request. Its callbacks run on the engine's threads and must not block."""

    # Tokenizes the prompts; runs off the event loop.
    read: Callable[[], Sequence[GenerationJob]]
    # Receives the index of a sequence and its next text delta; the last delta has the finish reason.
    on_text_delta: Callable[[int, TextDelta], None]
    # Called once: after all deltas, or with an error.
    on_done: Callable[[Sequence[GenerationResult] | HastenError, RequestStats | None], None]
    deadline: float | None = None
    # A stream must start before the deadline; once it has started, its client sees the progress.
    is_stream: bool = False
    sequences: list[_ActiveSequence] = field(default_factory=list)
    arrived: float = field(default_factory=time.monotonic)
    encode_s: float = 0.0
    started: float | None = None
    # Whether the request was answered or dropped.
    is_over: bool = False

    def is_late(self, now: float) -> bool:
        """Return whether the deadline has passed."""
        has_streamed = self.is_stream and self.started is not None
        return self.deadline is not None and now > self.deadline and not has_streamed


@dataclass(slots=True, eq=False)
class _ActiveSequence:
    request: GenerationRequest
    text: TextSequence = field(init=False)
    started: float | None = None
    result: GenerationResult | None = None


class _DecodeWorker(EngineWorker[Decoder]):
    """A decode thread, its decoder and scheduler, and the sequences that it holds."""

    def __init__(self, scheduler: DecodeScheduler, decoder: Decoder) -> None:
        super().__init__(decoder)
        self.scheduler = scheduler
        self.sequences: list[_ActiveSequence] = []


class GenerationObserver:
    """Observes sequences for metrics; this base class ignores them."""

    def on_first_token(self, seconds: float) -> None:
        """Record the time from a request to the first text delta of a sequence."""

    def on_decode_step(self, rows: int, seconds: float) -> None:
        """Record a decode step."""

    def on_finish(self, result: GenerationResult, seconds: float) -> None:
        """Record a finished sequence and the time since its first delta."""


class GenerationEngine(EngineLifecycle[GenerationRequest]):
    """The engine of one generative model. Public methods are thread-safe."""

    def __init__(
        self,
        decoders: Sequence[tuple[DecodeScheduler, Decoder]],
        limits: Limits,
        *,
        encoders: int = 1,
        share: Share | None = None,
        observer: GenerationObserver | None = None,
    ) -> None:
        self._admission: SlotAdmission
        self.slots = sum(decoder.slots for _, decoder in decoders)
        admission = SlotAdmission(limits, self.slots, lambda: (self.waiting, self.running))
        super().__init__(admission, share or CoreScheduler(len(decoders)).join())
        self._workers: list[_DecodeWorker] = [_DecodeWorker(*pair) for pair in decoders]
        self._queue: deque[_ActiveSequence] = deque()
        self._observer = observer or GenerationObserver()
        self._encoders = ThreadPool(encoders, "encode")
        for worker in self._workers:
            worker.thread = threading.Thread(target=self._work, args=[worker], daemon=True)
            worker.thread.start()

    def cancel(self, request: GenerationRequest) -> None:
        """Drop a request whose client disconnected: its slots are free before the next step."""
        self._close_request(request)

    def expire(self, now: float) -> None:
        with self._lock:
            late = {sequence.request for sequence in self._queue if sequence.request.is_late(now)}
        self._fail_late(late, now)

    @property
    def waiting(self) -> int:
        """Return the number of sequences without a slot."""
        return len(self._queue) + sum(worker.scheduler.waiting for worker in self._workers)

    @property
    def running(self) -> int:
        """Return the number of sequences that hold a slot."""
        return sum(worker.scheduler.running for worker in self._workers)

    def _enqueue(self, request: GenerationRequest) -> None:
        self._encoders.submit(self._prepare, request)

    def _abort(self, error: HastenError) -> None:
        with self._lock:
            requests = set(self._open)
        for request in requests:
            self._fail(request, error)
        self._encoders.shutdown(wait=False, cancel_futures=True)

    # Request lifecycle

    def _prepare(self, request: GenerationRequest) -> None:
        try:
            if request.is_over:
                return
            if request.is_late(begin := time.monotonic()):
                raise DeadlineError("deadline exceeded before processing started")
            jobs = request.read()
            sequences, scheduler = [_ActiveSequence(request) for _ in jobs], self._workers[0].scheduler
            for index, (sequence, job) in enumerate(zip(sequences, jobs, strict=True)):
                on_delta, continues = partial(self._on_delta, index, sequence), job.prompt.continues
                sequence.text = scheduler.new_sequence(job.prompt.ids, job.sampling, on_delta, continues=continues)
            request.encode_s = time.monotonic() - begin
            with self._lock:
                self._check_deadline(request, sum(len(sequence.text.prompt) for sequence in sequences))
                if not request.is_over:
                    request.sequences = sequences
                    self._queue += sequences
                    self._change.notify_all()
        except HastenError as error:
            self._fail(request, error)
        except BaseException as error:  # a panic of the tokenizer is not an Exception
            logger.exception("a prompt could not be tokenized")
            self._fail(request, StageError(f"the prompt could not be tokenized: {type(error).__name__}"))

    def _check_deadline(self, request: GenerationRequest, tokens: int) -> None:
        """Reject a request whose prompts cannot be prefilled before its deadline. Caller must hold the lock."""
        if request.deadline is None:
            return
        schedulers = [worker.scheduler for worker in self._workers]
        tokens_per_s = len(schedulers) * max(scheduler.max_prefill_tokens_per_s for scheduler in schedulers)
        backlog = sum(len(sequence.text.prompt) for sequence in self._queue)
        backlog += sum(scheduler.prefill_backlog for scheduler in schedulers)
        self._admission.check_prefill(tokens, backlog, tokens_per_s, request.deadline - time.monotonic())

    def _on_delta(self, index: int, sequence: _ActiveSequence, delta: TextDelta) -> None:
        request, now = sequence.request, time.monotonic()
        if request.is_over:
            return
        if sequence.started is None:
            sequence.started = now
            self._guarded(lambda: self._observer.on_first_token(now - request.arrived), _NOT_COUNTED)
        request.started = request.started or now
        try:
            request.on_text_delta(index, delta)
        except Exception:
            # Only this client goes without its text.
            logger.exception("a text delta could not be delivered")
            self._fail(request, StageError("the server failed on this request; its log says why"))
            return
        if delta.finish is not None:
            text, seconds = sequence.text, now - sequence.started
            result = sequence.result = GenerationResult(delta.finish, len(text.prompt), len(text.ids))
            with self._lock:
                self._admission.on_sequence(seconds)
            self._guarded(lambda: self._observer.on_finish(result, seconds), _NOT_COUNTED)
            results = [other.result for other in request.sequences if other.result is not None]
            if len(results) == len(request.sequences):
                self._finish(request, results, now)

    def _finish(self, request: GenerationRequest, results: Sequence[GenerationResult], now: float) -> None:
        if self._close_request(request):
            started = request.started or now
            tokens = sum(result.prompt_tokens + result.tokens for result in results)
            queue_s = max(0.0, started - request.arrived - request.encode_s)
            stats = RequestStats(len(results), tokens, request.encode_s, queue_s, now - started)
            self._guarded(lambda: request.on_done(results, stats), _NOT_DELIVERED)

    def _fail(self, request: GenerationRequest, error: HastenError) -> None:
        if self._close_request(request):
            self._guarded(lambda: request.on_done(error, None), _NOT_DELIVERED)

    def _fail_late(self, requests: set[GenerationRequest], now: float) -> None:
        for request in requests:
            was_running = request.started is not None
            self._fail(request, deadline_exceeded(now - request.arrived, was_running=was_running))

    def _close_request(self, request: GenerationRequest) -> bool:
        """Free what a request holds; return whether it was open until now."""
        with self._lock:
            if request.is_over:
                return False
            request.is_over = True
            if any(sequence.result is None for sequence in request.sequences):
                for sequence in request.sequences:
                    sequence.text.cancel()
                if self._queue:
                    self._queue = deque(sequence for sequence in self._queue if sequence.request is not request)
            # Break the reference cycle: otherwise only the garbage collector, which stops all threads, frees them.
            request.sequences = []
            self._release(request)
            return True

    # Decode threads

    def _work(self, worker: _DecodeWorker) -> None:
        while True:
            with self._lock:
                while not self._queue and worker.scheduler.is_idle:
                    if self._is_closing and not self._open:
                        return
                    self._change.wait()
                self._fill_slots(worker)
            self._step(worker)

    def _fill_slots(self, worker: _DecodeWorker) -> None:
        """Hand over as many sequences as there are free slots. Caller must hold the lock."""
        scheduler = worker.scheduler
        while self._queue and scheduler.running + scheduler.waiting < worker.resource.slots:
            sequence = self._queue.popleft()
            worker.sequences.append(sequence)
            scheduler.add(sequence.text)

    def _step(self, worker: _DecodeWorker) -> None:
        scheduler, prefill_tokens = worker.scheduler, worker.scheduler.next_prefill_tokens
        try:
            with self._run_on_cores(worker, scheduler.decoding + prefill_tokens, _STEP_TOKENS + prefill_tokens):
                begin = time.monotonic()
                scheduler.step()
                seconds = time.monotonic() - begin
        except BaseException as error:
            self._isolate(worker, error)
        else:
            if rows := scheduler.decoding:
                self._guarded(lambda: self._observer.on_decode_step(rows, seconds), _NOT_COUNTED)
        finally:
            worker.sequences = [sequence for sequence in worker.sequences if not sequence.text.is_over]
        now = time.monotonic()
        self._fail_late({sequence.request for sequence in worker.sequences if sequence.request.is_late(now)}, now)

    def _isolate(self, worker: _DecodeWorker, error: BaseException) -> None:
        """Fail the request at fault, or all running ones: a failed decode step leaves the KV cache undefined."""
        logger.error("a decode step failed: %s", error)
        # The scheduler cancels a sequence whose prefill or sampling failed; the engine cancels closed requests only.
        at_fault = [
            sequence for sequence in worker.sequences if sequence.text.is_cancelled and not sequence.request.is_over
        ]
        for request in {sequence.request for sequence in at_fault or worker.sequences}:
            self._fail(request, model_failure(error))
        try:
            worker.scheduler.free()
        except Exception:
            logger.exception("slots could not be freed")
        if not self._works(worker):
            self._await_recovery(worker)

    def _warm_up(self, worker: _DecodeWorker) -> None:
        worker.scheduler.warm_up()

    def _threads(self) -> Sequence[threading.Thread]:
        return [*super()._threads(), *self._encoders.threads]
