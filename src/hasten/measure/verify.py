"""The gate: a variant that does not answer like the original is not eligible, however fast it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hasten.bundle import Bundle
from hasten.core.batching import in_order
from hasten.core.plan import Gate
from hasten.core.progress import Progress, step
from hasten.core.report import Agreement, AtBatch, Metric, Verdict
from hasten.core.statistics import Interval, paired_drop
from hasten.core.tensors import FloatArray, IntArray, Outputs, Signature
from hasten.core.variant import Precision
from hasten.measure.fault import NOT_FINITE
from hasten.measure.rows import too_few_rows
from hasten.predictor import Predictor
from hasten.tasks import AnyTask, Encoded, Row

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
    # What the metric is made of, a row an item.
    marks: FloatArray | None = None

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
    marks = task.marks(outputs, encoded, gold, spec) if gold is not None else None
    scored = task.metric(marks, spec) if marks is not None else None
    if scored is not None and metric is not None:
        scored = scored.named(metric)
    return Expectation(encoded, outputs, gold, scored, predictor.session.spec.precision, marks)


@dataclass(frozen=True, slots=True)
class _Answered:
    """A variant's answers in batches of one size, judged."""

    size: int | None
    agreement: Agreement
    marks: FloatArray | None = None
    metric: Metric | None = None


def verify(
    predictor: Predictor,
    variant: str,
    expected: Expectation,
    gate: Gate,
    progress: Progress,
    batch_sizes: Sequence[int] = (),
) -> Verdict:
    """Judge a variant once or, where its answers depend on what else is in a batch, at each of these sizes.

    Then the rows come in their own order, as they would to a server, and the worst counts: the lowest agreement, and
    the largest drop, each at whatever size it is found.
    """
    task, spec = predictor.task, predictor.spec
    tried = [_answered(predictor, variant, expected, progress, size) for size in batch_sizes or (None,)]
    agreed = min(tried, key=lambda answered: (answered.agreement.is_finite, answered.agreement.value))
    # Of outputs that are no numbers there is no metric, and what is sometimes none is none.
    scored = min(tried, key=lambda answered: -np.inf if answered.metric is None else answered.metric.value)
    precision = predictor.session.spec.precision if expected.precision == Precision.FP32 else expected.precision
    interval = None
    # What is held to be equal is not judged by its drop.
    if scored.metric is not None and expected.marks is not None and precision != Precision.FP32:
        assert scored.marks is not None
        name = scored.metric.name
        interval = paired_drop(lambda marks: task.metric(marks, spec).of(name), expected.marks, scored.marks)
    sizes = (agreed.size, scored.size)
    passed, reason = judge(agreed.agreement, scored.metric, expected.metric, precision, gate, task, interval, sizes)
    return Verdict(
        variant=variant,
        passed=passed,
        reason=reason,
        agreement=agreed.agreement,
        metric=scored.metric,
        reference_metric=expected.metric,
        drop_interval=interval,
        by_batch=tuple(_at_batch(answered, expected) for answered in tried if answered.size is not None),
        notes=too_few_rows(interval, scored.metric, gate),
    )


def _answered(
    predictor: Predictor, variant: str, expected: Expectation, progress: Progress, size: int | None
) -> _Answered:
    task, spec, encoded = predictor.task, predictor.spec, expected.encoded
    groups = None if size is None else in_order(len(encoded.batch), size)
    outputs = run_rows(predictor, encoded, progress, f"verify {variant}{_at(size)}", groups)
    agreement = task.agree(outputs, expected.outputs, encoded, spec)
    if expected.gold is None or expected.metric is None or not agreement.is_finite:
        return _Answered(size, agreement)
    marks = task.marks(outputs, encoded, expected.gold, spec)
    return _Answered(size, agreement, marks, task.metric(marks, spec).named(expected.metric.name))


def _at_batch(answered: _Answered, expected: Expectation) -> AtBatch:
    agreement, metric, reference = answered.agreement, answered.metric, expected.metric
    drop = None if metric is None or reference is None else 100 * (reference.value - metric.value)
    return AtBatch(answered.size or 0, agreement.value, agreement.flips, drop)


def judge(
    agreement: Agreement,
    metric: Metric | None,
    reference: Metric | None,
    precision: str,
    gate: Gate,
    task: AnyTask,
    interval: Interval | None = None,
    sizes: tuple[int | None, int | None] = (None, None),
) -> tuple[bool, str]:
    """Pass or not, and the sentence that says why; `sizes` are the batch sizes of agreement and metric."""
    if not agreement.is_finite:
        return False, NOT_FINITE
    if precision == Precision.FP32:
        allowed = FP32_TOLERANCE * max(1.0, agreement.scale)
        passed = agreement.max_error <= allowed
        return passed, f"largest error {agreement.max_error:.1e} {_sign(passed)} {allowed:.1e} for fp32"
    if gate.max_drop is not None and metric is not None and reference is not None:
        drop = 100 * (reference.value - metric.value)
        passed = drop <= gate.max_drop + 1e-9
        bound = f"{_sign(passed)} {gate.max_drop:g}{_at(sizes[1])}"
        reason = f"{metric.name} drop {points(drop)} points{chance(interval)} {bound}"
        if not passed or gate.min_agreement is None:
            return passed, reason
    least = task.min_agreement if gate.min_agreement is None else gate.min_agreement
    passed = agreement.value >= least
    # Rounded down: 0.99496 must not read as 0.9950 < 0.995.
    shown = agreement.value if passed else float(np.floor(agreement.value * 1e4)) / 1e4
    return passed, f"{agreement.measure} {shown:.4f} {'≥' if passed else '<'} {least:g}{_at(sizes[0])}"


def batch_sizes(bundle: Bundle, variant: str) -> tuple[int, ...]:
    """At which sizes one of its variants is judged: none where its answers do not depend on the rest of a batch."""
    depends = any(entry.depends_on_batch for entry in bundle.manifest.variants if entry.name == variant)
    return bundle.report.plan.shapes.batches if depends else ()


def _sign(passed: bool) -> str:
    return "≤" if passed else ">"


def points(value: float) -> str:
    """Of a metric, as people read them: no zero below zero, and a minus that is one."""
    return f"{round(value, 2) + 0.0:.2f}".replace("-", "−")


def chance(interval: Interval | None) -> str:
    """How far a drop may be chance, in brackets behind it; nothing where no answer differs."""
    if interval is None or interval.low == interval.high:
        return ""
    return f" ({points(interval.low)} to {points(interval.high)})"


def _at(size: int | None) -> str:
    return "" if size is None else f" at batch {size}"


def run_rows(
    predictor: Predictor, encoded: Encoded, progress: Progress, what: str, groups: list[IntArray] | None = None
) -> Outputs:
    with step(progress, what, total=len(encoded.batch)):
        return predictor.outputs(encoded, groups=groups, on_batch=lambda rows: progress.advance(rows))
