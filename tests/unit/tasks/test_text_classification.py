from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from scipy import special, stats

from hasten.core.errors import InputError
from hasten.core.text.tokenizer import Tokenizer
from hasten.tasks import TASKS, Encoded, TaskSpec
from hasten.tasks.text_classification import MULTI_LABEL, REGRESSION
from support.metrics import scored

TASK = TASKS.get("text-classification")
LABELS = ("bad", "fair", "good")
LOGITS = np.array([[1.0, 3.0, 2.0]], np.float32)
SINGLE = TaskSpec(TASK.name, LABELS)
MULTI = TaskSpec(TASK.name, LABELS, MULTI_LABEL)
STARS = TaskSpec(TASK.name, ("LABEL_0",), REGRESSION)

MakeEncoded = Callable[..., Encoded]


def answers(logits: np.ndarray, spec: TaskSpec = SINGLE, **keywords: object) -> list:
    encoded = Encoded(None, np.arange(len(logits)), len(logits), (), ())  # type: ignore[arg-type]
    return TASK.decode({"logits": logits}, encoded, TASK.options(spec, keywords))


def labels_in(answer: object) -> object:
    """Return the shape of the answer, with the label instead of each {label, score}."""
    return answer["label"] if isinstance(answer, Mapping) else [labels_in(part) for part in answer]  # type: ignore[attr-defined]


# --- options and answers


@pytest.mark.parametrize(
    ("payload", "keywords", "expected"),
    [
        # As in transformers' pipeline, a bare text is answered with a list of one, but only without top_k.
        ("a", {}, ["fair"]),
        ({"text": "a"}, {}, "fair"),
        ({"text": "a", "text_pair": "b"}, {}, "fair"),
        (["a"], {}, ["fair"]),
        (["a", "b"], {}, ["fair", "fair"]),
        ([{"text": "a"}], {}, ["fair"]),
        (("a", "b"), {}, ["fair", "fair"]),
        # With top_k, even if it is 1, every answer is a list, best first.
        ("a", {"top_k": 1}, ["fair"]),
        ({"text": "a"}, {"top_k": 1}, ["fair"]),
        (["a"], {"top_k": 1}, [["fair"]]),
        ("a", {"top_k": 2}, ["fair", "good"]),
        ("a", {"top_k": None}, ["fair", "good", "bad"]),
        ("a", {"top_k": 99}, ["fair", "good", "bad"]),
        (["a", "b"], {"top_k": 2}, [["fair", "good"], ["fair", "good"]]),
        (["a", "b"], {"top_k": None}, [["fair", "good", "bad"]] * 2),
    ],
)
def test_answers_have_the_shape_of_the_payload(payload: object, keywords: dict[str, object], expected: object) -> None:
    count = len(payload) if isinstance(payload, list | tuple) else 1
    shown = TASK.present(payload, answers(np.repeat(LOGITS, count, axis=0), **keywords), TASK.options(SINGLE, keywords))
    assert labels_in(shown) == expected


@pytest.mark.parametrize(
    ("labels", "problem", "apply"),
    [
        (LABELS, "", special.softmax),
        (LABELS, "single_label_classification", special.softmax),
        (LABELS, MULTI_LABEL, special.expit),
        (("LABEL_0",), "", special.expit),
        (("LABEL_0",), REGRESSION, np.asarray),
    ],
)
def test_default_scoring_equals_the_pipeline(
    labels: tuple[str, ...], problem: str, apply: Callable[[np.ndarray], np.ndarray]
) -> None:
    logits = LOGITS[:, : len(labels)]
    actual = answers(logits, TaskSpec(TASK.name, labels, problem), top_k=None)[0]
    scores = {label["label"]: label["score"] for label in actual}
    assert [scores[name] for name in labels] == pytest.approx(apply(logits[0]).tolist())


@pytest.mark.parametrize(
    ("name", "apply"), [("softmax", special.softmax), ("sigmoid", special.expit), ("none", np.asarray)]
)
@pytest.mark.parametrize("spec", [SINGLE, MULTI])
def test_scoring_function_can_be_chosen(name: str, apply: Callable[[np.ndarray], np.ndarray], spec: TaskSpec) -> None:
    (answer,) = answers(LOGITS, spec, function_to_apply=name)
    assert answer["label"] == "fair"
    assert type(answer["score"]) is float
    assert answer["score"] == pytest.approx(apply(LOGITS[0])[1])


@pytest.mark.parametrize(("name", "expected"), [("softmax", [1.0, 0.0, 0.0]), ("sigmoid", [1.0, 0.0, 0.5])])
def test_extreme_logits_saturate(name: str, expected: list[float]) -> None:
    logits = np.array([[1000.0, -1000.0, 0.0]], np.float32)
    actual = {label["label"]: label["score"] for label in answers(logits, function_to_apply=name, top_k=None)[0]}
    assert [actual[label] for label in LABELS] == pytest.approx(expected)


