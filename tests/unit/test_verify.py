from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hasten.core.plan import Gate
from hasten.core.progress import Silent
from hasten.core.report import Agreement, AtBatch, Metric, Verdict
from hasten.core.statistics import Interval
from hasten.core.tensors import BATCH, SEQUENCE, Batch, DType, Outputs, Signature, TensorSpec
from hasten.measure.verify import FP32_TOLERANCE, Expectation, expect, judge, verify
from hasten.predictor import Predictor
from hasten.tasks import TASKS, Encoded, TaskSpec

TASK = TASKS.get("text-classification")
ROWS = [{"text": text} for text in ("a b", "c", "d e f g h", "i", "j k", "l m n", "o p", "q")]

MakePredictor = Callable[..., Predictor]
Answer = Callable[[np.ndarray], Sequence[float]]


class Recorder(Silent):
    def __init__(self) -> None:
        self.steps: list[tuple[str, float | None]] = []
        self.advanced = 0.0
        self.finished = 0

    def start(self, what: str, total: float | None = None) -> None:
        self.steps.append((what, total))

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
def test_fp32_is_held_to_the_size_of_its_values(error: float, scale: float, passed: bool) -> None:
    found, reason = judge(agreement(max_error=error, scale=scale), None, None, "fp32", Gate(), TASK)
    assert found is passed
    assert ("≤" if passed else ">") in reason
    assert "for fp32" in reason


def test_fp32_must_be_equal_though_the_labels_are() -> None:
    assert not judge(agreement(1.0, max_error=0.5), None, None, "fp32", Gate(min_agreement=0.0), TASK)[0]
    assert judge(agreement(1.0, max_error=0.5), None, None, "fp16", Gate(), TASK)[0]


@pytest.mark.parametrize(
    ("gate", "value", "passed", "said"),
    [
        (Gate(), TASK.min_agreement, True, "≥ 0.995"),
        (Gate(), 0.9, False, "< 0.995"),
        (Gate(min_agreement=0.9), 0.9, True, "≥ 0.9"),
        (Gate(min_agreement=0.9), 0.89, False, "< 0.9"),
        (Gate(min_agreement=0), 0.0, True, "≥ 0"),
        (Gate(min_agreement=1), 0.9999, False, "< 1"),
    ],
)
def test_reduced_precision_must_agree(gate: Gate, value: float, passed: bool, said: str) -> None:
    found, reason = judge(agreement(value), None, None, "int8", gate, TASK)
    assert found is passed
    assert said in reason


def test_a_refusal_never_reads_as_if_it_had_passed() -> None:
    passed, reason = judge(agreement(0.99496), None, None, "int8", Gate(), TASK)
    assert not passed
    assert "0.9950 < 0.995" not in reason


@pytest.mark.parametrize(
    ("value", "passed", "said"),
    [
        (0.90, True, "accuracy drop 0.00 points ≤ 1"),
        (0.95, True, "accuracy drop −5.00 points ≤ 1"),
        (0.89, True, "accuracy drop 1.00 points ≤ 1"),
        (0.88, False, "accuracy drop 2.00 points > 1"),
    ],
)
def test_with_labels_the_drop_decides(value: float, passed: bool, said: str) -> None:
    found = judge(agreement(0.5), accuracy(value), accuracy(0.9), "int8", Gate(max_drop=1), TASK)
    assert found == (passed, said)


def test_the_reason_says_how_far_the_drop_may_be_chance_and_at_which_batch() -> None:
    gate, interval = Gate(max_drop=0.5), Interval(0.11, -0.23, 0.46)
    passed, reason = judge(agreement(), accuracy(0.8989), accuracy(0.9), "int8", gate, TASK, interval, (8, 32))
    assert (passed, reason) == (True, "accuracy drop 0.11 points (−0.23 to 0.46) ≤ 0.5 at batch 32")
    same = Interval(0.0, 0.0, 0.0)
    assert judge(agreement(), accuracy(0.9), accuracy(0.9), "int8", gate, TASK, same)[1] == (
        "accuracy drop 0.00 points ≤ 0.5"
    )
    assert judge(agreement(), None, None, "int8", Gate(), TASK, None, (8, 32))[1].endswith("≥ 0.995 at batch 8")


