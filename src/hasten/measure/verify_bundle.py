"""Verify a bundle on this machine: the hash of every file, then every variant against the stored reference."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from hasten.backends import Artifact, RunOptions
from hasten.bundle import Bundle
from hasten.core.errors import translate_mismatch
from hasten.core.plan import Gate
from hasten.core.progress import Progress
from hasten.core.report import Candidate, Status, Verdict
from hasten.families import family_of_bundle
from hasten.generation.generator import Generator
from hasten.predictor import Predictor, probe, require_variant
from hasten.tasks import Row


@dataclass(frozen=True, slots=True)
class Verification:
    """The bundle to verify, and how."""

    bundle: Bundle
    gate: Gate
    options: RunOptions
    progress: Progress
    # The user's rows, instead of the stored ones.
    rows: Sequence[Row] | None = None
    # The bounds that the user set; `gate` takes the others from the bundle.
    user_gate: Gate = field(default_factory=Gate)


class Judge(ABC):
    """Judges variants against a reference that is prepared once; every model family has its own."""

    # The candidates that were judged while preparing the reference.
    preliminary: Sequence[Candidate] = ()

    @abstractmethod
    def __init__(self, verification: Verification) -> None:
        """Check the user's rows and prepare the reference."""

    @abstractmethod
    def __call__(self, artifact: Artifact) -> Verdict:
        """Open a variant and judge it."""

    @staticmethod
    @abstractmethod
    def judged_rows(bundle: Bundle, rows: Sequence[Row] | None) -> Sequence[Row]:
        """Return the rows that verdicts refer to; `rows` are the user's, if any."""

    @staticmethod
    @abstractmethod
    def judge_opened(opened: Predictor | Generator, artifact: Artifact, bundle: Bundle, options: RunOptions) -> Verdict:
        """Judge an opened variant by the stored reference, or by as much of it as suffices."""


def verify_bundle(
    bundle: Bundle,
    rows: Sequence[Row] | None,
    gate: Gate,
    names: Sequence[str],
    threads: int | None,
    progress: Progress,
) -> list[Candidate]:
    """Judge all variants, or the named ones, on the stored rows or on the user's.

    A variant that cannot run here is reported as unavailable; if it was named, it is an error.
    """
    manifest = bundle.manifest
    merged = Gate(
        manifest.gate.min_agreement if gate.min_agreement is None else gate.min_agreement,
        manifest.gate.max_drop if gate.max_drop is None else gate.max_drop,
        manifest.gate.metric if gate.metric is None else gate.metric,
    )
    verification = Verification(bundle, merged, RunOptions(threads), progress, rows, gate)
    mismatch = f"the parts of {bundle.path} do not fit together"
    with translate_mismatch(mismatch):
        judge = family_of_bundle(bundle).judge(verification)
    candidates = list(judge.preliminary)
    for entry in [bundle.entry(name) for name in names] or manifest.variants:
        support = probe(entry)
        if not support.ok and not names:
            candidates.append(Candidate(entry.name, Status.UNAVAILABLE, support.reason))
            continue
        with translate_mismatch(mismatch):
            candidates.append(to_candidate(judge(require_variant(bundle, entry))))
    return candidates


def to_candidate(verdict: Verdict) -> Candidate:
    """Return the entry of a report for a verdict."""
    return Candidate(verdict.variant, Status.ELIGIBLE if verdict.passed else Status.INACCURATE, verdict.reason, verdict)