def test_fp16_logits_are_scored_in_fp32() -> None:
    (answer,) = answers(LOGITS.astype(np.float16))
    assert answer["score"] == pytest.approx(special.softmax(LOGITS[0])[1], abs=1e-6)


def test_equal_scores_keep_the_labels_order() -> None:
    assert labels_in(answers(np.zeros((1, 3), np.float32), top_k=None)) == [list(LABELS)]
    assert labels_in(answers(np.zeros((1, 3), np.float32))) == ["bad"]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"topk": 1}, "unknown option 'topk': did you mean 'top_k'?"),
        ({"function": "softmax"}, "unknown option 'function'"),
        ({"top_k": 0}, "top_k is 0; it must be at least 1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": "3"}, "invalid option: .*top_k"),
        ({"top_k": 2.5}, "invalid option: .*top_k"),
        ({"top_k": True}, "invalid option: .*top_k"),
        ({"function_to_apply": "softmx"}, "invalid option: .*softmx.*function_to_apply"),
        ({"function_to_apply": 3}, "invalid option: .*function_to_apply"),
    ],
)
def test_invalid_options_are_rejected(keywords: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TASK.options(SINGLE, keywords)


def test_unknown_option_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InputError) as caught:
        TASK.options(SINGLE, {"padding": True})
    assert caught.value.hint == "known: top_k, function_to_apply"


# --- payloads


