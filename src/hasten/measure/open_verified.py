"""Open the first variant of a bundle that reproduces the stored reference on this machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from hasten.backends import Artifact, RunOptions
from hasten.bundle import Bundle
from hasten.core.errors import AccuracyError, StageError, UnsupportedError
from hasten.core.report import Candidate, Status, Verdict
from hasten.families import family_of_bundle
from hasten.generation.generator import Generator
from hasten.predictor import Predictor, probe, require_variant

logger = logging.getLogger("hasten")


@dataclass(frozen=True, slots=True)
class Verified:
    """An opened variant, and how its answers on this machine compare with the reference."""

    opened: Predictor | Generator
    artifact: Artifact
    verdict: Verdict


def open_verified(bundle: Bundle, variant: str | None, options: RunOptions) -> Predictor | Generator:
    """Open the variant that `open_with_verdict` finds."""
    return open_with_verdict(bundle, variant, options).opened


def open_with_verdict(bundle: Bundle, variant: str | None, options: RunOptions) -> Verified:
    """Open the fastest variant that runs here and reproduces the reference; the graph is the last resort.

    Generative models have no such graph. Every skipped variant is logged. A variant that is requested by name and does
    not reproduce the reference is an error.
    """
    family = family_of_bundle(bundle)
    rejected: list[Candidate] = []
    artifacts = iter([require_variant(bundle, bundle.entry(variant))]) if variant else _runnable(bundle, rejected)
    for artifact in artifacts:
        try:
            opened = family.open(bundle, artifact, options)
        except StageError as error:
            if variant is not None:
                raise
            rejected.append(Candidate(artifact.variant.name, Status.FAILED, error.message))
            continue
        try:
            verdict = family.judge.judge_opened(opened, artifact, bundle, options)
        except BaseException:
            opened.close()
            raise
        if verdict.passed:
            logger.info("%s reproduces the reference answers here: %s", artifact.variant, verdict.reason)
            for skipped in rejected:
                failure = "reproduce the reference answers" if skipped.status is Status.INACCURATE else "run"
                message = "skipping %s, which does not %s here: %s; using %s instead"
                logger.warning(message, skipped.variant, failure, skipped.reason, artifact.variant)
            return Verified(opened, artifact, verdict)
        opened.close()
        rejected.append(Candidate(artifact.variant.name, Status.INACCURATE, verdict.reason, verdict))
    if all(candidate.status is Status.UNAVAILABLE for candidate in rejected):
        raise UnsupportedError(f"no variant of {bundle.path} runs here: {rejected[-1].reason}")
    subject = f"{variant} does not reproduce" if variant else "no variant reproduces"
    raise AccuracyError(
        f"{subject} the reference answers here ({bundle.path}): {rejected[-1].reason}",
        hint=f"hasten verify {bundle.path} shows all of them",
        candidates=rejected,
    )


def _runnable(bundle: Bundle, rejected: list[Candidate]) -> Iterator[Artifact]:
    for entry in bundle.manifest.variants:
        support = probe(entry)
        if support.ok:
            yield bundle.artifact(entry)
        else:
            rejected.append(Candidate(entry.name, Status.UNAVAILABLE, support.reason))
    if bundle.manifest.graphs:
        yield bundle.graph()
