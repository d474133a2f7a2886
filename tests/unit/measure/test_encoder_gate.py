from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hasten.core.plan import Gate
from hasten.core.progress import SilentProgress
from hasten.core.report import Agreement, AtBatch, Interval, Metric, Verdict
from hasten.core.tensors import BATCH, SEQUENCE, Batch, DType, Outputs, Signature, TensorSpec
from hasten.measure.encoder_gate import FP32_TOLERANCE, Expectation, expect, judge, verify
from hasten.predictor import Predictor
from hasten.tasks import TASKS, Encoded, TaskSpec

TASK = TASKS.get("text-classification")
ROWS = [{"text": text} for text in ("a b", "c", "d e f g h", "i", "j k", "l m n", "o p", "q")]

MakePredictor = Callable[..., Predictor]
Answer = Callable[[np.ndarray], Sequence[float]]


class Recorder(SilentProgress):
    def __init__(self) -> None:
        self.steps: list[tuple[str, float | None]] = []
        self.advanced = 0.0
        self.finished = 0

    def start(self, name: str, total: float | None = None) -> None:
        self.steps.append((name, total))

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        self.advanced += amount

    def finish(self, note: str = "", *, ok: bool = True) -> None:
        self.finished += 1


def agreement(value: float = 1.0, *, max_error: float = 0.0, scale: float = 1.0, is_finite: bool = True) -> Agreement:
    return Agreement("same label", value, 100, max_error, 0.0, scale, is_finite)


def accuracy(value: float) -> Metric:
    return Metric("accuracy", value, 100)


# --- judge


@pytest.mark.parametrize(
    ("error", "scale", "passed"),
    [
        (FP32_TOLERANCE, 1.0, True),
        (FP32_TOLERANCE * 1.01, 1.0, False),
        (FP32_TOLERANCE, 0.01, True),  # small values do not make the bound smaller
        (FP32_TOLERANCE * 50, 50.0, True),
        (FP32_TOLERANCE * 51, 50.0, False),
    ],
)
def test_fp32_tolerance_scales_with_the_values(error: float, scale: float, passed: bool) -> None:
    result, reason = judge(agreement(max_error=error, scale=scale), None, None, "fp32", Gate(), TASK.min_agreement)
    assert result is passed
    assert ("≤" if passed else ">") in reason
    assert "for fp32" in reason


def test_fp32_is_judged_by_error_even_if_labels_agree() -> None:
    assert not judge(agreement(1.0, max_error=0.5), None, None, "fp32", Gate(min_agreement=0.0), TASK.min_agreement)[0]
    assert judge(agreement(1.0, max_error=0.5), None, None, "fp16", Gate(), TASK.min_agreement)[0]


@pytest.mark.parametrize(
    ("gate", "value", "passed", "message"),
    [
        (Gate(), TASK.min_agreement, True, "≥ 0.995"),
        (Gate(), 0.9, False, "< 0.995"),
        (Gate(min_agreement=0.9), 0.9, True, "≥ 0.9"),
        (Gate(min_agreement=0.9), 0.89, False, "< 0.9"),
        (Gate(min_agreement=0), 0.0, True, "≥ 0"),
        (Gate(min_agreement=1), 0.9999, False, "< 1"),
    ],
)
def test_reduced_precision_is_judged_by_agreement(gate: Gate, value: float, passed: bool, message: str) -> None:
    result, reason = judge(agreement(value), None, None, "int8", gate, TASK.min_agreement)
    assert result is passed
    assert message in reason


def test_rejected_agreement_is_rounded_down() -> None:
    passed, reason = judge(agreement(0.99496), None, None, "int8", Gate(), TASK.min_agreement)
    assert not passed
    assert "0.9950 < 0.995" not in reason


@pytest.mark.parametrize(
    ("value", "passed", "message"),
    [
        (0.90, True, "accuracy drop 0.00 points ≤ 1"),
        (0.95, True, "accuracy drop −5.00 points ≤ 1"),
        (0.89, True, "accuracy drop 1.00 points ≤ 1"),
        (0.88, False, "accuracy drop 2.00 points > 1"),
    ],
)
def test_max_drop_decides_with_labels(value: float, passed: bool, message: str) -> None:
    result = judge(agreement(0.5), accuracy(value), accuracy(0.9), "int8", Gate(max_drop=1), TASK.min_agreement)
    assert result == (passed, message)


