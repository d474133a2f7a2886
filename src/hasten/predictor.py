"""A model ready to answer: tokenizer, task and session. What `hasten.load` returns, what measure and server drive."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from hasten.backends import BACKENDS, Artifact, RunOptions, Session
from hasten.bundle import Bundle, VariantEntry
from hasten.core.batching import by_length
from hasten.core.closing import Closing
from hasten.core.errors import HastenError, UnsupportedError
from hasten.core.hardware import this_machine
from hasten.core.targets import why_not
from hasten.core.tensors import IntArray, Outputs, gather
from hasten.core.tokenizer import Tokenizer
from hasten.core.variant import Support
from hasten.tasks import TASKS, Encoded, TaskSpec

logger = logging.getLogger("hasten")


class Predictor(Closing):
    """Call it with texts. Safe to share between threads: one runs at a time."""

    def __init__(self, spec: TaskSpec, tokenizer: Tokenizer, session: Session) -> None:
        self.spec = spec
        self.task = TASKS.get(spec.name)
        self.tokenizer = tokenizer
        self.session = session
        self._lock = threading.Lock()

    def __call__(self, payload: object = None, **given: object) -> Any:
        """Answers in the shape of the payload: one text or a list of texts, options as the task knows them.

        Where an item is more than a text, its fields may be given by name: `answer(question=…, context=…)`.
        """
        if payload is None and any(name in given for name in self.task.fields):
            payload = {name: given.pop(name) for name in self.task.fields if name in given}
        options = self.task.options(self.spec, given)
        encoded = self.task.encode(self.task.parse(payload), self.tokenizer, options)
        if encoded.truncated:
            logger.warning("%s", describe_truncation(encoded, self.tokenizer.spec.max_length))
        answers = self.task.decode(self.outputs(encoded), encoded, options)
        return self.task.present(payload, answers, options)

    def encode(self, payload: object) -> Encoded:
        """Rows of tokens, the task's options at their defaults: what verification runs on."""
        return self.task.encode(self.task.parse(payload), self.tokenizer, self.task.options(self.spec, {}))

    def outputs(
        self,
        encoded: Encoded,
        *,
        groups: list[IntArray] | None = None,
        on_batch: Callable[[int], None] | None = None,
    ) -> Outputs:
        """Raw outputs in the order of the rows; rows of similar length run together unless `groups` says otherwise."""
        batch = encoded.batch
        parts = []
        for rows in groups if groups is not None else by_length(batch.lengths):
            with self._lock:
                outputs = self.session.run(batch if len(rows) == len(batch) == 1 else batch.take(rows))
            parts.append((rows, outputs))
            if on_batch is not None:
                on_batch(len(rows))
        return gather(parts, batch, self.session.spec.signature)

    def close(self) -> None:
        self.session.close()


def describe_truncation(encoded: Encoded, max_length: int) -> str:
    cut = sorted({int(encoded.item_of_row[row]) + 1 for row in encoded.truncated})
    which = f"text {cut[0]} was" if len(cut) == 1 else f"{len(cut)} texts (first: {cut[0]}) were"
    return f"{which} cut to the model's limit of {max_length} tokens"


def open_predictor(bundle: Bundle, variant: str | None, options: RunOptions) -> Predictor:
    artifact = required(bundle, bundle.entry(variant)) if variant else runnable(bundle)
    tell_other_machine(bundle, artifact)
    return Predictor(bundle.manifest.task, bundle.tokenizer(), open_session(artifact, options))


def open_session(artifact: Artifact, options: RunOptions) -> Session:
    backend = BACKENDS.get(artifact.variant.backend)
    support = backend.probe(this_machine(), artifact.variant)
    if not support.ok:
        raise UnsupportedError(f"{artifact.variant} does not run here: {support.reason}", hint=support.hint or None)
    return backend.open(artifact, options)


def probe(entry: VariantEntry) -> Support:
    """Whether a bundle's variant runs here; the backend of a package that is not installed says no like any other."""
    try:
        support = BACKENDS.get(entry.backend).probe(this_machine(), entry.variant)
    except HastenError as error:
        return Support.no(error.message)
    reason = why_not(entry.instructions, this_machine())
    return Support.no(reason) if support.ok and reason is not None else support


def required(bundle: Bundle, entry: VariantEntry) -> Artifact:
    """A variant that was asked for; where it does not run, the error names the one that does."""
    support = probe(entry)
    if not support.ok:
        other = next((other.name for other in bundle.manifest.variants if probe(other).ok), None)
        hint = support.hint or (f"{other} of the same bundle runs here" if other is not None else None)
        raise UnsupportedError(f"{entry.name} does not run here: {support.reason}", hint=hint)
    return bundle.artifact(entry)


def runnable(bundle: Bundle) -> Artifact:
    """The first variant, in order of speed, that this machine can run; every one passed over is named.

    Where none runs there is still the graph, which the base installation executes.
    """
    passed_over: list[tuple[str, Support]] = []
    for entry in bundle.manifest.variants:
        support = probe(entry)
        if support.ok:
            _tell(passed_over, f"; using {entry.name} instead")
            return bundle.artifact(entry)
        passed_over.append((entry.name, support))
    _tell(passed_over)
    if not bundle.manifest.graphs:
        raise UnsupportedError("no variant of the bundle runs here, and it has no portable graph to run instead")
    logger.warning("using the bundle's %s graph, which is slower", bundle.manifest.graph_precision)
    return bundle.graph()


def _tell(passed_over: Sequence[tuple[str, Support]], then: str = "") -> None:
    for name, support in passed_over:
        hint = f" ({support.hint})" if support.hint else ""
        logger.warning("passing over %s, which does not run here: %s%s%s", name, support.reason, hint, then)


def tell_other_machine(bundle: Bundle, artifact: Artifact) -> None:
    """Where other instructions or another version of the runtime may compute otherwise; a note for who looks for it."""
    built, here = bundle.manifest.machine, this_machine()
    packages = BACKENDS.get(artifact.variant.backend).requires
    if built.instructions != here.instructions:
        what = f"for {built.cpu}, and this is {here.cpu}"
    elif changed := [name for name in packages if built.libraries.get(name) != here.libraries.get(name)]:
        what = f"with {changed[0]} {built.libraries.get(changed[0])}, and this is {here.libraries.get(changed[0])}"
    else:
        return
    logger.info("%s was proven %s: --strict, or hasten verify, proves it here", artifact.variant, what)