def test_labels_without_a_bound_on_the_drop_leave_it_to_the_agreement() -> None:
    assert not judge(agreement(0.5), accuracy(0.9), accuracy(0.9), "int8", Gate(), TASK)[0]


def test_asked_for_both_a_variant_must_keep_both() -> None:
    both = Gate(min_agreement=0.99, max_drop=1.0)
    assert judge(agreement(0.99), accuracy(0.9), accuracy(0.9), "int8", both, TASK)[0]
    assert not judge(agreement(0.99), accuracy(0.8), accuracy(0.9), "int8", both, TASK)[0]
    assert not judge(agreement(0.5), accuracy(0.9), accuracy(0.9), "int8", both, TASK)[0]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("gate", [Gate(min_agreement=0.0), Gate(max_drop=100.0)])
def test_what_is_not_finite_never_passes(precision: str, gate: Gate) -> None:
    found = judge(agreement(is_finite=False), accuracy(1.0), accuracy(1.0), precision, gate, TASK)
    assert found == (False, "some outputs are not finite numbers")


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_reference_that_is_not_finite_passes_nothing(precision: str) -> None:
    broken = agreement(float("nan"), max_error=float("nan"), scale=float("nan"))
    assert not judge(broken, None, None, precision, Gate(min_agreement=0.0), TASK)[0]


def test_the_drop_of_a_verdict() -> None:
    assert Verdict("x", True, "", agreement(), accuracy(0.88), accuracy(0.9)).drop == pytest.approx(2.0)
    assert Verdict("x", True, "", agreement()).drop is None


# --- expect and verify


@pytest.fixture
def expected(make_predictor: MakePredictor, classifier: TaskSpec) -> Expectation:
    return expect(make_predictor(classifier), ROWS, Silent())


def test_the_original_answers_the_rows(expected: Expectation, expected_answer: Answer) -> None:
    ids = np.split(expected.encoded.batch.values["input_ids"], np.cumsum(expected.encoded.batch.lengths)[:-1])
    assert np.allclose(expected.outputs["logits"], [expected_answer(row) for row in ids])
    assert (expected.gold, expected.metric) == (None, None)


def test_given_outputs_are_not_computed_again(make_predictor: MakePredictor, classifier: TaskSpec) -> None:
    predictor = make_predictor(classifier)
    given = {"logits": np.zeros((len(ROWS), 3), np.float32)}
    assert expect(predictor, ROWS, Silent(), given).outputs is given
    assert predictor.session.batches == []  # type: ignore[attr-defined]


def test_labels_make_a_metric(make_predictor: MakePredictor, classifier: TaskSpec) -> None:
    predictor = make_predictor(classifier, lambda _: [0.0, 0.0, 1.0])
    labelled = [{**row, "label": label} for row, label in zip(ROWS, ["good", "bad"] * 4, strict=True)]
    found = expect(predictor, labelled, Silent())
    assert found.gold == [2, 0] * 4
    assert found.metric == Metric("accuracy", 0.5, 8, {"macro F1": pytest.approx(1 / 3), "micro F1": 0.5})
    better = verify(predictor, "onnxruntime-fp32", found, Gate(), Silent())
    assert better.metric == found.metric
    assert better.drop == 0


def test_the_drop_is_of_the_metric_that_was_asked_for(make_predictor: MakePredictor, classifier: TaskSpec) -> None:
    labelled = [{**row, "label": label} for row, label in zip(ROWS, ["good"] * 7 + ["bad"], strict=True)]
    original = make_predictor(classifier, lambda _: [0.0, 0.0, 1.0])
    found = expect(original, labelled, Silent(), metric="macro-f1")
    assert found.metric == Metric("macro F1", pytest.approx(7 / 15), 8, {"accuracy": 7 / 8, "micro F1": 7 / 8})
    # One answer is a label that nobody wanted: 12.5 points of the accuracy, more of the macro F1.
    first = found.encoded.batch.take(np.array([0])).values["input_ids"]
    worse = make_predictor(
        classifier, lambda row: [0.0, 1.0, 0.0] if np.array_equal(row, first) else [0.0, 0.0, 1.0], "int8"
    )
    gate = Gate(max_drop=15)
    assert verify(worse, "x-int8", expect(original, labelled, Silent()), gate, Silent()).passed
    verdict = verify(worse, "x-int8", found, gate, Silent())
    assert verdict.reason == "macro F1 drop 18.10 points (0.00 to 57.14) > 15"
    assert verdict.drop == pytest.approx(100 * (7 / 15 - (6 / 7) / 3))
    assert not verdict.passed


