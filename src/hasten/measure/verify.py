"""The gate: a variant that does not answer like the original is not eligible, however fast it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hasten.backends import RunOptions
from hasten.bundle import Bundle
from hasten.core.errors import PlanError
from hasten.core.plan import Gate
from hasten.core.progress import Progress, step
from hasten.core.report import Agreement, Candidate, Metric, Status, Verdict
from hasten.core.tensors import Outputs, Signature
from hasten.core.variant import Precision
from hasten.measure.fault import NOT_FINITE, with_fault
from hasten.predictor import Predictor, open_session, probe, required
from hasten.tasks import TASKS, AnyTask, Encoded, Row

# fp32 differs between runtimes only by the order of additions; past this something is wrong, not imprecise.
FP32_TOLERANCE = 1e-3
# The name under which a bundle's own graph is reported.
GRAPH = "graph"


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a variant is held against: encoded rows, the original's outputs and, where there are labels, its metric."""

    encoded: Encoded
    outputs: Outputs
    gold: Sequence[object] | None = None
    metric: Metric | None = None
    # What the original computes in: rounding of its own is no fault of a variant that rounds less.
    precision: str = Precision.FP32

    def first(self, items: int, signature: Signature) -> Outputs:
        """The outputs of the first items alone."""
        rows = int((self.encoded.item_of_row < items).sum())
        batch = self.encoded.batch
        ends = {spec.name: int(signature.counts(spec, batch)[:rows].sum()) for spec in signature.outputs}
        return {name: value[: ends[name]] for name, value in self.outputs.items()}


def expect(
    predictor: Predictor,
    rows: Sequence[Row],
    progress: Progress,
    outputs: Outputs | None = None,
    metric: str | None = None,
) -> Expectation:
    """Let the original answer the rows, unless its outputs are given; `metric` is the one to go by."""
    task, spec = predictor.task, predictor.spec
    encoded = predictor.encode(list(rows))
    gold = task.gold(rows, spec)
    if outputs is None:
        outputs = run_rows(predictor, encoded, progress, "reference answers")
    scored = task.score(outputs, encoded, gold, spec) if gold is not None else None
    if scored is not None and metric is not None:
        scored = scored.named(metric)
    return Expectation(encoded, outputs, gold, scored, predictor.session.spec.precision)


def verify(predictor: Predictor, variant: str, expected: Expectation, gate: Gate, progress: Progress) -> Verdict:
    task, spec = predictor.task, predictor.spec
    outputs = run_rows(predictor, expected.encoded, progress, f"verify {variant}")
    agreement = task.agree(outputs, expected.outputs, expected.encoded, spec)
    metric = None
    # Of outputs that are no numbers there is no score, and NaN has no place in a report.
    if expected.gold is not None and expected.metric is not None and agreement.is_finite:
        metric = task.score(outputs, expected.encoded, expected.gold, spec).named(expected.metric.name)
    precision = predictor.session.spec.precision if expected.precision == Precision.FP32 else expected.precision
    passed, reason = judge(agreement, metric, expected.metric, precision, gate, task)
    return Verdict(variant, passed, reason, agreement, metric, expected.metric)


def judge(
    agreement: Agreement,
    metric: Metric | None,
    reference: Metric | None,
    precision: str,
    gate: Gate,
    task: AnyTask,
) -> tuple[bool, str]:
    """Pass or not, and the sentence that says why."""
    if not agreement.is_finite:
        return False, NOT_FINITE
    if precision == Precision.FP32:
        allowed = FP32_TOLERANCE * max(1.0, agreement.scale)
        passed = agreement.max_error <= allowed
        return passed, f"largest error {agreement.max_error:.1e} {_sign(passed)} {allowed:.1e} for fp32"
    if gate.max_drop is not None and metric is not None and reference is not None:
        drop = 100 * (reference.value - metric.value)
        passed = drop <= gate.max_drop + 1e-9
        reason = f"{metric.name} drop {drop:.2f} points {_sign(passed)} {gate.max_drop:g}"
        if not passed or gate.min_agreement is None:
            return passed, reason
    least = task.min_agreement if gate.min_agreement is None else gate.min_agreement
    passed = agreement.value >= least
    # Rounded down: 0.99496 must not read as 0.9950 < 0.995.
    shown = agreement.value if passed else float(np.floor(agreement.value * 1e4)) / 1e4
    return passed, f"{agreement.measure} {shown:.4f} {'≥' if passed else '<'} {least:g}"


def reverify(
    bundle: Bundle,
    rows: Sequence[Row] | None,
    gate: Gate,
    names: Sequence[str],
    threads: int | None,
    progress: Progress,
) -> list[Candidate]:
    """Prove a finished bundle on this machine: every file, then every variant.

    Against the stored answers of the original or, on rows of the user's, against the graph, which must itself
    reproduce the stored answers first. A variant that cannot run here is reported, and an error if it was asked for.
    """
    about, options = bundle.manifest, RunOptions(threads)
    if rows is not None:
        # Before anything runs: rows that cannot be read, and labels that cannot be judged by.
        task = TASKS.get(about.task.name)
        task.parse(rows)
        task.gold(rows, about.task)
    bundle.check()
    asked = {"--max-drop": gate.max_drop, "--metric": gate.metric}
    needing = next((flag for flag, value in asked.items() if value is not None), None)
    gate = Gate(
        about.gate.min_agreement if gate.min_agreement is None else gate.min_agreement,
        about.gate.max_drop if gate.max_drop is None else gate.max_drop,
        about.gate.metric if gate.metric is None else gate.metric,
    )
    tokenizer, stored = bundle.tokenizer(), bundle.reference()
    candidates = []
    with open_session(bundle.graph(), options) as session:
        graph = Predictor(about.task, tokenizer, session)
        expected = expect(graph, stored.rows, progress, stored.outputs, gate.metric)
        verdict = verify(graph, GRAPH, expected, gate, progress)
        candidates.append(_candidate(verdict))
        if rows is not None:
            expected = expect(graph, rows, progress, metric=gate.metric)
    if needing is not None and expected.metric is None:
        raise PlanError(f"{needing} needs labels, and these rows have none", hint="--data with labelled rows")
    for entry in [bundle.entry(name) for name in names] or about.variants:
        support = probe(entry)
        if not support.ok and not names:
            candidates.append(Candidate(entry.name, Status.UNAVAILABLE, support.reason))
            continue
        artifact = required(bundle, entry)
        with open_session(artifact, options) as session:
            predictor = Predictor(about.task, tokenizer, session)
            verdict = verify(predictor, entry.name, expected, gate, progress)
        candidates.append(_candidate(with_fault(verdict, artifact, expected.encoded.batch, options)))
    return candidates


def _candidate(verdict: Verdict) -> Candidate:
    return Candidate(verdict.variant, Status.ELIGIBLE if verdict.passed else Status.INACCURATE, verdict.reason, verdict)


def _sign(passed: bool) -> str:
    return "≤" if passed else ">"


def run_rows(predictor: Predictor, encoded: Encoded, progress: Progress, what: str) -> Outputs:
    with step(progress, what, total=len(encoded.batch)):
        return predictor.outputs(encoded, on_batch=lambda rows: progress.advance(rows))
