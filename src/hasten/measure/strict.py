"""Loading a bundle that proves itself first, on this machine, against the original's stored answers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

from hasten.backends import Artifact, RunOptions
from hasten.bundle import Bundle
from hasten.core.errors import AccuracyError, StageError, UnsupportedError
from hasten.core.plan import Gate
from hasten.core.progress import Silent
from hasten.core.report import Candidate, Status, Verdict
from hasten.generation.generator import Generator, generator_of
from hasten.measure.fault import with_fault
from hasten.measure.verify import Expectation, batch_sizes, expect, verify
from hasten.measure.writing import judge_decoder
from hasten.measure.writing_reference import stored_sample
from hasten.predictor import Predictor, open_session, probe, required

logger = logging.getLogger("hasten")

# Enough to see that instructions or a library compute otherwise; where these few do not pass, all of them decide.
_FEW = 64


def open_proven(bundle: Bundle, variant: str | None, options: RunOptions) -> Predictor | Generator:
    """The first variant, in order of speed, that runs here and answers like the original, at last the graph.

    Models that write have none. Every one passed over is named; one that was asked for by name is an error where it
    does not.
    """
    refused: list[Candidate] = []
    artifacts = iter([required(bundle, bundle.entry(variant))]) if variant else _runnable(bundle, refused)
    for artifact in artifacts:
        try:
            opened = _open(bundle, artifact, options)
        except StageError as error:
            if variant is not None:
                raise
            refused.append(Candidate(artifact.variant.name, Status.FAILED, error.message))
            continue
        try:
            if isinstance(opened, Generator):
                verdict = _prove_writing(opened, artifact, bundle)
            else:
                verdict = _prove(opened, artifact, bundle, options)
        except BaseException:
            opened.close()
            raise
        if verdict.passed:
            logger.info("%s answers like the original here: %s", artifact.variant, verdict.reason)
            _tell(refused, artifact)
            return opened
        opened.close()
        refused.append(Candidate(artifact.variant.name, Status.INACCURATE, verdict.reason, verdict))
    if all(candidate.status is Status.UNAVAILABLE for candidate in refused):
        raise UnsupportedError(f"no variant of {bundle.path} runs here: {refused[-1].reason}")
    wrong = f"{variant} does not answer" if variant else "no variant answers"
    raise AccuracyError(
        f"{wrong} like the original here ({bundle.path}): {refused[-1].reason}",
        hint=f"hasten verify {bundle.path} shows all of them",
        candidates=refused,
    )


def _runnable(bundle: Bundle, refused: list[Candidate]) -> Iterator[Artifact]:
    for entry in bundle.manifest.variants:
        support = probe(entry)
        if support.ok:
            yield bundle.artifact(entry)
        else:
            refused.append(Candidate(entry.name, Status.UNAVAILABLE, support.reason))
    if bundle.manifest.graphs:
        yield bundle.graph()


def _open(bundle: Bundle, artifact: Artifact, options: RunOptions) -> Predictor | Generator:
    if bundle.manifest.generation is not None:
        return generator_of(bundle, artifact, options)
    return Predictor(bundle.manifest.task, bundle.tokenizer(), open_session(artifact, options))


def _tell(refused: list[Candidate], used: Artifact) -> None:
    for candidate in refused:
        wrong = "answer like the original" if candidate.status is Status.INACCURATE else "run"
        logger.warning(
            "passing over %s, which does not %s here: %s; using %s instead",
            candidate.variant,
            wrong,
            candidate.reason,
            used.variant,
        )


def _prove(predictor: Predictor, artifact: Artifact, bundle: Bundle, options: RunOptions) -> Verdict:
    """A few rows by the agreement they must keep; if that does not do, all of them, as `hasten verify` judges."""
    about, stored, name = bundle.manifest, bundle.reference(), artifact.variant.name
    every = expect(predictor, stored.rows, Silent(), stored.outputs, about.gate.metric)
    every = replace(every, precision=about.graph_precision)
    few = Expectation(
        predictor.encode(list(stored.rows[:_FEW])), every.first(_FEW, about.signature), precision=about.graph_precision
    )
    verdict = verify(predictor, name, few, Gate(about.gate.min_agreement), Silent())
    if not verdict.passed:
        verdict = verify(predictor, name, every, about.gate, Silent(), batch_sizes(bundle, name))
    return with_fault(verdict, artifact, every.encoded.batch, options)


def _prove_writing(generator: Generator, artifact: Artifact, bundle: Bundle) -> Verdict:
    """All the answers there are, before anybody asks it: they are few, and written together. No text is read."""
    variant, gate = artifact.variant, Gate(bundle.manifest.gate.min_agreement)
    sample = replace(stored_sample(bundle), texts=())
    return judge_decoder(generator.decoder, variant.name, variant.precision, sample, gate, Silent())