def test_what_is_not_finite_has_no_metric(make_predictor: MakePredictor, classifier: TaskSpec) -> None:
    """NaN would be written to the report as null, which no reader takes for a number."""
    labelled = [{**row, "label": "good"} for row in ROWS]
    found = expect(make_predictor(classifier), labelled, Silent())
    broken = make_predictor(classifier, lambda _: [np.nan, 0.0, 1.0], "fp16")
    verdict = verify(broken, "x", found, Gate(max_drop=100.0), Silent())
    assert (verdict.passed, verdict.metric, verdict.drop) == (False, None, None)


class Crowded:
    """Answers otherwise where so many rows come together, as one scale for all of them would."""

    def __init__(self, session: Any, changes: dict[int, Callable[[Batch, Outputs], Outputs]]) -> None:
        self.session, self.changes, self.spec = session, changes, session.spec

    def run(self, batch: Batch) -> Outputs:
        outputs = self.session.run(batch)
        return self.changes.get(len(batch), lambda _, same: same)(batch, outputs)


def swapped(*rows: int) -> Callable[[Batch, Outputs], Outputs]:
    """The labels of these rows of every batch turned around."""

    def change(_: Batch, outputs: Outputs) -> Outputs:
        logits = outputs["logits"].copy()
        logits[list(rows)] = -logits[list(rows)]
        return {"logits": logits}

    return change


def test_the_worst_batch_counts_and_all_are_told(make_predictor: MakePredictor, classifier: TaskSpec) -> None:
    labels = ["good", "good", "bad", "good", "good", "good", "bad", "good"]
    labelled = [{**row, "label": label} for row, label in zip(ROWS, labels, strict=True)]
    original = make_predictor(classifier, lambda _: [0.0, 1.0, 2.0])
    found = expect(original, labelled, Silent())
    variant = make_predictor(classifier, lambda _: [0.0, 1.0, 2.0], "int8")
    recorded = variant.session
    # By twos the wrong answers become right ones, and both flip; by fours a right one is lost, and one flips.
    variant.session = Crowded(recorded, {2: swapped(0), 4: swapped(1)})  # type: ignore[assignment]
    verdict = verify(variant, "x-int8", found, Gate(max_drop=20), Silent(), (1, 2, 4))
    assert [len(batch) for batch in recorded.batches] == [1] * 8 + [2] * 4 + [4] * 2  # type: ignore[attr-defined]
    assert np.array_equal(recorded.batches[8].lengths, found.encoded.batch.lengths[:2])  # type: ignore[attr-defined]
    assert verdict.by_batch == (AtBatch(1, 1.0, 0, 0.0), AtBatch(2, 0.5, 4, 0.0), AtBatch(4, 0.75, 2, 25.0))
    assert (verdict.agreement.value, verdict.agreement.flips, verdict.drop) == (0.5, 4, 25.0)
    assert not verdict.passed
    assert verdict.reason.startswith("accuracy drop 25.00 points (")
    assert verdict.reason.endswith("> 20 at batch 4")
    assert verdict.drop_interval is not None
    assert verdict.drop_interval.low <= 25.0 <= verdict.drop_interval.high
    refused = verify(variant, "x-int8", found, Gate(), Silent(), (1, 2, 4))
    assert refused.reason == "same label 0.5000 < 0.995 at batch 2"
    # Rows of similar length together, once: what it is where nothing depends on the batch.
    alone = verify(variant, "x-int8", found, Gate(), Silent())
    assert (alone.passed, alone.by_batch) == (True, ())


def test_numbers_that_are_none_in_one_batch_size_are_the_worst(
    expected: Expectation, make_predictor: MakePredictor, classifier: TaskSpec
) -> None:
    variant = make_predictor(classifier, precision="int8")
    broken = {2: lambda _, outputs: {"logits": np.full_like(outputs["logits"], np.nan)}}
    variant.session = Crowded(variant.session, broken)  # type: ignore[assignment]
    verdict = verify(variant, "x-int8", expected, Gate(min_agreement=0.0), Silent(), (1, 2))
    assert (verdict.passed, verdict.reason) == (False, "some outputs are not finite numbers")


