"""Predict in-process: tokenizer, task and session. `hasten.load` returns a Predictor."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

from hasten.backends import BACKENDS, Artifact, RunOptions, Session
from hasten.bounded_session import BoundedSession
from hasten.bundle import Bundle, VariantEntry
from hasten.core.batching import batch_by_length
from hasten.core.errors import HastenError, UnsupportedError, translate_mismatch
from hasten.core.system.closing import Closing
from hasten.core.system.cpu_targets import incompatibility
from hasten.core.system.hardware import this_machine
from hasten.core.system.memory_limit import MemoryLimit
from hasten.core.tensors import Batch, IntArray, Outputs, check_counts, gather
from hasten.core.text.tokenizer import Tokenizer
from hasten.core.variant import CPU, Support
from hasten.tasks import TASKS, Encoded, TaskSpec

logger = logging.getLogger("hasten")


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
        encoded = self.task.encode(self.task.parse(payload), self.tokenizer, options)
        if encoded.truncated:
            logger.warning("%s", describe_truncation(encoded, self.tokenizer.spec.max_length))
        with translate_mismatch(f"the model does not fit its task, {self.spec.name}"):
            answers = self.task.decode(self.outputs(encoded), encoded, options)
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
        groups = batch_by_length(batch.lengths) if groups is None else groups
        if len(groups) == 1:  # one batch runs in the order of its rows, so there is nothing to gather
            outputs = self._run(batch, on_batch)
            check_counts(outputs, batch, signature)
            return outputs
        return gather([(rows, self._run(batch.take(rows), on_batch)) for rows in groups], batch, signature)

    def close(self) -> None:
        self.session.close()

    def _run(self, batch: Batch, on_batch: Callable[[int], None] | None) -> Outputs:
        with self._lock:
            outputs = self.session.run(batch)
        if on_batch is not None:
            on_batch(len(batch))
        return outputs


def describe_truncation(encoded: Encoded, max_length: int) -> str:
    """Return the warning about truncated texts."""
    numbers = sorted({int(encoded.item_of_row[row]) + 1 for row in encoded.truncated})
    subject = f"text {numbers[0]} was" if len(numbers) == 1 else f"{len(numbers)} texts (first: {numbers[0]}) were"
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
