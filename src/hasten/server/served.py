"""A bundle that is being served: opened, warmed, tested on a few of its own reference answers, and answering."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from hasten.backends import Artifact, HasSizes, RunOptions, Session, run_until
from hasten.bundle import Bundle
from hasten.core.errors import AccuracyError, HastenError, TooLargeError
from hasten.core.hardware import gpu_memory_used_bytes, usable_cores
from hasten.core.plan import Gate, Shapes
from hasten.core.progress import Silent
from hasten.core.tensors import Outputs, Shape
from hasten.core.variant import CPU, Variant
from hasten.measure.verify import expect, verify
from hasten.predictor import Predictor, open_session, required, runnable
from hasten.server.engine import Engine, Measured, Observer, Request
from hasten.server.fairness import Turns
from hasten.server.instances import choose_instances
from hasten.server.queue import Limits
from hasten.tasks import TASKS, AnyTask, Encoded, TaskSpec

logger = logging.getLogger("hasten")

Answer = TypeVar("Answer")

# Rows of the bundle's own that a server answers before it says that it is ready.
_TEST_ROWS = 16
# What a thread's share of a batch may be for its activations to stay in the caches of its core: in larger batches each
# token takes longer, and who came first waits for the others.
_TOKENS_PER_THREAD = 512
# What keeps a GPU busy: beyond a few thousand tokens each takes as long, and who came first waits for the others.
_TOKENS_PER_GPU = 8192
# For all sessions of a model to make sizes of batches ready; what is left is made when it first comes.
_WARM_S = 30.0
# What the number of sessions is measured on: short texts, as most are.
_MEASURED = Shape(4, 64)
# What is broken answers none of them. A variant of less precision answers a few otherwise, as its build has measured;
# among so few rows there may by chance be so many more of those.
_TEST_SLACK = 0.2
# How many tokens a text has is known when it is tokenized, all of it, whatever is cut off then; a few million
# characters take seconds and hundreds of megabytes. No language needs so many for a token.
CHARACTERS_PER_TOKEN = 8


@dataclass(frozen=True, slots=True)
class ModelSettings:
    variant: str | None = None
    # Sessions beside each other, measured where not given, and threads of each; the cores are shared out.
    instances: int | None = None
    threads: int | None = None
    max_wait_s: float = 0.0
    # To answer, where a request does not say.
    timeout_s: float | None = None
    # Tokens of a batch; as many as its session has cache for, where not given.
    batch_tokens: int | None = None
    limits: Limits = field(default_factory=Limits)
    # Texts in one request, and tokens of all of them.
    items: int = 1024
    tokens: int = 2**18
    # Of models that write: texts at once, and tokens of one.
    slots: int = 8
    written_tokens: int = 2048


class Served:
    def __init__(self, name: str, bundle: Bundle, settings: ModelSettings, turns: Turns, observer: Observer) -> None:
        self.name = name
        self.bundle = bundle
        self.settings = settings
        self.spec: TaskSpec = bundle.manifest.task
        self.task: AnyTask = TASKS.get(self.spec.name)
        self.tokenizer = bundle.tokenizer()
        artifact = required(bundle, bundle.entry(settings.variant)) if settings.variant else runnable(bundle)
        self.variant = artifact.variant
        self.signature = artifact.signature
        self.instances, threads = _arrange(artifact, bundle, settings)
        with ExitStack() as opened:
            options = RunOptions(threads)
            sessions = [opened.enter_context(open_session(artifact, options)) for _ in range(self.instances)]
            self.limits = _limits(sessions[0], threads, settings)
            self._warm(sessions)
            self._test(Predictor(self.spec, self.tokenizer, sessions[0]))
            opened.pop_all()  # the engine closes them
        self.engine = Engine(
            sessions,
            self.limits,
            encoders=max(1, usable_cores() // 2),
            seat=turns.join(threads),
            observer=observer,
            max_wait_s=settings.max_wait_s,
        )
        self.since = time.time()

    @cached_property
    def usual_options(self) -> Any:
        """The task's own, where a request gives none."""
        return self.task.options(self.spec, {})

    @cached_property
    def token_types(self) -> int:
        """The highest that the tokenizer gives: runtimes look up others beyond the end of a table."""
        types = self.tokenizer.encode([("a", "a")]).batch.values.get("token_type_ids")
        return 0 if types is None else int(types.max())

    def ask(
        self,
        payload: Callable[[], object],
        decode: Callable[[Outputs, Encoded], Answer],
        on_done: Callable[[Answer | HastenError, Measured | None], None],
        *,
        options: object = None,
        check: Callable[[Encoded], None] = lambda _: None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Callable[[], None]:
        """Rows of a payload, once they are checked, through the engine; what is called to withdraw it is returned."""

        def encode() -> Encoded:
            given = payload()
            if (size := characters(given)) > CHARACTERS_PER_TOKEN * self.settings.tokens:
                raise TooLargeError(f"{size} characters are more than {CHARACTERS_PER_TOKEN * self.settings.tokens}")
            items = self.task.parse(given)
            if len(items) > self.settings.items:
                raise TooLargeError(f"{len(items)} items are more than {self.settings.items}")
            encoded = self.task.encode(items, self.tokenizer, self.usual_options if options is None else options)
            check(encoded)
            return encoded

        return self.submit(encode, decode, on_done, priority=priority, timeout_s=timeout_s)

    def submit(
        self,
        encode: Callable[[], Encoded],
        decode: Callable[[Outputs, Encoded], Answer],
        on_done: Callable[[Answer | HastenError, Measured | None], None],
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Callable[[], None]:
        def checked() -> Encoded:
            encoded = encode()
            if encoded.batch.tokens > self.settings.tokens:
                raise TooLargeError(f"{encoded.batch.tokens} tokens are more than {self.settings.tokens}")
            return encoded

        allowed = timeout_s if timeout_s is not None else self.settings.timeout_s
        deadline = time.monotonic() + allowed if allowed is not None else None
        request = Request(checked, decode, on_done, priority, deadline)
        self.engine.submit(request)
        return lambda: self.engine.cancel(request)

    def close(self, drain_s: float = 0.0) -> bool:
        is_done = self.engine.drain(drain_s)
        self.engine.close()
        return is_done

    def _warm(self, sessions: Sequence[Session]) -> None:
        until = time.monotonic()
        for session in sessions:
            until += _WARM_S / len(sessions)
            if isinstance(session, HasSizes):
                batches = session.samples(self.limits.tokens_per_batch, self.limits.rows_per_batch)
                begin, before = time.monotonic(), gpu_memory_used_bytes()
                done = run_until(session, batches, until)
                taken = gpu_memory_used_bytes() - before
                logger.info(
                    "%s: %d of %d sizes of batches are ready, after %.1f s%s; others are made when they first come",
                    self.name,
                    done,
                    len(batches),
                    time.monotonic() - begin,
                    f" and in {taken / 1e6:.0f} MB of GPU memory" if taken > 0 else "",
                )
            else:
                session.warm(_warming(self.variant, self.bundle.report.plan.shapes))

    def _test(self, predictor: Predictor) -> None:
        reference = self.bundle.reference()
        rows = reference.rows[:_TEST_ROWS]
        items = len(rows)
        signature = predictor.session.spec.signature
        encoded = predictor.encode(list(rows))
        ends = {spec.name: signature.count(spec, encoded.batch) for spec in signature.outputs}
        outputs = {name: value[: ends[name]] for name, value in reference.outputs.items()}
        expected = expect(predictor, rows, Silent(), outputs)
        entries = (entry for entry in self.bundle.manifest.variants if entry.name == self.variant.name)
        measured = next((entry.agreement.value for entry in entries), 1.0)
        gate = Gate(min_agreement=max(0.0, measured - _TEST_SLACK))
        verdict = verify(predictor, self.variant.name, expected, gate, Silent())
        if not verdict.passed:
            raise AccuracyError(
                f"{self.name} does not answer {items} of its own rows like the original: {verdict.reason}"
            )


def _warming(variant: Variant, shapes: Shapes) -> list[Shape]:
    """The smallest and the usual one; on a GPU all, since a shape that is new there takes long."""
    if variant.device != CPU:
        return shapes.grid()
    return [Shape(shapes.batch.min, shapes.sequence.min), shapes.optimal]


def characters(given: object) -> int:
    if isinstance(given, str):
        return len(given)
    if isinstance(given, Mapping):
        given = list(given.values())
    return sum(map(characters, given)) if isinstance(given, list | tuple) else 0


def _arrange(artifact: Artifact, bundle: Bundle, settings: ModelSettings) -> tuple[int, int]:
    """Sessions, and threads of each; one on a GPU has one, which waits for it."""
    is_on_cpu = artifact.variant.device == CPU
    cores = usable_cores() if is_on_cpu else 1
    if settings.instances is not None:
        return settings.instances, settings.threads or max(1, cores // settings.instances)
    if settings.threads is not None and is_on_cpu:
        return max(1, cores // settings.threads), settings.threads
    instances = choose_instances(artifact, bundle.manifest.digest, _MEASURED)
    return instances, settings.threads or max(1, cores // instances)


def _limits(session: Session, threads: int, settings: ModelSettings) -> Limits:
    """What a batch may have: as much as stays in the caches, or keeps a GPU busy, where it is not given."""
    if isinstance(session, HasSizes):
        tokens = min(settings.batch_tokens or _TOKENS_PER_GPU, session.most_tokens)
        return replace(settings.limits, tokens_per_batch=session.rounded(tokens), rounded=session.rounded)
    is_on_cpu = session.spec.device == CPU
    tokens = settings.batch_tokens or (_TOKENS_PER_THREAD * threads if is_on_cpu else settings.limits.tokens_per_batch)
    return replace(settings.limits, tokens_per_batch=tokens)
