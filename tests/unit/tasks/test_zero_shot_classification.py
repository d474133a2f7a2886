from __future__ import annotations

import logging
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from scipy import special
from sklearn.metrics import f1_score

from hasten.core.errors import InputError
from hasten.core.text.tokenizer import Tokenizer
from hasten.tasks import TASKS, TaskSpec
from hasten.tasks.zero_shot_classification import Question, Questions
from support.metrics import scored

TASK = TASKS.get("zero-shot-classification")
NLI = TaskSpec(TASK.name, ("contradiction", "neutral", "entailment"))
ONE = TaskSpec(TASK.name, ("score",))
TOPICS = ("sports", "politics", "science")
TEMPLATE = {"hypothesis_template": "{}"}

MakeQuestions = Callable[..., Questions]


@pytest.fixture
def make_questions() -> MakeQuestions:
    """`make_questions(2, 3)`: an item with two labels and one with three."""

    def make(*counts: int, labels: tuple[tuple[str, ...], ...] | None = None) -> Questions:
        item_labels = labels or tuple(TOPICS[:count] for count in counts)
        owners = np.repeat(np.arange(len(item_labels)), [len(part) for part in item_labels])
        return Questions(None, owners, len(item_labels), (), (), tuple("a" for _ in item_labels), item_labels)  # type: ignore[arg-type]

    return make


def by_entailment(*values: float) -> dict[str, np.ndarray]:
    return {"logits": np.array([[0.25, -1.0, value] for value in values], np.float32)}


# --- payloads