def test_reason_has_interval_and_batch_size() -> None:
    gate, interval = Gate(max_drop=0.5), Interval(0.11, -0.23, 0.46)
    passed, reason = judge(
        agreement(), accuracy(0.8989), accuracy(0.9), "int8", gate, TASK.min_agreement, interval=interval, sizes=(8, 32)
    )
    assert (passed, reason) == (True, "accuracy drop 0.11 points (−0.23 to 0.46) ≤ 0.5 at batch 32")
    same = Interval(0.0, 0.0, 0.0)
    assert judge(agreement(), accuracy(0.9), accuracy(0.9), "int8", gate, TASK.min_agreement, interval=same)[1] == (
        "accuracy drop 0.00 points ≤ 0.5"
    )
    assert judge(agreement(), None, None, "int8", Gate(), TASK.min_agreement, sizes=(8, 32))[1].endswith(
        "≥ 0.995 at batch 8"
    )


def test_agreement_decides_without_max_drop() -> None:
    assert not judge(agreement(0.5), accuracy(0.9), accuracy(0.9), "int8", Gate(), TASK.min_agreement)[0]


def test_min_agreement_and_max_drop_must_both_hold() -> None:
    both = Gate(min_agreement=0.99, max_drop=1.0)
    assert judge(agreement(0.99), accuracy(0.9), accuracy(0.9), "int8", both, TASK.min_agreement)[0]
    assert not judge(agreement(0.99), accuracy(0.8), accuracy(0.9), "int8", both, TASK.min_agreement)[0]
    assert not judge(agreement(0.5), accuracy(0.9), accuracy(0.9), "int8", both, TASK.min_agreement)[0]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("gate", [Gate(min_agreement=0.0), Gate(max_drop=100.0)])
def test_non_finite_outputs_never_pass(precision: str, gate: Gate) -> None:
    result = judge(agreement(is_finite=False), accuracy(1.0), accuracy(1.0), precision, gate, TASK.min_agreement)
    assert result == (False, "some outputs are not finite numbers")


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_non_finite_reference_passes_nothing(precision: str) -> None:
    broken = agreement(float("nan"), max_error=float("nan"), scale=float("nan"))
    assert not judge(broken, None, None, precision, Gate(min_agreement=0.0), TASK.min_agreement)[0]


def test_verdict_drop_is_in_points() -> None:
    assert Verdict("x", True, "", agreement(), accuracy(0.88), accuracy(0.9)).drop == pytest.approx(2.0)
    assert Verdict("x", True, "", agreement()).drop is None


# --- expect and verify


@pytest.fixture
def expected(make_predictor: MakePredictor, classifier: TaskSpec) -> Expectation:
    return expect(make_predictor(classifier), ROWS, SilentProgress())


def test_expect_runs_the_reference_model(expected: Expectation, expected_answer: Answer) -> None:
    ids = np.split(expected.encoded.batch.values["input_ids"], np.cumsum(expected.encoded.batch.lengths)[:-1])
    assert np.allclose(expected.outputs["logits"], [expected_answer(row) for row in ids])
    assert (expected.gold, expected.metric) == (None, None)


def test_expect_uses_stored_outputs(make_predictor: MakePredictor, classifier: TaskSpec) -> None:
    predictor = make_predictor(classifier)
    reference_outputs = {"logits": np.zeros((len(ROWS), 3), np.float32)}
    assert expect(predictor, ROWS, SilentProgress(), reference_outputs).outputs is reference_outputs
    assert predictor.session.batches == []  # type: ignore[attr-defined]


def test_labels_give_a_metric(make_predictor: MakePredictor, classifier: TaskSpec) -> None:
    predictor = make_predictor(classifier, lambda _: [0.0, 0.0, 1.0])
    labelled = [{**row, "label": label} for row, label in zip(ROWS, ["good", "bad"] * 4, strict=True)]
    result = expect(predictor, labelled, SilentProgress())
    assert result.gold == [2, 0] * 4
    assert result.metric == Metric("accuracy", 0.5, 8, {"macro F1": pytest.approx(1 / 3), "micro F1": 0.5})
    better = verify(predictor, "onnxruntime-fp32", result, Gate(), SilentProgress())
    assert better.metric == result.metric
    assert better.drop == 0


def test_drop_is_of_the_requested_metric(make_predictor: MakePredictor, classifier: TaskSpec) -> None:
    labelled = [{**row, "label": label} for row, label in zip(ROWS, ["good"] * 7 + ["bad"], strict=True)]
    original = make_predictor(classifier, lambda _: [0.0, 0.0, 1.0])
    result = expect(original, labelled, SilentProgress(), metric="macro-f1")
    assert result.metric == Metric("macro F1", pytest.approx(7 / 15), 8, {"accuracy": 7 / 8, "micro F1": 7 / 8})
    # One answer is a label that never occurs: 12.5 points of the accuracy, more of the macro F1.
    first = result.encoded.batch.take(np.array([0])).values["input_ids"]
    worse = make_predictor(
        classifier, lambda row: [0.0, 1.0, 0.0] if np.array_equal(row, first) else [0.0, 0.0, 1.0], "int8"
    )
    gate = Gate(max_drop=15)
    assert verify(worse, "x-int8", expect(original, labelled, SilentProgress()), gate, SilentProgress()).passed
    verdict = verify(worse, "x-int8", result, gate, SilentProgress())
    assert verdict.reason == "macro F1 drop 18.10 points (0.00 to 57.14) > 15"
    assert verdict.drop == pytest.approx(100 * (7 / 15 - (6 / 7) / 3))
    assert not verdict.passed


