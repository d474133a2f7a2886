"""Proving a finished bundle on this machine: every file, then every variant, by the original's stored answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol

from hasten.backends import Artifact, RunOptions
from hasten.bundle import Bundle
from hasten.core.errors import PlanError
from hasten.core.generation import TEXT_GENERATION
from hasten.core.plan import Gate
from hasten.core.progress import Progress
from hasten.core.report import Candidate, Status, Verdict
from hasten.core.variant import Precision
from hasten.generation.generator import SLOTS, open_decoder
from hasten.measure.fault import with_fault
from hasten.measure.rows import check_rows
from hasten.measure.verify import GRAPH, batch_sizes, expect, verify
from hasten.measure.writing import Read, check_gate, judge_decoder, perplexity
from hasten.measure.writing_reference import encoded, prompts_of, stored_sample, texts_of
from hasten.predictor import Predictor, open_session, probe, required
from hasten.tasks import TASKS, Row

logger = logging.getLogger("hasten")


@dataclass(frozen=True, slots=True)
class _Asked:
    bundle: Bundle
    rows: Sequence[Row] | None
    # What is asked for, and that with the rest as the bundle has it.
    wanted: Gate
    gate: Gate
    options: RunOptions
    progress: Progress

    @property
    def needing(self) -> str | None:
        """The option that can be met only where answers can be told right from wrong."""
        return self.wanted.needing_labels


class _Judge(Protocol):
    """What variants are held against, ready to be asked about each."""

    @property
    def first(self) -> Sequence[Candidate]:
        """What was judged on the way to it."""
        ...

    def __call__(self, artifact: Artifact) -> Verdict: ...


def reverify(
    bundle: Bundle,
    rows: Sequence[Row] | None,
    gate: Gate,
    names: Sequence[str],
    threads: int | None,
    progress: Progress,
) -> list[Candidate]:
    """Judge every variant, or those that are named, on the stored rows or on the user's.

    A variant that cannot run here is reported, and an error if it was asked for.
    """
    about = bundle.manifest
    kept = Gate(
        about.gate.min_agreement if gate.min_agreement is None else gate.min_agreement,
        about.gate.max_drop if gate.max_drop is None else gate.max_drop,
        about.gate.metric if gate.metric is None else gate.metric,
    )
    asked = _Asked(bundle, rows, gate, kept, RunOptions(threads), progress)
    judge: _Judge = _Answering(asked) if about.generation is None else _Writing(asked)
    candidates = list(judge.first)
    for entry in [bundle.entry(name) for name in names] or about.variants:
        support = probe(entry)
        if not support.ok and not names:
            candidates.append(Candidate(entry.name, Status.UNAVAILABLE, support.reason))
            continue
        candidates.append(_candidate(judge(required(bundle, entry))))
    return candidates


def judged_rows(bundle: Bundle, rows: Sequence[Row] | None) -> Sequence[Row]:
    """The rows that verdicts count by: the user's or the stored ones; of a model that writes, what it answered."""
    if bundle.manifest.generation is not None:
        return prompts_of(stored_sample(bundle), bundle.tokenizer())
    return rows or bundle.reference().rows