def test_rows_that_cannot_show_the_drop_are_noted(make_predictor: MakePredictor, classifier: TaskSpec) -> None:
    labelled = [{**row, "label": "good"} for row in ROWS]
    found = expect(make_predictor(classifier, lambda _: [0.0, 1.0, 2.0]), labelled, Silent())
    first = found.encoded.batch.take(np.array([0])).values["input_ids"]
    worse = make_predictor(
        classifier, lambda row: [2.0, 1.0, 0.0] if np.array_equal(row, first) else [0.0, 1.0, 2.0], "int8"
    )
    (note,) = verify(worse, "x-int8", found, Gate(max_drop=13), Silent()).notes
    assert note.startswith("8 rows cannot show a drop of 13 points: the interval is ±")
    assert verify(worse, "x-int8", found, Gate(max_drop=50), Silent()).notes == ()


def test_progress_counts_the_rows(make_predictor: MakePredictor, classifier: TaskSpec) -> None:
    predictor, progress = make_predictor(classifier), Recorder()
    found = expect(predictor, ROWS, progress)
    verify(predictor, "onnxruntime-fp32", found, Gate(), progress)
    assert progress.steps == [("reference answers", len(ROWS)), ("verify onnxruntime-fp32", len(ROWS))]
    assert progress.advanced == 2 * len(ROWS)
    assert progress.finished == 2


def test_the_same_model_passes(expected: Expectation, make_predictor: MakePredictor, classifier: TaskSpec) -> None:
    verdict = verify(make_predictor(classifier), "onnxruntime-fp32", expected, Gate(), Silent())
    assert verdict.passed
    assert verdict.variant == "onnxruntime-fp32"
    assert (verdict.agreement.flips, verdict.agreement.rows) == (0, len(ROWS))


@pytest.mark.parametrize(("precision", "passed"), [("fp32", False), ("int8", True)])
def test_a_small_error_passes_by_what_the_session_computes_in(
    expected: Expectation,
    make_predictor: MakePredictor,
    classifier: TaskSpec,
    expected_answer: Answer,
    precision: str,
    passed: bool,
) -> None:
    predictor = make_predictor(classifier, lambda row: [value + 0.01 for value in expected_answer(row)], precision)
    # The name claims fp32; the session knows better.
    assert verify(predictor, "onnxruntime-fp32", expected, Gate(), Silent()).passed is passed


def test_a_flip_is_refused_unless_allowed(
    expected: Expectation, make_predictor: MakePredictor, classifier: TaskSpec, expected_answer: Answer
) -> None:
    second = expected.encoded.batch.take(np.array([1])).values["input_ids"]
    predictor = make_predictor(
        classifier,
        lambda row: expected_answer(row)[::-1] if np.array_equal(row, second) else expected_answer(row),
        "int8",
    )
    verdict = verify(predictor, "x-int8", expected, Gate(), Silent())
    assert not verdict.passed
    assert (verdict.agreement.flips, verdict.agreement.worst[0]) == (1, 1)
    assert verify(predictor, "x-int8", expected, Gate(min_agreement=0.8), Silent()).passed


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_model_that_overflows_is_refused(
    expected: Expectation, make_predictor: MakePredictor, classifier: TaskSpec, bad: float
) -> None:
    verdict = verify(make_predictor(classifier, lambda _: [bad, 0.0, 1.0], "fp16"), "x", expected, Gate(), Silent())
    assert (verdict.passed, verdict.reason) == (False, "some outputs are not finite numbers")


def test_the_outputs_of_the_first_items() -> None:
    """Rows for what is per row, tokens for what is per token; an item may be two rows."""
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
    found = Expectation(encoded, {"embedding": np.arange(3.0)[:, None], "hidden": np.arange(6.0)[:, None]})
    first = found.first(1, signature)
    assert first["embedding"].tolist() == [[0], [1]]
    assert first["hidden"].tolist() == [[0], [1], [2]]
    assert len(found.first(2, signature)["hidden"]) == 6
