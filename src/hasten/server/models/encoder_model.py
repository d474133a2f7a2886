"""An encoder bundle that is served: opened, warmed up and checked against its reference answers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from hasten.backends import Artifact, PreparesBuckets, RunOptions, Session, SupportsBuckets, run_until
from hasten.background_warm_up import WarmingSession
from hasten.bundle import Bundle
from hasten.core.errors import AccuracyError, HastenError
from hasten.core.plan import Gate
from hasten.core.progress import SilentProgress
from hasten.core.system.hardware import usable_cores
from hasten.core.system.stage_times import StageTimes
from hasten.core.tensors import Batch, Outputs, Shape
from hasten.core.variant import CPU, Variant
from hasten.measure.encoder_gate import expect, verify
from hasten.predictor import Predictor, open_session
from hasten.server.models.instances import choose_instances, count_on_gpu
from hasten.server.models.registry import Model, queue_limits
from hasten.server.request_records import RequestStats
from hasten.server.scheduling.core_scheduler import CoreScheduler
from hasten.server.scheduling.encoder_engine import EncoderRequest, Engine, EngineObserver
from hasten.server.scheduling.queue import Limits
from hasten.server.settings import Settings
from hasten.tasks import TASKS, AnyTask, Encoded, TaskSpec

logger = logging.getLogger("hasten")

Answer = TypeVar("Answer")

# Reference rows that a model must answer before the server reports that it is ready.
_TEST_ROWS = 16
# A thread's share of a batch whose activations stay in the caches of its core: in larger batches each token takes
# longer, and the first request waits for the others.
_TOKENS_PER_THREAD = 512
# Enough to keep a GPU busy: beyond a few thousand tokens throughput does not grow, and the first request waits longer.
_TOKENS_PER_GPU = 8192
# Time for all sessions of a model to prepare buckets; the remaining ones are prepared on first use.
_WARM_UP_S = 30.0
# The shape on which the number of sessions is measured: short texts, as most are.
_MEASURED_SHAPE = Shape(4, 64)
# A broken model answers no row correctly. A variant of lower precision misses a few, as its build has measured; among
# so few rows this share more may be missed by chance.
_TEST_SLACK = 0.2


@dataclass(frozen=True, slots=True)
class RemoteSessions:
    """Sessions in engine processes, which have opened, warmed up and tested them, and what depends on them."""

    sessions: Sequence[Session]
    variant: Variant
    # The number of sessions of each engine process.
    instances: int
    # The limits of a batch, and whether rows of any length run well together.
    tokens_per_batch: int
    rows_per_batch: int
    is_packed: bool
    # Tokenizer threads of this process.
    encoders: int

    def artifact(self, bundle: Bundle) -> Artifact:
        """Return the variant that the sessions run; its files are opened and checked by the engine processes only."""
        return Artifact(self.variant, bundle.manifest.signature, bundle.path, {})

    def limits(self, settings: Settings) -> Limits:
        """Return the limits of the queue of this process; the engine process rounds batches up to its buckets."""
        return replace(
            queue_limits(settings),
            tokens_per_batch=self.tokens_per_batch,
            rows_per_batch=self.rows_per_batch,
            round_up=(lambda tokens: tokens) if self.is_packed else None,
        )


class EncoderModel(Model):
    """A model that answers with scores, labels or embeddings."""

    engine: Engine

    def __init__(
        self,
        name: str,
        bundle: Bundle,
        settings: Settings,
        scheduler: CoreScheduler,
        observer: EngineObserver,
        remote: RemoteSessions | None = None,
        *,
        encoders: int | None = None,
    ) -> None:
        """Open, warm up and test the sessions and observe their batches; engine processes do so for `remote` ones.

        `encoders` is the number of tokenizer threads, by default half of the cores.
        """
        times = StageTimes()
        super().__init__(name, bundle, settings, None if remote is None else remote.artifact(bundle))
        self.spec: TaskSpec = bundle.manifest.task
        self.task: AnyTask = TASKS.get(self.spec.name)
        self.signature = self.artifact.signature
        if remote is None:
            times.finish("tokenizer and variant")
            self._open(scheduler, observer, encoders or max(1, usable_cores() // 2), times)
            logger.info("%s: loaded %d sessions in %s", name, self.instances, times)
        else:
            self.session_spec = remote.sessions[0].spec
            self.instances, self.limits = remote.instances, remote.limits(settings)
            # Batches wait for cores, and for others to join them, in the engine process.
            self.engine = Engine(remote.sessions, self.limits, encoders=remote.encoders)
        self.since = time.time()

    def _open(self, scheduler: CoreScheduler, observer: EngineObserver, encoders: int, times: StageTimes) -> None:
        settings = self.settings
        instances, threads = _instances_and_threads(self.artifact, self.bundle, settings)
        times.finish("number of sessions")
        with ExitStack() as opened:
            options = RunOptions(threads, settings.max_memory)
            sessions = [opened.enter_context(open_session(self.artifact, options))]
            self.session_spec = sessions[0].spec
            self.instances = count_on_gpu(self.artifact, sessions[0]) if instances is None else instances
            sessions += [opened.enter_context(open_session(self.artifact, options)) for _ in range(1, self.instances)]
            times.finish("sessions")
            self.limits = _limits(sessions[0], threads, settings)
            self._warm_up(sessions)
            times.finish("warm-up")
            self._test(Predictor(self.spec, self.tokenizer, sessions[0]))
            times.finish("self-test")
            sessions = [opened.enter_context(session) for session in self._warm_up_in_background(sessions)]
            opened.pop_all()  # the engine closes the sessions
        self.engine = Engine(
            sessions,
            self.limits,
            encoders=encoders,
            share=scheduler.join(threads),
            observer=observer,
            max_batch_delay_s=settings.max_batch_delay / 1e6,
        )

    @cached_property
    def default_options(self) -> Any:
        """Return the task's default options."""
        return self.task.options(self.spec, {})

    @cached_property
    def token_types(self) -> int:
        """Return the highest token type of the tokenizer: runtimes would look up others beyond the end of a table."""
        types = self.tokenizer.encode([("a", "a")]).batch.values.get("token_type_ids")
        return 0 if types is None else int(types.max())

    def check_lists(self, content: object) -> None:
        """Raise an error if a payload has too long texts or lists."""
        # A list in an item holds documents or labels, or words, of which those beyond the maximum length are cut.
        self.check_characters(content, max(self.settings.max_client_batch_size, self.signature.max_length))

    def submit_payload(
        self,
        payload: Callable[[], object],
        decode: Callable[[Outputs, Encoded], Answer],
        on_done: Callable[[Answer | HastenError, RequestStats | None], None],
        *,
        options: object = None,
        check: Callable[[Encoded], None] = lambda _: None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Callable[[], None]:
        """Submit a payload whose items were counted; return a function that cancels it.

        It is parsed off the caller's thread.
        """

        def encode() -> Encoded:
            content = payload()
            self.check_lists(content)
            items = self.task.parse(content)
            encoded = self.task.encode(items, self.tokenizer, self.default_options if options is None else options)
            check(encoded)
            return encoded

        return self.submit(encode, decode, on_done, priority=priority, timeout_s=timeout_s)

    def submit(
        self,
        encode: Callable[[], Encoded],
        decode: Callable[[Outputs, Encoded], Answer],
        on_done: Callable[[Answer | HastenError, RequestStats | None], None],
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Callable[[], None]:
        """Submit rows to the engine; return a function that cancels the request."""

        def encode_checked() -> Encoded:
            encoded = encode()
            self.check_tokens(encoded.batch.tokens)
            return encoded

        request = EncoderRequest(encode_checked, decode, on_done, priority, self.deadline(timeout_s))
        self.engine.submit(request)
        return lambda: self.engine.cancel(request)

    def _warm_up(self, sessions: Sequence[Session]) -> None:
        """Prepare what the first requests need."""
        until = time.monotonic()
        for session in sessions:
            until += _WARM_UP_S / len(sessions)
            sizes = self.limits.tokens_per_batch, self.limits.rows_per_batch
            if isinstance(session, PreparesBuckets):
                self._prepare(session, session.covering_samples(*sizes), until, "in the background")
                session.uses_larger_buckets = True
            elif isinstance(session, SupportsBuckets):
                self._prepare(session, session.samples(*sizes), until, "on first use")
            else:
                shapes = self.bundle.report.plan.shapes
                usual = [Shape(shapes.batch.min, shapes.sequence.min), shapes.optimal]
                # On a GPU the first run of each shape takes long.
                session.warm(usual if self.variant.device == CPU else shapes.grid())

    def _prepare(self, session: Session, batches: Sequence[Batch], until: float, others: str) -> None:
        begin = time.monotonic()
        done, seconds = run_until(session, batches, until), time.monotonic() - begin
        message = "%s: prepared %d of %d buckets in %.1f s; the others are prepared %s"
        logger.info(message, self.name, done, len(batches), seconds, others)

    def _warm_up_in_background(self, sessions: Sequence[Session]) -> Iterator[Session]:
        """Yield each session, wrapped if it has further buckets to prepare."""
        turn = threading.Lock()

        def log(buckets: int, seconds: float) -> None:
            logger.info("%s: prepared %d buckets in the background in %.1f s", self.name, buckets, seconds)

        for session in sessions:
            if isinstance(session, PreparesBuckets):
                yield WarmingSession(session, self._samples(session), turn, log)
            else:
                yield session

    def _samples(self, session: SupportsBuckets) -> Iterator[Batch]:
        """Yield a batch per bucket; none is made before the first is asked for, since that takes a while."""
        yield from session.samples(self.limits.tokens_per_batch, self.limits.rows_per_batch)

    def _test(self, predictor: Predictor) -> None:
        reference = self.bundle.reference()
        rows = reference.rows[:_TEST_ROWS]
        signature = predictor.session.spec.signature
        encoded = predictor.encode(list(rows))
        ends = {spec.name: signature.count(spec, encoded.batch) for spec in signature.outputs}
        outputs = {name: value[: ends[name]] for name, value in reference.outputs.items()}
        expected = expect(predictor, rows, SilentProgress(), outputs)
        gate = Gate(min_agreement=max(0.0, self.built_agreement - _TEST_SLACK))
        verdict = verify(predictor, self.variant.name, expected, gate, SilentProgress())
        if not verdict.passed:
            raise AccuracyError(
                f"{self.name} does not reproduce its reference answers ({len(rows)} rows): {verdict.reason}"
            )


def _instances_and_threads(artifact: Artifact, bundle: Bundle, settings: Settings) -> tuple[int | None, int]:
    """Return the number of sessions and of threads per session.

    On a GPU it is one thread, which waits for it, and the number of sessions may depend on the first (None).
    """
    is_on_cpu = artifact.variant.device == CPU
    cores = usable_cores() if is_on_cpu else 1
    if settings.instances is not None:
        return settings.instances, settings.threads or max(1, cores // settings.instances)
    if settings.threads is not None and is_on_cpu:
        return max(1, cores // settings.threads), settings.threads
    if not is_on_cpu:
        return None, settings.threads or 1
    instances = choose_instances(artifact, bundle.manifest.digest, _MEASURED_SHAPE, settings.max_memory)
    return instances, settings.threads or max(1, cores // instances)


def _limits(session: Session, threads: int, settings: Settings) -> Limits:
    """Return the limits, with a token budget that fits the CPU caches or keeps a GPU busy unless one is set."""
    limits = queue_limits(settings)
    if isinstance(session, SupportsBuckets):
        tokens = min(settings.max_batch_tokens or _TOKENS_PER_GPU, session.max_batch_tokens)
        return replace(limits, tokens_per_batch=session.rounded(tokens), round_up=session.rounded)
    tokens = _TOKENS_PER_THREAD * threads if session.spec.device == CPU else limits.tokens_per_batch
    return replace(limits, tokens_per_batch=settings.max_batch_tokens or tokens)