def test_non_finite_outputs_have_no_metric(make_predictor: MakePredictor, classifier: TaskSpec) -> None:
    """NaN would become null in the report, which does not decode as a number."""
    labelled = [{**row, "label": "good"} for row in ROWS]
    result = expect(make_predictor(classifier), labelled, SilentProgress())
    broken = make_predictor(classifier, lambda _: [np.nan, 0.0, 1.0], "fp16")
    verdict = verify(broken, "x", result, Gate(max_drop=100.0), SilentProgress())
    assert (verdict.passed, verdict.metric, verdict.drop) == (False, None, None)


class Crowded:
    """A session whose outputs change at some batch sizes, as with a scale shared by a batch."""

    def __init__(self, session: Any, changes: dict[int, Callable[[Batch, Outputs], Outputs]]) -> None:
        self.session, self.changes, self.spec = session, changes, session.spec

    def run(self, batch: Batch) -> Outputs:
        outputs = self.session.run(batch)
        return self.changes.get(len(batch), lambda _, same: same)(batch, outputs)


def swapped(*rows: int) -> Callable[[Batch, Outputs], Outputs]:
    """Return a change that negates the logits of these rows of every batch."""

    def change(_: Batch, outputs: Outputs) -> Outputs:
        logits = outputs["logits"].copy()
        logits[list(rows)] = -logits[list(rows)]
        return {"logits": logits}

    return change


def test_worst_batch_size_counts_and_all_are_reported(make_predictor: MakePredictor, classifier: TaskSpec) -> None:
    labels = ["good", "good", "bad", "good", "good", "good", "bad", "good"]
    labelled = [{**row, "label": label} for row, label in zip(ROWS, labels, strict=True)]
    original = make_predictor(classifier, lambda _: [0.0, 1.0, 2.0])
    result = expect(original, labelled, SilentProgress())
    variant = make_predictor(classifier, lambda _: [0.0, 1.0, 2.0], "int8")
    recorded = variant.session
    # By twos the wrong answers become right ones, and both flip; by fours a right one is lost, and one flips.
    variant.session = Crowded(recorded, {2: swapped(0), 4: swapped(1)})  # type: ignore[assignment]
    verdict = verify(variant, "x-int8", result, Gate(max_drop=20), SilentProgress(), (1, 2, 4))
    assert [len(batch) for batch in recorded.batches] == [4] * 2 + [2] * 4 + [1] * 8  # type: ignore[attr-defined]
    assert np.array_equal(recorded.batches[2].lengths, result.encoded.batch.lengths[:2])  # type: ignore[attr-defined]
    assert verdict.by_batch == (
        AtBatch(1, 1.0, 0, 0.0, 8),
        AtBatch(2, 0.5, 4, 0.0, 8),
        AtBatch(4, 0.75, 2, 25.0, 8),
    )
    assert (verdict.agreement.value, verdict.agreement.flips, verdict.drop) == (0.5, 4, 25.0)
    assert not verdict.passed
    assert verdict.reason.startswith("accuracy drop 25.00 points (")
    assert verdict.reason.endswith("> 20 at batch 4")
    assert verdict.drop_interval is not None
    assert verdict.drop_interval.low <= 25.0 <= verdict.drop_interval.high
    rejected = verify(variant, "x-int8", result, Gate(), SilentProgress(), (1, 2, 4))
    assert rejected.reason == "same label 0.5000 < 0.995 at batch 2"
    # Where only the outcome counts, a variant that fails in the largest batch is not judged in smaller ones.
    early = verify(variant, "x-int8", result, Gate(), SilentProgress(), (1, 2, 4), stops_early=True)
    assert (early.passed, [at.size for at in early.by_batch]) == (False, [4])
    # Without batch sizes, rows of similar length run together, once.
    alone = verify(variant, "x-int8", result, Gate(), SilentProgress())
    assert (alone.passed, alone.by_batch) == (True, ())


def test_non_finite_outputs_at_one_batch_size_are_rejected(
    expected: Expectation, make_predictor: MakePredictor, classifier: TaskSpec
) -> None:
    variant = make_predictor(classifier, precision="int8")
    broken = {2: lambda _, outputs: {"logits": np.full_like(outputs["logits"], np.nan)}}
    variant.session = Crowded(variant.session, broken)  # type: ignore[assignment]
    verdict = verify(variant, "x-int8", expected, Gate(min_agreement=0.0), SilentProgress(), (1, 2))
    assert (verdict.passed, verdict.reason) == (False, "some outputs are not finite numbers")