@pytest.mark.parametrize(
    ("payload", "items"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        (("a", "b"), ["a", "b"]),
        ({"text": "a"}, ["a"]),
        ({"text": "a", "text_pair": None}, ["a"]),
        ([{"text": "a", "text_pair": "b", "label": 1}, "c"], [("a", "b"), "c"]),
        (" padded\n", [" padded\n"]),
    ],
)
def test_payloads_are_parsed(payload: object, items: list[object]) -> None:
    assert TASK.parse(payload) == items


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ([], "the list is empty"),
        ((), "the list is empty"),
        ("", "text 1 is empty"),
        (" \n\t", "text 1 is empty"),
        (None, "text 1 is NoneType"),
        (7, "text 1 is int"),
        (b"a", "text 1 is bytes"),
        (["a", None], "text 2 is NoneType"),
        (["a", 1.5], "text 2 is float"),
        (["a", ["b"]], "text 2 is list"),
        (["a", "b", ""], "text 3 is empty"),
        ({}, 'item 1 has no "text"'),
        (["a", {"txt": "b"}], r'item 2 has no "text"; its fields are: txt'),
        (["a", {"text": None}], "text 2 is NoneType"),
        ({"text": "a", "text_pair": ""}, "text_pair 1 is empty"),
        (["a", {"text": "a", "text_pair": 3}], "text_pair 2 is int"),
        (["a", "b\ud800"], "text 2 is not valid Unicode: lone surrogate at character 1"),
    ],
)
def test_invalid_payloads_are_rejected_by_position(payload: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TASK.parse(payload)


def test_pair_is_one_row(tokenizer: Tokenizer) -> None:
    encoded = TASK.encode([("a", "b"), "c"], tokenizer, TASK.options(SINGLE, {}))
    assert encoded.batch.lengths.tolist() == [5, 3]
    assert encoded.item_of_row.tolist() == [0, 1]
    assert encoded.items == 2


def test_sample_has_texts_and_pairs() -> None:
    rows = TASK.sample(["a", "b" * 400, "c"], SINGLE)
    assert rows == [{"text": "a"}, {"text": "b" * 400}, {"text": "c"}, {"text": "a", "text_pair": "c"}]


# --- gold labels and scores


@pytest.mark.parametrize(
    ("spec", "labels", "gold"),
    [
        (SINGLE, ["good", "bad"], [2, 0]),
        (SINGLE, [2, 0], [2, 0]),
        (MULTI, [["good", "bad"], [], ["fair"]], [[True, False, True], [False] * 3, [False, True, False]]),
        (MULTI, [[0, "good"], "bad"], [[True, False, True], [True, False, False]]),
    ],
)
def test_gold_labels_by_name_or_index(spec: TaskSpec, labels: list[object], gold: list[object]) -> None:
    assert TASK.gold([{"text": "a", "label": label} for label in labels], spec) == gold


def test_gold_scores_of_a_regression() -> None:
    assert TASK.gold([{"text": "a", "score": 3}, {"text": "b", "score": 0.5}], STARS) == [3.0, 0.5]


@pytest.mark.parametrize(("spec", "row"), [(SINGLE, {"text": "a", "score": 1}), (STARS, {"text": "a", "label": 1})])
def test_rows_without_the_tasks_key_have_no_gold(spec: TaskSpec, row: dict[str, object]) -> None:
    assert TASK.gold([row], spec) is None


@pytest.mark.parametrize(
    ("spec", "row", "message"),
    [
        (SINGLE, {"label": "god"}, "row 2 has the label 'god', which the model does not know: did you mean 'good'?"),
        (SINGLE, {"label": 3}, "row 2 has the label 3"),
        (SINGLE, {"label": -1}, "row 2 has the label -1"),
        (SINGLE, {"label": 1.0}, "row 2 has the label 1.0"),
        (SINGLE, {"label": ["good"]}, r"row 2 has the label \['good'\]"),
        (SINGLE, {}, 'row 2 has no "label", but other rows have one'),
        (MULTI, {"label": ["good", "ugly"]}, "row 2 has the label 'ugly'"),
        (MULTI, {}, 'row 2 has no "label"'),
        (STARS, {"score": "3"}, 'row 2 has no number in "score"'),
        (STARS, {}, 'row 2 has no number in "score"'),
    ],
)
def test_invalid_gold_is_rejected_by_row(spec: TaskSpec, row: dict[str, object], message: str) -> None:
    first = {"text": "a", "label": "good", "score": 1.0}
    with pytest.raises(InputError, match=message):
        TASK.gold([first, {"text": "b", **row}], spec)


def test_unknown_label_is_answered_with_the_known_ones() -> None:
    nine = TaskSpec(TASK.name, tuple(f"label {index}" for index in range(9)))
    with pytest.raises(InputError) as caught:
        TASK.gold([{"text": "a", "label": "x"}], nine)
    assert caught.value.hint == "its labels: " + ", ".join(nine.labels[:8]) + ", …"


def test_accuracy_counts_equal_labels(encoded: MakeEncoded) -> None:
    logits = np.array([[3, 1, 1], [1, 3, 1], [1, 1, 3], [3, 1, 1]], np.float32)
    metric = scored(TASK, {"logits": logits}, encoded(4), [0, 1, 2, 2], SINGLE)
    assert (metric.name, metric.value, metric.rows) == ("accuracy", 0.75, 4)


def test_micro_f1_equals_sklearn(encoded: MakeEncoded) -> None:
    random = np.random.default_rng(0)
    logits = random.normal(size=(50, 3)).astype(np.float32)
    gold = (random.random((50, 3)) < 0.4).tolist()
    right = wrong = missed = 0
    for values, truths in zip(logits.tolist(), gold, strict=True):
        for value, truth in zip(values, truths, strict=True):
            actual = 1 / (1 + np.exp(-value)) > 0.5
            right += actual and truth
            wrong += actual and not truth
            missed += truth and not actual
    precision, recall = right / (right + wrong), right / (right + missed)
    metric = scored(TASK, {"logits": logits}, encoded(50), gold, MULTI)
    assert metric.name == "micro F1"
    assert metric.value == pytest.approx(2 * precision * recall / (precision + recall))


def test_micro_f1_without_labels_is_zero_as_in_sklearn(encoded: MakeEncoded) -> None:
    nothing = [[False] * 3]
    assert scored(TASK, {"logits": np.full((1, 3), -1.0)}, encoded(1), nothing, MULTI).value == 0.0
    assert scored(TASK, {"logits": np.full((1, 3), 1.0)}, encoded(1), nothing, MULTI).value == 0.0


def test_regression_is_scored_by_pearson(encoded: MakeEncoded) -> None:
    random = np.random.default_rng(0)
    truth = random.normal(size=40)
    logits = (truth + random.normal(size=40))[:, None].astype(np.float32)
    metric = scored(TASK, {"logits": logits}, encoded(40), truth.tolist(), STARS)
    assert metric.name == "Pearson correlation"
    assert metric.value == pytest.approx(stats.pearsonr(logits[:, 0], truth).statistic, abs=1e-6)


# --- agreement


@pytest.fixture
def reference() -> np.ndarray:
    """Twenty rows whose best label leads by at least one."""
    logits = np.random.default_rng(0).normal(size=(20, 3))
    logits[np.arange(20), logits.argmax(axis=1)] += 1.0
    return logits


def test_equal_outputs_agree(encoded: MakeEncoded, reference: np.ndarray) -> None:
    agreement = TASK.agree({"logits": reference}, {"logits": reference}, encoded(20), SINGLE)
    assert (agreement.measure, agreement.value, agreement.flips, agreement.rows) == ("same label", 1.0, 0, 20)
    assert (agreement.max_error, agreement.relative_error) == (0.0, 0.0)
    assert agreement.scale == np.abs(reference).max()
    assert agreement.is_finite
    assert (agreement.cosine_mean, agreement.cosine_min, agreement.rank_correlation) == pytest.approx((1, 1, 1))


def test_errors_without_a_flip_keep_the_labels(encoded: MakeEncoded, reference: np.ndarray) -> None:
    ours = reference.copy()
    ours[7] += 0.25
    ours[3] -= 0.125
    agreement = TASK.agree({"logits": ours}, {"logits": reference}, encoded(20), SINGLE)
    assert (agreement.value, agreement.flips) == (1.0, 0)
    assert agreement.max_error == pytest.approx(0.25)
    assert agreement.relative_error == pytest.approx(np.linalg.norm(ours - reference) / np.linalg.norm(reference))
    assert agreement.worst[:2] == (7, 3)


def test_flips_are_counted_and_named_first(encoded: MakeEncoded, reference: np.ndarray) -> None:
    ours = reference.copy()
    ours[4] += 5.0  # a larger error than that of the flips, but the same label
    for row in (11, 2):
        ours[row] = np.roll(reference[row], 1)
    agreement = TASK.agree({"logits": ours}, {"logits": reference}, encoded(20), SINGLE)
    assert agreement.flips == 2
    assert agreement.value == pytest.approx(0.9)
    assert set(agreement.worst[:2]) == {2, 11}
    assert agreement.worst[2] == 4


def test_any_label_that_changes_flips_a_multi_label_row(encoded: MakeEncoded) -> None:
    theirs = np.array([[1.0, -1.0, 2.0]] * 4)
    ours = theirs.copy()
    ours[1, 0] = -0.5  # the best label is still the third
    agreement = TASK.agree({"logits": ours}, {"logits": theirs}, encoded(4), MULTI)
    assert (agreement.flips, agreement.value) == (1, 0.75)
    assert agreement.worst[0] == 1


def test_regression_agrees_by_correlation(encoded: MakeEncoded) -> None:
    random = np.random.default_rng(0)
    theirs = random.normal(size=(30, 1))
    ours = theirs + 0.1 * random.normal(size=(30, 1))
    agreement = TASK.agree({"logits": ours}, {"logits": theirs}, encoded(30), STARS)
    assert agreement.flips is None
    assert agreement.value == pytest.approx(stats.pearsonr(ours[:, 0], theirs[:, 0]).statistic, abs=0.01)
    assert agreement.rank_correlation == pytest.approx(stats.spearmanr(ours[:, 0], theirs[:, 0]).statistic)
    assert agreement.worst[0] == np.abs(ours - theirs)[:, 0].argmax()


@pytest.mark.parametrize(("scale", "shift"), [(2.0, 0.0), (1.0, 3.0)])
def test_regression_with_other_numbers_does_not_agree(encoded: MakeEncoded, scale: float, shift: float) -> None:
    theirs = np.random.default_rng(0).normal(size=(30, 1))
    agreement = TASK.agree({"logits": theirs * scale + shift}, {"logits": theirs}, encoded(30), STARS)
    assert agreement.value < TASK.min_agreement


def test_every_output_of_a_regression_must_agree(encoded: MakeEncoded) -> None:
    spec = TaskSpec(TASK.name, ("clarity", "depth"), REGRESSION)
    theirs = np.random.default_rng(0).normal(size=(30, 2))
    ours = theirs * [1.0, -1.0]
    assert TASK.agree({"logits": ours}, {"logits": theirs}, encoded(30), spec).value < 0.5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("spec", [SINGLE, MULTI])
def test_non_finite_outputs_are_reported(
    encoded: MakeEncoded, reference: np.ndarray, bad: float, spec: TaskSpec
) -> None:
    ours = reference.copy()
    ours[6, 1] = bad
    agreement = TASK.agree({"logits": ours}, {"logits": reference}, encoded(20), spec)
    assert not agreement.is_finite
    assert agreement.worst[0] == 6


def test_top_k_overlap_counts_the_five_best_labels(encoded: MakeEncoded) -> None:
    theirs = np.tile(np.arange(10.0), (2, 1))
    ours = theirs.copy()
    ours[0, [4, 5]] = ours[0, [5, 4]]  # one of the five best swaps with the sixth
    agreement = TASK.agree({"logits": ours}, {"logits": theirs}, encoded(2), TaskSpec(TASK.name, tuple("abcdefghij")))
    assert agreement.flips == 0
    assert agreement.top_k_overlap == pytest.approx((4 + 5) / 10)


def test_few_labels_have_no_top_k_overlap(encoded: MakeEncoded, reference: np.ndarray) -> None:
    assert TASK.agree({"logits": reference}, {"logits": reference}, encoded(20), SINGLE).top_k_overlap is None