@pytest.mark.parametrize(
    ("payload", "items"),
    [
        ("a", [Question("a")]),
        (["a", "b"], [Question("a"), Question("b")]),
        ({"text": "a"}, [Question("a")]),
        ({"sequence": "a"}, [Question("a")]),
        ({"text": "a", "candidate_labels": ["x", "y"]}, [Question("a", ("x", "y"))]),
        ({"text": "a", "candidate_labels": "x , y,, z z "}, [Question("a", ("x", "y", "z z"))]),
        ({"text": "a", "candidate_labels": None, "sequence": None, "id": 7, "label": "x"}, [Question("a")]),
        (({"sequence": "a", "candidate_labels": ("x", "x")}, "b"), [Question("a", ("x", "x")), Question("b")]),
    ],
)
def test_payloads_are_parsed(payload: object, items: list[Question]) -> None:
    assert TASK.parse(payload) == items


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ([], "the list is empty"),
        ("", "text 1 is empty"),
        (["a", None], "text 2 is NoneType"),
        (["a", ["b"]], "text 2 is list"),
        (["a", "b\ud800"], "text 2 is not valid Unicode: lone surrogate at character 1"),
        ({"sequences": "a"}, 'item 1 has no "text"'),
        ({"sequence": 7}, "text 1 is int"),
        ({"text": "a", "sequence": "b"}, 'item 1 has both "text" and "sequence"'),
        (["a", {"text": "a", "text_pair": "b"}], 'item 2 has a "text_pair"'),
        ({"text": "a", "candidate_labels": []}, "candidate_labels of item 1 is empty"),
        ({"text": "a", "candidate_labels": " , ,"}, "candidate_labels of item 1 is empty"),
        (["a", {"text": "a", "candidate_labels": 3}], "candidate_labels of item 2 is int, not a list of strings"),
        ({"text": "a", "candidate_labels": {"x": 1}}, "candidate_labels of item 1 is dict"),
        ({"text": "a", "candidate_labels": ["x", 3]}, "candidate label 2 of item 1 is int"),
        ({"text": "a", "candidate_labels": ["x", " "]}, "candidate label 2 of item 1 is empty"),
        ({"text": "a", "candidate_labels": ["\udfff"]}, "candidate label 1 of item 1 is not valid Unicode"),
    ],
)
def test_invalid_payloads_are_rejected(payload: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TASK.parse(payload)


# --- options


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"labels": ["a"]}, "unknown option 'labels'"),
        ({"candidate_labels": []}, "candidate_labels is empty"),
        ({"candidate_labels": ""}, "candidate_labels is empty"),
        ({"candidate_labels": 7}, "invalid option: .*candidate_labels"),
        ({"candidate_labels": ["a", 7]}, "invalid option: .*candidate_labels"),
        ({"candidate_labels": ["a", ""]}, "candidate label 2 is empty"),
        ({"candidate_labels": ["a\ud800"]}, "candidate label 1 is not valid Unicode"),
        ({"multi_label": "yes"}, "invalid option: .*multi_label"),
        ({"hypothesis_template": 7}, "invalid option: .*hypothesis_template"),
        ({"hypothesis_template": ""}, "hypothesis_template is empty"),
        ({"hypothesis_template": "{}\ud800"}, "hypothesis_template is not valid Unicode"),
    ],
)
def test_invalid_options_are_rejected(keywords: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TASK.options(NLI, keywords)


@pytest.mark.parametrize(
    "template", ["no place", "{}{}", "{} {0}", "{1}", "{label}", "{", "}", "{{}}", "{!r}", "{:>99999999999}", "{0.x}"]
)
def test_template_without_a_plain_placeholder_is_rejected(template: str) -> None:
    with pytest.raises(InputError, match="must have one plain placeholder for the label") as caught:
        TASK.options(NLI, {"hypothesis_template": template})
    assert caught.value.hint == 'as in "This example is {}."'


@pytest.mark.parametrize("template", ["{}", "It is about {}.", "{0}, {0} and {0}", "{{{}}} in braces"])
def test_valid_templates_are_accepted(template: str) -> None:
    assert TASK.options(NLI, {"hypothesis_template": template}).template == template


@pytest.mark.parametrize(
    ("labels", "yes", "no"),
    [
        (("contradiction", "neutral", "entailment"), 2, 0),
        (("ENTAILMENT", "neutral", "contradiction"), 0, 2),
        (("contradiction", "Entails", "neutral"), 1, 0),
        (("not_entailment", "entailment"), 1, 0),
        (("entailment", "not_entailment"), 0, 1),
        (("LABEL_0", "LABEL_1", "LABEL_2"), 2, 0),
        (("LABEL_0",), 0, 0),
    ],
)
def test_entailment_label_equals_the_pipelines(labels: tuple[str, ...], yes: int, no: int) -> None:
    options = TASK.options(TaskSpec(TASK.name, labels), {})
    assert (options.yes, options.no) == (yes, no)


def test_guessed_entailment_label_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    spec = TaskSpec(TASK.name, ("never", "asked", "before"))
    with caplog.at_level(logging.WARNING, "hasten"):
        for _ in range(3):
            TASK.options(spec, {})
        TASK.options(NLI, {})
    (error_text,) = [record.getMessage() for record in caplog.records]
    assert error_text.startswith("none of the model's labels (never, asked, before) starts with 'entail'")


def test_model_with_one_output_rejects_single_labels(tokenizer: Tokenizer) -> None:
    """The pipeline compares the output with itself and always answers 0.5."""
    with pytest.raises(InputError, match="multi_label"):
        TASK.options(ONE, {"multi_label": True})
    options = TASK.options(ONE, TEMPLATE)
    with pytest.raises(InputError, match="item 2 has one candidate label"):
        TASK.encode([Question("a", ("b", "c")), Question("a", ("b",))], tokenizer, options)


# --- rows of tokens


def rows_of(encoded: Questions, tokenizer: Tokenizer) -> list[str]:
    ids = np.split(encoded.batch.values["input_ids"], np.cumsum(encoded.batch.lengths)[:-1])
    return [" ".join(tokenizer.token(token) for token in row.tolist()) for row in ids]


def test_rows_follow_the_order_of_texts_and_labels(tokenizer: Tokenizer) -> None:
    options = TASK.options(NLI, {"candidate_labels": ["x", "y z"], "hypothesis_template": "is {} ."})
    encoded = TASK.encode([Question("a b"), Question("c", ("w", "v v", "w"))], tokenizer, options)
    assert rows_of(encoded, tokenizer) == [
        "[CLS] a b [SEP] [UNK] x [UNK] [SEP]",
        "[CLS] a b [SEP] [UNK] y z [UNK] [SEP]",
        "[CLS] c [SEP] [UNK] w [UNK] [SEP]",
        "[CLS] c [SEP] [UNK] v v [UNK] [SEP]",
        "[CLS] c [SEP] [UNK] w [UNK] [SEP]",
    ]
    assert encoded.item_of_row.tolist() == [0, 0, 1, 1, 1]
    assert (encoded.items, encoded.truncated) == (2, ())
    assert encoded.labels == (("x", "y z"), ("w", "v v", "w"))


def test_only_the_text_is_truncated(tokenizer: Tokenizer) -> None:
    long = " ".join("abcdefghijklmnop")
    options = TASK.options(NLI, {"candidate_labels": ["x", "w x y z"]} | TEMPLATE)
    encoded = TASK.encode([Question("a"), Question(long)], tokenizer, options)
    assert rows_of(encoded, tokenizer)[2:] == [
        "[CLS] a b c d e f g h i j k l [SEP] x [SEP]",
        "[CLS] a b c d e f g h i [SEP] w x y z [SEP]",
    ]
    assert encoded.truncated == (2, 3)


def test_label_that_leaves_no_room_for_a_text_is_rejected(tokenizer: Tokenizer) -> None:
    """The pipeline then truncates nothing, and the model fails."""
    label = " ".join("abcdefghijklm")
    options = TASK.options(NLI, {"candidate_labels": ["x", label]} | TEMPLATE)
    with pytest.raises(
        InputError, match="has 13 tokens, which leaves no room for a text within the model's limit of 16"
    ):
        TASK.encode([Question("a")], tokenizer, options)
    TASK.encode([Question("a")], tokenizer, TASK.options(NLI, {"candidate_labels": [label[:-2]]} | TEMPLATE))


def test_missing_labels_are_rejected(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="item 2 has no candidate labels"):
        TASK.encode([Question("a", ("x",)), Question("b")], tokenizer, TASK.options(NLI, {}))


def test_ten_thousand_labels_are_encoded_quickly(tokenizer: Tokenizer) -> None:
    letters = "abcdefghij"
    labels = [" ".join(letters[int(digit)] for digit in str(number)) for number in range(10_000)]
    text = " ".join("abcdefghij" * 20)
    options = TASK.options(NLI, {"candidate_labels": labels} | TEMPLATE)
    tracemalloc.start()
    begin = time.process_time()
    encoded = TASK.encode([Question(text)], tokenizer, options)
    outputs = {"logits": np.random.default_rng(0).normal(size=(10_000, 3)).astype(np.float32)}
    (answer,) = TASK.decode(outputs, encoded, options)
    used, peak = time.process_time() - begin, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert answer["labels"][0] == labels[outputs["logits"][:, 2].argmax()]
    assert sorted(answer["labels"]) == sorted(labels)
    assert sum(answer["scores"]) == pytest.approx(1.0, abs=1e-4)
    assert rows_of(encoded, tokenizer)[4321] == f"[CLS] {text[:17]} [SEP] {labels[4321]} [SEP]"
    assert used < 10
    assert peak < 100e6


# --- answers


def test_scores_of_labels_add_up_to_one(make_questions: MakeQuestions) -> None:
    options = TASK.options(NLI, {})
    first, second = TASK.decode(by_entailment(1.0, 3.0, 2.0, -1.0, 5.0), make_questions(3, 2), options)
    assert first == {"sequence": "a", "labels": ["politics", "science", "sports"], "scores": first["scores"]}
    assert first["scores"] == pytest.approx(special.softmax([3.0, 2.0, 1.0]).tolist())
    assert second["labels"] == ["politics", "sports"]
    assert all(type(score) is float for score in first["scores"])


@pytest.mark.parametrize(("count", "keywords"), [(1, {}), (3, {"multi_label": True})])
def test_single_label_is_compared_with_contradiction(
    make_questions: MakeQuestions, count: int, keywords: dict[str, object]
) -> None:
    (answer,) = TASK.decode(
        by_entailment(*[1.0, 3.0, -2.0][:count]), make_questions(count), TASK.options(NLI, keywords)
    )
    expected = [special.expit(value - 0.25) for value in (3.0, 1.0, -2.0)] if count == 3 else [special.expit(0.75)]
    assert answer["scores"] == pytest.approx(expected)


def test_extreme_logits_saturate(make_questions: MakeQuestions) -> None:
    """Warnings are errors here; the pipeline overflows and returns NaN."""
    (answer,) = TASK.decode(by_entailment(1000.0, -1000.0, 0.0), make_questions(3), TASK.options(NLI, {}))
    assert answer["scores"] == pytest.approx([1.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("payload", "expected"), [("a", "one"), ({"text": "a"}, "one"), (["a"], ["one"]), (("a",), ["one"])]
)
def test_answers_have_the_shape_of_the_payload(payload: object, expected: object) -> None:
    assert TASK.present(payload, ["one"], TASK.options(NLI, {})) == expected  # type: ignore[list-item]


# --- labelled rows


def row(label: object, *candidates: str) -> dict[str, object]:
    return {"text": "a", "candidate_labels": list(candidates or TOPICS), "label": label}


def test_gold_is_a_name_or_an_index() -> None:
    rows = [row("politics"), row(2), {"text": "a", "candidate_labels": "x, y", "label": "y"}]
    assert TASK.gold(rows, NLI) == ["politics", "science", "y"]
    assert TASK.gold([{"text": "a", "candidate_labels": ["x"]}], NLI) is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row("politics"), row("polities")], "row 2 .* not one of its candidate labels: did you mean 'politics'"),
        ([row("entailment")], "row 1 has the label 'entailment', which is not one of its candidate labels"),
        ([row(3)], "row 1 has the label 3"),
        ([row(-1)], "row 1 has the label -1"),
        ([row(True)], "row 1 has the label True"),
        ([row(["sports"])], "row 1 has the label"),
        ([row("sports"), {"text": "a", "candidate_labels": ["x"]}], 'row 2 has no "label"'),
    ],
)
def test_labels_outside_the_candidates_are_rejected(rows: list[dict[str, object]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TASK.gold(rows, NLI)


def test_metric_is_accuracy_and_macro_f1(make_questions: MakeQuestions) -> None:
    random = np.random.default_rng(3)
    logits = random.normal(size=(120, 3)).astype(np.float32)
    gold = [TOPICS[index] for index in random.integers(0, 3, 40)]
    predicted = [TOPICS[index] for index in logits[:, 2].reshape(40, 3).argmax(axis=1)]
    metric = scored(TASK, {"logits": logits}, make_questions(*[3] * 40), gold, NLI)
    assert (metric.name, metric.rows) == ("accuracy", 40)
    assert metric.value == pytest.approx(np.mean([a == b for a, b in zip(predicted, gold, strict=True)]))
    assert metric.other_metrics == {"macro F1": pytest.approx(f1_score(gold, predicted, average="macro"))}


# --- agreement


@pytest.fixture
def reference() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(60, 3))


def test_equal_outputs_agree(make_questions: MakeQuestions, reference: np.ndarray) -> None:
    agreement = TASK.agree({"logits": reference}, {"logits": reference}, make_questions(*[3] * 20), NLI)
    assert (agreement.value, agreement.flips, agreement.max_error, agreement.rank_correlation) == (1.0, 0, 0.0, 1.0)
    assert agreement.rows == 60


def test_changed_best_label_is_a_flip(make_questions: MakeQuestions, reference: np.ndarray) -> None:
    ours = reference.copy()
    for item in (4, 11):
        ours[3 * item : 3 * item + 3, 2] *= -1
    ours[3 * 7, 0] += 50  # a large error that flips no label
    agreement = TASK.agree({"logits": ours}, {"logits": reference}, make_questions(*[3] * 20), NLI)
    assert (agreement.flips, agreement.value) == (2, pytest.approx(0.9))
    assert set(agreement.worst[:2]) == {4, 11}
    assert agreement.worst[2] == 7
    assert agreement.max_error == pytest.approx(50)


def test_equal_labels_do_not_flip_into_each_other(make_questions: MakeQuestions) -> None:
    twice = make_questions(labels=(("x", "x", "y"),))
    agreement = TASK.agree(by_entailment(1.0, 1.1, 0.0), by_entailment(1.1, 1.0, 0.0), twice, NLI)
    assert agreement.flips == 0


def test_single_label_flips_if_it_no_longer_fits(make_questions: MakeQuestions) -> None:
    agreement = TASK.agree(by_entailment(0.2, 0.9), by_entailment(0.3, 0.8), make_questions(1, 1), NLI)
    assert (agreement.flips, agreement.worst[0], agreement.rank_correlation) == (1, 0, None)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_outputs_are_reported(make_questions: MakeQuestions, reference: np.ndarray, bad: float) -> None:
    ours = reference.copy()
    ours[15:17, 0] = bad
    ours[50, 1] = bad
    agreement = TASK.agree({"logits": ours}, {"logits": reference}, make_questions(*[3] * 20), NLI)
    assert not agreement.is_finite
    assert agreement.worst == (5, 16)


def test_rows_of_another_task_are_rejected(encoded: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match="needs the result of this task's encode"):
        TASK.decode(by_entailment(1.0), encoded(1), TASK.options(NLI, {}))  # type: ignore[arg-type]