class _Answering:
    """On rows of the user's against the graph, which must itself reproduce the stored answers first."""

    def __init__(self, asked: _Asked) -> None:
        bundle, rows, gate, progress = asked.bundle, asked.rows, asked.gate, asked.progress
        spec = bundle.manifest.task
        if rows is not None:
            # Before anything runs: rows that cannot be read, and labels that cannot be judged by.
            for note in check_rows(TASKS.get(spec.name), spec, rows, gate, asked.needing):
                logger.warning("%s", note)
        bundle.check()
        self._asked, self._tokenizer, stored = asked, bundle.tokenizer(), bundle.reference()
        with open_session(bundle.graph(), asked.options) as session:
            graph = Predictor(spec, self._tokenizer, session)
            expected = expect(graph, stored.rows, progress, stored.outputs, gate.metric)
            self.first = [_candidate(verify(graph, GRAPH, expected, gate, progress))]
            if rows is not None:
                expected = expect(graph, rows, progress, metric=gate.metric)
        if asked.needing is not None and expected.metric is None:
            raise PlanError(f"{asked.needing} needs labels, and these rows have none", hint="--data with labelled rows")
        self._expected = expected

    def __call__(self, artifact: Artifact) -> Verdict:
        asked, expected, name = self._asked, self._expected, artifact.variant.name
        with open_session(artifact, asked.options) as session:
            predictor = Predictor(asked.bundle.manifest.task, self._tokenizer, session)
            sizes = batch_sizes(asked.bundle, name)
            verdict = verify(predictor, name, expected, asked.gate, asked.progress, sizes)
        return with_fault(verdict, artifact, expected.encoded.batch, asked.options)


class _Writing:
    """Always along the stored answers; how likely texts of the user's are, the fp32 variant says for the original.

    It must write the stored answers first, word by word.
    """

    first: Sequence[Candidate] = ()

    def __init__(self, asked: _Asked) -> None:
        bundle, needing = asked.bundle, asked.needing
        check_gate(asked.wanted, bundle.manifest.task.name)
        texts = _texts(bundle, asked.rows) if asked.rows is not None else None
        bundle.check()
        self._asked, self._sample = asked, stored_sample(bundle)
        self._exact: Verdict | None = None
        if texts is not None:
            self._sample = replace(self._sample, texts=texts, metric=None)
            self._exact = self._judge_exact()
            if self._exact is not None and self._exact.passed:
                self._sample = replace(self._sample, metric=self._exact.metric)
        if needing is not None and self._sample.metric is None:
            if texts is None:
                raise PlanError(f"{needing} needs texts to read, and this bundle keeps none", hint="--data FILE")
            raise PlanError(
                f"{needing} needs to know how likely the original finds these texts, and of this bundle no fp32 variant"
                " proves itself here",
                hint="build it with --keep all",
            )

    def __call__(self, artifact: Artifact) -> Verdict:
        if self._exact is not None and self._exact.variant == artifact.variant.name:
            return replace(self._exact, reference_metric=self._sample.metric)
        return self._judge(artifact)

    def _judge_exact(self) -> Verdict | None:
        entries = self._asked.bundle.manifest.variants
        found = (entry for entry in entries if entry.precision is Precision.FP32 and probe(entry).ok)
        entry = next(found, None)
        return None if entry is None else self._judge(self._asked.bundle.artifact(entry))

    def _judge(self, artifact: Artifact) -> Verdict:
        asked, variant = self._asked, artifact.variant
        with closing(open_decoder(artifact, asked.options, SLOTS)) as decoder:
            verdict = judge_decoder(decoder, variant.name, variant.precision, self._sample, asked.gate, asked.progress)
        built = asked.bundle.entry(variant.name).metric
        if asked.rows is None or built is None:
            return verdict
        return replace(verdict, notes=(f"{perplexity(built)} on the texts it was built with",))


def _texts(bundle: Bundle, rows: Sequence[Row]) -> tuple[Read, ...]:
    task, tokenizer = bundle.manifest.task.name, bundle.tokenizer()
    if task != TEXT_GENERATION:
        raise PlanError(f"--data is for texts to find likely, and {task} reads none by itself", hint="leave it out")
    found, cut = encoded(texts_of(rows), tokenizer)
    if cut:
        limit = tokenizer.spec.max_length
        logger.warning("%d of %d texts were cut to the model's limit of %d tokens", cut, len(rows), limit)
    return tuple(map(Read.of, found))


def _candidate(verdict: Verdict) -> Candidate:
    return Candidate(verdict.variant, Status.ELIGIBLE if verdict.passed else Status.INACCURATE, verdict.reason, verdict)