def test_rows_that_cannot_show_the_drop_are_noted(make_predictor: MakePredictor, classifier: TaskSpec) -> None:
    labelled = [{**row, "label": "good"} for row in ROWS]
    result = expect(make_predictor(classifier, lambda _: [0.0, 1.0, 2.0]), labelled, SilentProgress())
    first = result.encoded.batch.take(np.array([0])).values["input_ids"]
    worse = make_predictor(
        classifier, lambda row: [2.0, 1.0, 0.0] if np.array_equal(row, first) else [0.0, 1.0, 2.0], "int8"
    )
    (note,) = verify(worse, "x-int8", result, Gate(max_drop=13), SilentProgress()).notes
    assert note.startswith("8 rows cannot show a drop of 13 points: the interval is ±")
    assert verify(worse, "x-int8", result, Gate(max_drop=50), SilentProgress()).notes == ()


def test_progress_counts_the_rows(make_predictor: MakePredictor, classifier: TaskSpec) -> None:
    predictor, progress = make_predictor(classifier), Recorder()
    result = expect(predictor, ROWS, progress)
    verify(predictor, "onnxruntime-fp32", result, Gate(), progress)
    assert progress.steps == [("reference outputs", len(ROWS)), ("verify onnxruntime-fp32", len(ROWS))]
    assert progress.advanced == 2 * len(ROWS)
    assert progress.finished == 2


def test_same_model_passes(expected: Expectation, make_predictor: MakePredictor, classifier: TaskSpec) -> None:
    verdict = verify(make_predictor(classifier), "onnxruntime-fp32", expected, Gate(), SilentProgress())
    assert verdict.passed
    assert verdict.variant == "onnxruntime-fp32"
    assert (verdict.agreement.flips, verdict.agreement.rows) == (0, len(ROWS))


@pytest.mark.parametrize(("precision", "passed"), [("fp32", False), ("int8", True)])
def test_small_error_is_judged_by_session_precision(
    expected: Expectation,
    make_predictor: MakePredictor,
    classifier: TaskSpec,
    expected_answer: Answer,
    precision: str,
    passed: bool,
) -> None:
    predictor = make_predictor(classifier, lambda row: [value + 0.01 for value in expected_answer(row)], precision)
    # The name says fp32, but the precision of the session counts.
    assert verify(predictor, "onnxruntime-fp32", expected, Gate(), SilentProgress()).passed is passed


def test_flip_is_rejected_unless_allowed(
    expected: Expectation, make_predictor: MakePredictor, classifier: TaskSpec, expected_answer: Answer
) -> None:
    second = expected.encoded.batch.take(np.array([1])).values["input_ids"]
    predictor = make_predictor(
        classifier,
        lambda row: expected_answer(row)[::-1] if np.array_equal(row, second) else expected_answer(row),
        "int8",
    )
    verdict = verify(predictor, "x-int8", expected, Gate(), SilentProgress())
    assert not verdict.passed
    assert (verdict.agreement.flips, verdict.agreement.worst[0]) == (1, 1)
    assert verify(predictor, "x-int8", expected, Gate(min_agreement=0.8), SilentProgress()).passed


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_overflow_is_rejected(
    expected: Expectation, make_predictor: MakePredictor, classifier: TaskSpec, bad: float
) -> None:
    verdict = verify(
        make_predictor(classifier, lambda _: [bad, 0.0, 1.0], "fp16"), "x", expected, Gate(), SilentProgress()
    )
    assert (verdict.passed, verdict.reason) == (False, "some outputs are not finite numbers")


def test_first_returns_outputs_of_the_first_items() -> None:
    """Outputs may be per row or per token, and an item may be two rows."""
    signature = Signature(
        (),
        (
            TensorSpec("embedding", DType.FLOAT32, (BATCH, 1)),
            TensorSpec("hidden", DType.FLOAT32, (BATCH, SEQUENCE, 1)),
        ),
        max_length=16,
    )
    batch = Batch.from_rows({"input_ids": [[1, 2], [3], [4, 5, 6]]})
    encoded = Encoded(batch, np.array([0, 0, 1]), 2, (), ())
    result = Expectation(encoded, {"embedding": np.arange(3.0)[:, None], "hidden": np.arange(6.0)[:, None]})
    first = result.first(1, signature)
    assert first["embedding"].tolist() == [[0], [1]]
    assert first["hidden"].tolist() == [[0], [1], [2]]
    assert len(result.first(2, signature)["hidden"]) == 6
