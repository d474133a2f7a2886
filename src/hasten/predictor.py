"""Predict in-process: tokenizer, task and session. `hasten.load` returns a Predictor."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import cached_property
from typing import Any, TypeVar

from hasten.backends import BACKENDS, Artifact, RunOptions, Session, SupportsPipelining
from hasten.bounded_session import BoundedSession
from hasten.bundle import Bundle, VariantEntry
from hasten.core.batching import MAX_ROWS, batch_by_length, batch_in_order, growing_chunks
from hasten.core.errors import HastenError, InputError, UnsupportedError, translate_mismatch
from hasten.core.system.closing import Closing
from hasten.core.system.cpu_targets import incompatibility
from hasten.core.system.hardware import this_machine
from hasten.core.system.map_ahead import map_ahead
from hasten.core.system.memory_limit import MemoryLimit
from hasten.core.tensors import Batch, IntArray, Outputs, check_counts, gather
from hasten.core.text.tokenizer import Tokenizer
from hasten.core.variant import CPU, Support
from hasten.tasks import TASKS, Encoded, TaskSpec

Chunk = TypeVar("Chunk")

logger = logging.getLogger("hasten")

# Items that are encoded at a time: enough rows to batch by length, few enough to bound the memory.
_CHUNK_ITEMS = 4096
# The same for pipelined sessions; the first chunk is small, so that the session starts early.
_FIRST_PIPELINED_ITEMS, _PIPELINED_ITEMS = 256, 1024
# The outputs of a chunk, if each row has as many as the terms of a vocabulary (120 kB of 30,000).
_CHUNK_BYTES = 2**26
# While one call of the tokenizer uses all cores, another converts its results, which takes one core.
_PIPELINED_ENCODERS = 2


class Predictor(Closing):
    """Answers texts when called. Thread-safe: one call runs at a time."""

    def __init__(self, spec: TaskSpec, tokenizer: Tokenizer, session: Session) -> None:
        self.spec = spec
        self.task = TASKS.get(spec.name)
        self.tokenizer = tokenizer
        self.session = session
        self._lock = threading.Lock()

    def __call__(self, payload: object = None, **arguments: object) -> Any:
        """Return answers in the shape of the payload, one text or a list; other arguments are options of the task.

        If an item is more than a text, its fields may be passed by name: `predictor(question=…, context=…)`.
        """
        if payload is None and any(name in arguments for name in self.task.fields):
            payload = {name: arguments.pop(name) for name in self.task.fields if name in arguments}
        options = self.task.options(self.spec, arguments) if arguments else self.default_options
        items = self.task.parse(payload)
        chunks = self.chunks(len(items))
        encoded = self.task.encode(items, self.tokenizer, options) if len(chunks) == 1 else None
        with translate_mismatch(f"the model does not fit its task, {self.spec.name}"):
            if encoded is None:
                answers, truncated = self._answer_in_chunks(items, chunks, options)
            else:
                answers = self.task.decode(self.outputs(encoded), encoded, options)
                truncated = truncated_items(encoded)
        if truncated:
            logger.warning("%s", describe_truncation(truncated, self.tokenizer.spec.max_length))
        return self.task.present(payload, answers, options)

    @cached_property
    def default_options(self) -> Any:
        """Return the task's default options."""
        return self.task.options(self.spec, {})

    def encode(self, payload: object) -> Encoded:
        """Encode a payload with the default options of the task, for verification."""
        return self.task.encode(self.task.parse(payload), self.tokenizer, self.default_options)

    def outputs(
        self, encoded: Encoded, *, groups: list[IntArray] | None = None, on_batch: Callable[[int], None] | None = None
    ) -> Outputs:
        """Return raw outputs in the order of the rows; without `groups`, rows of similar length run together."""
        batch, signature = encoded.batch, self.session.spec.signature
        if groups is None:
            # A pipelined session splits a batch of any size by itself.
            is_pipelined = isinstance(self.session, SupportsPipelining)
            groups = batch_in_order(len(batch), len(batch)) if is_pipelined else batch_by_length(batch.lengths)
        if len(groups) == 1:  # one batch runs in the order of its rows, so there is nothing to gather
            outputs = self._run(batch, on_batch)
            check_counts(outputs, batch, signature)
            return outputs
        return gather([(rows, self._run(batch.take(rows), on_batch)) for rows in groups], batch, signature)

    def chunks(self, items: int) -> list[range]:
        """Split items into chunks for `run_in_chunks`."""
        limit = max(1, _CHUNK_BYTES // max(1, self.session.spec.signature.row_bytes))
        if isinstance(self.session, SupportsPipelining):
            return growing_chunks(items, min(_FIRST_PIPELINED_ITEMS, limit), min(_PIPELINED_ITEMS, limit))
        return growing_chunks(items, min(_CHUNK_ITEMS, limit), min(_CHUNK_ITEMS, limit))

    def run_in_chunks(
        self,
        chunks: Iterable[Chunk],
        encode: Callable[[Chunk], Encoded],
        *,
        max_rows: int = MAX_ROWS,
        on_batch: Callable[[int], None] | None = None,
    ) -> Generator[tuple[Encoded, Outputs], None, None]:
        """Yield the rows and raw outputs of each chunk, in order; only a few chunks are in memory at a time.

        `encode` runs on threads, ahead of the session, unless the session itself uses the CPU. Close the iterator to
        stop earlier than at its end. `max_rows` bounds the batches of sessions that are not pipelined. A chunk without
        rows has no outputs: it does not reach the session.
        """
        session = self.session
        if isinstance(session, SupportsPipelining):
            yield from self._run_pipelined(session, chunks, encode, on_batch)
            return
        # A CPU session has a thread on every core: tokenizing at the same time slows down each of its matmuls.
        encoders = 0 if session.spec.device == CPU else 1
        with closing(map_ahead(encode, chunks, encoders)) as encoded_chunks:
            for encoded in encoded_chunks:
                if not len(encoded.batch):
                    yield encoded, {}
                    continue
                groups = batch_by_length(encoded.batch.lengths, max_rows=max_rows)
                yield encoded, self.outputs(encoded, groups=groups, on_batch=on_batch)

    def close(self) -> None:
        self.session.close()

    def _run_pipelined(
        self,
        session: SupportsPipelining,
        chunks: Iterable[Chunk],
        encode: Callable[[Chunk], Encoded],
        on_batch: Callable[[int], None] | None,
    ) -> Generator[tuple[Encoded, Outputs], None, None]:
        running: deque[Encoded] = deque()

        def batches(encoded_chunks: Iterable[Encoded]) -> Iterator[Batch]:
            for encoded in encoded_chunks:
                running.append(encoded)
                if len(encoded.batch):
                    yield encoded.batch

        with (
            self._lock,
            closing(map_ahead(encode, chunks, _PIPELINED_ENCODERS)) as encoded_chunks,
            closing(session.run_many(batches(encoded_chunks))) as results,
        ):
            for outputs in results:
                while not len(running[0].batch):
                    yield running.popleft(), {}
                encoded = running.popleft()
                check_counts(outputs, encoded.batch, self.session.spec.signature)
                if on_batch is not None:
                    on_batch(len(encoded.batch))
                yield encoded, outputs
            for encoded in running:
                yield encoded, {}

    def _answer_in_chunks(
        self, items: Sequence[Any], chunks: Sequence[range], options: Any
    ) -> tuple[list[Any], set[int]]:
        """Return one answer per item, and the items that were truncated."""

        def encode(chunk: range) -> Encoded:
            try:
                return self.task.encode(items[chunk.start : chunk.stop], self.tokenizer, options)
            except InputError:
                # The position of an invalid item in the message counts from the first item of all.
                self.task.encode(items[: chunk.stop], self.tokenizer, options)
                raise

        answers: list[Any] = []
        truncated: set[int] = set()
        with closing(self.run_in_chunks(chunks, encode)) as results:
            for encoded, outputs in results:
                truncated |= {len(answers) + item for item in truncated_items(encoded)}
                answers += self.task.decode(outputs, encoded, options)
        return answers, truncated

    def _run(self, batch: Batch, on_batch: Callable[[int], None] | None) -> Outputs:
        with self._lock:
            outputs = self.session.run(batch)
        if on_batch is not None:
            on_batch(len(batch))
        return outputs


def truncated_items(encoded: Encoded) -> set[int]:
    """Return the items of which a row was truncated."""
    return {int(encoded.item_of_row[row]) for row in encoded.truncated}


def describe_truncation(items: set[int], max_length: int) -> str:
    """Return the warning about truncated texts."""
    first = min(items) + 1
    subject = f"text {first} was" if len(items) == 1 else f"{len(items)} texts (first: {first}) were"
    return f"{subject} truncated to the model's limit of {max_length} tokens"


def open_predictor(bundle: Bundle, variant: str | None, options: RunOptions) -> Predictor:
    """Open a variant, by default the fastest that runs here."""
    artifact = choose_artifact(bundle, variant)
    return Predictor(bundle.manifest.task, bundle.tokenizer(), open_session(artifact, options))


def choose_artifact(bundle: Bundle, variant: str | None) -> Artifact:
    """Return a variant, by default the fastest that runs here; log if it was verified on another machine."""
    artifact = require_variant(bundle, bundle.entry(variant)) if variant else first_runnable_variant(bundle)
    _warn_other_machine(bundle, artifact)
    return artifact


def open_session(artifact: Artifact, options: RunOptions) -> Session:
    """Open a variant, or raise UnsupportedError if it does not run here."""
    backend = BACKENDS.get(artifact.variant.backend)
    support = backend.probe(this_machine(), artifact.variant)
    if not support.ok:
        raise UnsupportedError(f"{artifact.variant} does not run here: {support.reason}", hint=support.hint or None)
    with translate_mismatch(f"{artifact.variant} does not fit its bundle"):
        session = backend.open(artifact, options)
    if options.max_memory is not None and artifact.variant.device != CPU:
        logger.warning("the memory limit does not bound %s, which runs on a GPU", artifact.variant)
    if options.max_memory is None or artifact.variant.device != CPU:
        return session
    with ExitStack() as on_error:
        on_error.callback(session.close)
        bounded = BoundedSession(session, MemoryLimit(options.max_memory))
        on_error.pop_all()
    return bounded


def probe(entry: VariantEntry) -> Support:
    """Return whether a variant of a bundle runs here; a missing package is a reason like any other."""
    try:
        support = BACKENDS.get(entry.backend).probe(this_machine(), entry.variant)
    except HastenError as error:
        return Support.no(error.message)
    reason = incompatibility(entry.instructions, this_machine())
    return Support.no(reason) if support.ok and reason is not None else support


def require_variant(bundle: Bundle, entry: VariantEntry) -> Artifact:
    """Return a variant that was requested by name; if it does not run here, the error names one that does."""
    support = probe(entry)
    if not support.ok:
        other = next((other.name for other in bundle.manifest.variants if probe(other).ok), None)
        hint = support.hint or (f"{other} of the same bundle runs here" if other is not None else None)
        raise UnsupportedError(f"{entry.name} does not run here: {support.reason}", hint=hint)
    return bundle.artifact(entry)


def first_runnable_variant(bundle: Bundle) -> Artifact:
    """Return the fastest variant that runs here; skipped ones are logged.

    If none runs, the graph remains, which the base installation runs.
    """
    skipped: list[tuple[str, Support]] = []
    for entry in bundle.manifest.variants:
        support = probe(entry)
        if support.ok:
            _log_skipped(skipped, f"; using {entry.name} instead")
            return bundle.artifact(entry)
        skipped.append((entry.name, support))
    _log_skipped(skipped)
    if not bundle.manifest.graphs:
        raise UnsupportedError("no variant of the bundle runs here, and it has no portable graph to run instead")
    logger.warning("using the bundle's %s graph, which is slower", bundle.manifest.graph_precision)
    return bundle.graph()


def _log_skipped(skipped: Sequence[tuple[str, Support]], suffix: str = "") -> None:
    for name, support in skipped:
        hint = f" ({support.hint})" if support.hint else ""
        logger.warning("skipping %s, which does not run here: %s%s%s", name, support.reason, hint, suffix)


def _warn_other_machine(bundle: Bundle, artifact: Artifact) -> None:
    """Log if other CPU instructions or library versions than at build time may change the results."""
    built, current = bundle.manifest.machine, this_machine()
    packages = BACKENDS.get(artifact.variant.backend).requires
    if built.instructions != current.instructions:
        difference = f"on {built.cpu}, and this is {current.cpu}"
    elif changed := [name for name in packages if built.libraries.get(name) != current.libraries.get(name)]:
        name = changed[0]
        difference = f"with {name} {built.libraries.get(name)}, and this is {current.libraries.get(name)}"
    else:
        return
    logger.info("%s was verified %s: --strict, or hasten verify, verifies it here", artifact.variant, difference)
