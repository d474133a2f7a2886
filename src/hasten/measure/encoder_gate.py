"""The accuracy gate: a variant whose answers differ from the reference is not eligible, however fast it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hasten.bundle import Bundle
from hasten.core.batching import batch_in_order
from hasten.core.plan import Gate
from hasten.core.progress import Progress, step
from hasten.core.report import Agreement, AtBatch, Interval, Metric, Verdict
from hasten.core.tensors import FloatArray, IntArray, Outputs, Signature
from hasten.core.variant import Precision
from hasten.measure.evaluation_rows import too_few_rows
from hasten.measure.non_finite import NOT_FINITE
from hasten.metrics.statistics import paired_drop
from hasten.predictor import Predictor
from hasten.tasks import Encoded, Row

# fp32 differs between runtimes only by the order of additions; a larger error is a defect, not imprecision.
FP32_TOLERANCE = 1e-3
# The name under which the graph of a bundle is reported.
GRAPH = "graph"


@dataclass(frozen=True, slots=True)
class Expectation:
    """The reference of a variant: encoded rows, the outputs of the reference model and, with labels, its metric."""

    encoded: Encoded
    outputs: Outputs
    gold: Sequence[object] | None = None
    metric: Metric | None = None
    # The precision of the reference model: its rounding errors must not count against a variant that rounds less.
    precision: str = Precision.FP32
    # The numbers that the metric is computed from, one row per item.
    item_scores: FloatArray | None = None

    def first(self, items: int, signature: Signature) -> Outputs:
        """Return the outputs of the first items."""
        return self.between(0, items, signature)

    def between(self, start: int, end: int, signature: Signature) -> Outputs:
        """Return the outputs of the items from `start` up to, not including, `end`."""
        rows = slice(*(int((self.encoded.item_of_row < item).sum()) for item in (start, end)))
        outputs = {}
        for spec in signature.outputs:
            ends = np.concatenate([[0], np.cumsum(signature.counts(spec, self.encoded.batch))])
            outputs[spec.name] = self.outputs[spec.name][ends[rows.start] : ends[rows.stop]]
        return outputs


def expect(
    predictor: Predictor,
    rows: Sequence[Row],
    progress: Progress,
    outputs: Outputs | None = None,
    metric: str | None = None,
) -> Expectation:
    """Run the reference model on the rows, unless its outputs are passed; `metric` names the metric to judge by."""
    task, spec = predictor.task, predictor.spec
    encoded = predictor.encode(list(rows))
    gold = task.gold(rows, spec)
    if outputs is None:
        outputs = run_rows(predictor, encoded, progress, "reference outputs")
    item_scores = task.item_scores(outputs, encoded, gold, spec) if gold is not None else None
    scored = task.metric(item_scores, spec) if item_scores is not None else None
    if scored is not None and metric is not None:
        scored = scored.named(metric)
    return Expectation(encoded, outputs, gold, scored, predictor.session.spec.precision, item_scores)


@dataclass(frozen=True, slots=True)
class _Measured:
    """Agreement and metric of a variant in batches of one size."""

    size: int | None
    agreement: Agreement
    item_scores: FloatArray | None = None
    metric: Metric | None = None


def verify(
    predictor: Predictor,
    variant: str,
    expected: Expectation,
    gate: Gate,
    progress: Progress,
    batch_sizes: Sequence[int] = (),
    *,
    stops_early: bool = False,
    sample: Callable[[int], Agreement | None] = lambda _: None,
) -> Verdict:
    """Judge a variant once or, if its answers depend on the other rows of a batch, at each of these batch sizes.

    With batch sizes the rows run in their own order, as in a server, and the worst result counts: the lowest agreement
    and the largest drop, each at any size. The largest size comes first; with `stops_early`, the first at which the
    variant fails is the last. `sample` returns the agreement at a batch size that some of the rows already prove; all
    rows always run at batch size 1, and at every size if they have labels.
    """
    results: list[_Measured] = []
    sizes: list[int | None] = [*sorted(batch_sizes, reverse=True)]
    for size in sizes or [None]:
        sampled = sample(size) if size is not None and size > 1 and expected.metric is None else None
        if sampled is not None:
            results.append(_Measured(size, sampled))
            continue
        results.append(_measure(predictor, variant, expected, progress, size))
        if stops_early and not _verdict(predictor, variant, expected, gate, results).passed:
            break
    return _verdict(predictor, variant, expected, gate, results)


def _verdict(
    predictor: Predictor, variant: str, expected: Expectation, gate: Gate, results: Sequence[_Measured]
) -> Verdict:
    """Return the verdict on the worst of the results."""
    task, spec = predictor.task, predictor.spec
    agreed = min(results, key=lambda result: (result.agreement.is_finite, result.agreement.value))
    # Non-finite outputs have no metric; if it is missing at one size, the verdict has none.
    scored = min(results, key=lambda result: -np.inf if result.metric is None else result.metric.value)
    precision = predictor.session.spec.precision if expected.precision == Precision.FP32 else expected.precision
    interval = None
    # fp32 is judged by its error, not by its drop.
    if scored.metric is not None and expected.item_scores is not None and precision != Precision.FP32:
        assert scored.item_scores is not None
        name = scored.metric.name
        interval = paired_drop(
            lambda item_scores: task.metric(item_scores, spec).of(name), expected.item_scores, scored.item_scores
        )
    agreement, metric, sizes = agreed.agreement, scored.metric, (agreed.size, scored.size)
    passed, reason = judge(
        agreement, metric, expected.metric, precision, gate, task.min_agreement, interval=interval, sizes=sizes
    )
    return Verdict(
        variant=variant,
        passed=passed,
        reason=reason,
        agreement=agreement,
        metric=metric,
        reference_metric=expected.metric,
        drop_interval=interval,
        by_batch=tuple(_at_batch(result, expected) for result in reversed(results) if result.size is not None),
        notes=too_few_rows(interval, metric, gate),
    )


def _measure(
    predictor: Predictor, variant: str, expected: Expectation, progress: Progress, size: int | None
) -> _Measured:
    task, spec, encoded = predictor.task, predictor.spec, expected.encoded
    groups = None if size is None else batch_in_order(len(encoded.batch), size)
    outputs = run_rows(predictor, encoded, progress, f"verify {variant}{_at(size)}", groups)
    agreement = task.agree(outputs, expected.outputs, encoded, spec)
    if expected.gold is None or expected.metric is None or not agreement.is_finite:
        return _Measured(size, agreement)
    item_scores = task.item_scores(outputs, encoded, expected.gold, spec)
    return _Measured(size, agreement, item_scores, task.metric(item_scores, spec).named(expected.metric.name))


def _at_batch(result: _Measured, expected: Expectation) -> AtBatch:
    agreement, metric, reference = result.agreement, result.metric, expected.metric
    drop = None if metric is None or reference is None else 100 * (reference.value - metric.value)
    return AtBatch(result.size or 0, agreement.value, agreement.flips, drop, agreement.rows)


def judge(
    agreement: Agreement,
    metric: Metric | None,
    reference: Metric | None,
    precision: str,
    gate: Gate,
    min_agreement: float,
    *,
    interval: Interval | None = None,
    sizes: tuple[int | None, int | None] = (None, None),
    is_strict: bool = False,
) -> tuple[bool, str]:
    """Return whether a variant passes the gate, and the reason.

    `min_agreement` is the default where the gate sets no bound on the agreement; `sizes` are the batch sizes of
    agreement and metric. A generated token that differs changes all that follow it, so generation is judged
    strictly: in fp32 every token must be the same, and a small drop does not replace the agreement.
    """
    if not agreement.is_finite:
        return False, NOT_FINITE
    if precision == Precision.FP32:
        if is_strict and agreement.flips:
            return False, f"{_floored(agreement)} < 1 for fp32"
        allowed = FP32_TOLERANCE * max(1.0, agreement.scale)
        passed = agreement.max_error <= allowed
        return passed, f"largest error {agreement.max_error:.1e} {_sign(passed)} {allowed:.1e} for fp32"
    if gate.max_drop is not None and metric is not None and reference is not None:
        drop = 100 * (reference.value - metric.value)
        passed = drop <= gate.max_drop + 1e-9
        reason = f"{metric.name} drop {format_points(drop)} points{format_interval(interval)}"
        reason += f" {_sign(passed)} {gate.max_drop:g}{_at(sizes[1])}"
        if not passed or (gate.min_agreement is None and not is_strict):
            return passed, reason
    bound = min_agreement if gate.min_agreement is None else gate.min_agreement
    if agreement.value >= bound:
        return True, f"{_floored(agreement)} ≥ {bound:g}{_at(sizes[0])}"
    return False, f"{_floored(agreement)} < {bound:g}{_at(sizes[0])}"


def batch_sizes(bundle: Bundle, variant: str) -> tuple[int, ...]:
    """Return the batch sizes at which to judge a variant: none if its answers do not depend on the rest of a batch."""
    depends = any(entry.depends_on_batch for entry in bundle.manifest.variants if entry.name == variant)
    return bundle.report.plan.shapes.batches if depends else ()


def _floored(agreement: Agreement) -> str:
    # Rounded down: 0.99496 must not read as 0.9950 < 0.995.
    return f"{agreement.measure} {np.floor(agreement.value * 1e4) / 1e4:.4f}"


def _sign(passed: bool) -> str:
    return "≤" if passed else ">"


def format_points(value: float) -> str:
    """Format points of a metric: without a negative zero, and with a typographic minus."""
    return f"{round(value, 2) + 0.0:.2f}".replace("-", "−")


def format_interval(interval: Interval | None) -> str:
    """Format the confidence interval of a drop in parentheses; an empty string if no answer differs."""
    if interval is None or interval.low == interval.high:
        return ""
    return f" ({format_points(interval.low)} to {format_points(interval.high)})"


def _at(size: int | None) -> str:
    return "" if size is None else f" at batch {size}"


def run_rows(
    predictor: Predictor, encoded: Encoded, progress: Progress, title: str, groups: list[IntArray] | None = None
) -> Outputs:
    """Return the outputs of encoded rows; show the progress under this title."""
    with step(progress, title, total=len(encoded.batch)):
        return predictor.outputs(encoded, groups=groups, on_batch=progress.advance)
