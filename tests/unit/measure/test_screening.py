"""A few rows reject what is clearly inaccurate, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from hasten.core.plan import Gate
from hasten.core.progress import SilentProgress
from hasten.core.report import Agreement
from hasten.core.variant import Precision
from hasten.measure.encoder_gate import expect
from hasten.measure.screening import Screening
from hasten.predictor import Predictor
from hasten.tasks import TaskSpec

MakePredictor = Callable[..., Predictor]
Answer = Callable[[np.ndarray], Sequence[float]]
ROWS = [{"text": " ".join(["a", "b", "c", "d"][: 1 + index % 4])} for index in range(200)]
BLOCK_ROWS = 8


def flipping(answer: Answer, shares: Sequence[float]) -> Answer:
    """Return an answer whose best label changes for a share of each block of calls, the last share from then on."""
    calls = 0

    def changed(row: np.ndarray) -> Sequence[float]:
        nonlocal calls
        block, position = divmod(calls, BLOCK_ROWS)
        calls += 1
        scores = list(answer(row))
        is_flipped = position < shares[min(block, len(shares) - 1)] * BLOCK_ROWS
        return [-score for score in scores] if is_flipped else scores

    return changed


def screening(make_predictor: MakePredictor, spec: TaskSpec, gate: Gate) -> Screening:
    return Screening(ROWS, expect(make_predictor(spec), ROWS, SilentProgress()), gate)


def test_clearly_inaccurate_variant_is_rejected_after_four_blocks(
    make_predictor: MakePredictor, classifier: TaskSpec, expected_answer: Answer
) -> None:
    wrong = make_predictor(classifier, flipping(expected_answer, [0.5]), "int8")
    verdict = screening(make_predictor, classifier, Gate()).reject(wrong, "x-int8")
    assert verdict is not None
    assert not verdict.passed
    assert verdict.reason == "same label 0.5000 < 0.995 in the first 32 of 200 rows"
    assert verdict.agreement.rows == 32
    assert [len(batch) for batch in wrong.session.batches] == [BLOCK_ROWS] * 4  # type: ignore[attr-defined]


def test_accurate_variant_is_not_rejected_on_96_rows(
    make_predictor: MakePredictor, classifier: TaskSpec, expected_answer: Answer
) -> None:
    right = make_predictor(classifier, expected_answer, "int8")
    assert screening(make_predictor, classifier, Gate(min_agreement=1.0)).reject(right, "x-int8") is None
    assert sum(len(batch) for batch in right.session.batches) == 96  # type: ignore[attr-defined]


def test_variant_near_the_bound_is_left_to_the_gate(
    make_predictor: MakePredictor, classifier: TaskSpec, expected_answer: Answer
) -> None:
    """One wrong answer among many lowers the mean below the bound, but not by four standard errors."""
    near = make_predictor(classifier, flipping(expected_answer, [0.125, *[0.0] * 11]), "int8")
    assert screening(make_predictor, classifier, Gate()).reject(near, "x-int8") is None


def test_fp32_variant_is_rejected_at_its_first_error(
    make_predictor: MakePredictor, classifier: TaskSpec, expected_answer: Answer
) -> None:
    wrong = make_predictor(classifier, lambda row: [score + 0.1 for score in expected_answer(row)])
    verdict = screening(make_predictor, classifier, Gate(min_agreement=0.0)).reject(wrong, "x-fp32")
    assert verdict is not None
    assert "for fp32 in the first 8 of 200 rows" in verdict.reason


def test_non_finite_outputs_are_rejected_whatever_the_gate(make_predictor: MakePredictor, classifier: TaskSpec) -> None:
    broken = make_predictor(classifier, lambda _: [np.nan, 0.0, 1.0], "int8")
    gate = Gate(min_agreement=0.0, max_drop=100.0)
    verdict = screening(make_predictor, classifier, gate).reject(broken, "x-int8")
    assert verdict is not None
    assert not verdict.agreement.is_finite


def test_drop_of_a_metric_is_left_to_the_gate(
    make_predictor: MakePredictor, classifier: TaskSpec, expected_answer: Answer
) -> None:
    wrong = make_predictor(classifier, flipping(expected_answer, [0.5]), "int8")
    assert screening(make_predictor, classifier, Gate(max_drop=0.5)).reject(wrong, "x-int8") is None


@pytest.mark.parametrize("count", [1, 7, 9])
def test_few_rows_are_one_block(make_predictor: MakePredictor, classifier: TaskSpec, count: int) -> None:
    rows = ROWS[:count]
    expected = expect(make_predictor(classifier), rows, SilentProgress())
    fine = make_predictor(classifier, precision="int8")
    assert Screening(rows, expected, Gate()).reject(fine, "x-int8") is None
    # With one block there is no standard error: the gate decides.
    wrong = make_predictor(classifier, lambda _: [0.0, 1.0, 2.0], "int8")
    assert Screening(rows, expected, Gate()).reject(wrong, "x-int8") is None


def test_variant_of_a_quantized_reference_is_judged_in_its_precision(
    make_predictor: MakePredictor, classifier: TaskSpec, expected_answer: Answer
) -> None:
    expected = replace(expect(make_predictor(classifier), ROWS, SilentProgress()), precision=Precision.INT8)
    rounded = make_predictor(classifier, lambda row: [score * 1.01 for score in expected_answer(row)])
    assert Screening(ROWS, expected, Gate()).reject(rounded, "graph-fp32") is None


def embedding_agreements(screening: Screening, values: Sequence[float], monkeypatch: pytest.MonkeyPatch) -> None:
    agreements = [Agreement("mean cosine", value, 32, 0.01, 0.01, 1.0) for value in values]
    monkeypatch.setattr(screening, "_agreements", lambda _: iter(agreements))
    monkeypatch.setattr(screening, "_blocks", [None] * len(values))


@pytest.mark.parametrize(
    ("values", "is_clear"),
    [
        ([0.9996, 0.9997, 0.9995, 0.9996] * 3, True),
        ([0.9992, 0.9989, 0.9991, 0.9990] * 3, False),  # near the bound: all rows decide
        ([0.99, 0.991, 0.989, 0.99] * 3, False),
    ],
)
def test_batch_size_is_judged_on_some_rows_if_these_are_clearly_above_the_bound(
    make_predictor: MakePredictor,
    classifier: TaskSpec,
    monkeypatch: pytest.MonkeyPatch,
    values: Sequence[float],
    is_clear: bool,
) -> None:
    tested = screening(make_predictor, classifier, Gate(min_agreement=0.999))
    embedding_agreements(tested, values, monkeypatch)
    agreement = tested.clear_agreement(make_predictor(classifier, precision="int8"))
    assert (agreement is not None) == is_clear
    assert agreement is None or agreement.rows == 4 * 32


def test_batch_size_is_judged_on_all_rows_if_labels_can_flip(
    make_predictor: MakePredictor, classifier: TaskSpec, expected_answer: Answer
) -> None:
    right = make_predictor(classifier, expected_answer, "int8")
    assert screening(make_predictor, classifier, Gate()).clear_agreement(right) is None


def test_fp32_variant_is_screened_on_eight_rows(make_predictor: MakePredictor, classifier: TaskSpec) -> None:
    right = make_predictor(classifier)
    assert screening(make_predictor, classifier, Gate()).reject(right, "x-fp32") is None
    assert sum(len(batch) for batch in right.session.batches) == 8  # type: ignore[attr-defined]
