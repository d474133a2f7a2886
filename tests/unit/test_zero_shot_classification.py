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
from hasten.core.tokenizer import Tokenizer
from hasten.tasks import TASKS, TaskSpec
from hasten.tasks.zero_shot_classification import Question, Questions
from scored import scored

TASK = TASKS.get("zero-shot-classification")
NLI = TaskSpec(TASK.name, ("contradiction", "neutral", "entailment"))
ONE = TaskSpec(TASK.name, ("score",))
TOPICS = ("sports", "politics", "science")
TEMPLATE = {"hypothesis_template": "{}"}

Asked = Callable[..., Questions]


@pytest.fixture
def asked() -> Asked:
    """`asked(2, 3)`: an item with two labels and one with three."""

    def make(*counts: int, labels: tuple[tuple[str, ...], ...] | None = None) -> Questions:
        own = labels or tuple(TOPICS[:count] for count in counts)
        owners = np.repeat(np.arange(len(own)), [len(part) for part in own])
        return Questions(None, owners, len(own), (), (), tuple("a" for _ in own), own)  # type: ignore[arg-type]

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
def test_payloads(payload: object, items: list[Question]) -> None:
    assert TASK.parse(payload) == items


@pytest.mark.parametrize(
    ("payload", "said"),
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
def test_bad_payloads_are_refused(payload: object, said: str) -> None:
    with pytest.raises(InputError, match=said):
        TASK.parse(payload)


# --- options


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"labels": ["a"]}, "unknown option 'labels'"),
        ({"candidate_labels": []}, "candidate_labels is empty"),
        ({"candidate_labels": ""}, "candidate_labels is empty"),
        ({"candidate_labels": 7}, "bad option: .*candidate_labels"),
        ({"candidate_labels": ["a", 7]}, "bad option: .*candidate_labels"),
        ({"candidate_labels": ["a", ""]}, "candidate label 2 is empty"),
        ({"candidate_labels": ["a\ud800"]}, "candidate label 1 is not valid Unicode"),
        ({"multi_label": "yes"}, "bad option: .*multi_label"),
        ({"hypothesis_template": 7}, "bad option: .*hypothesis_template"),
        ({"hypothesis_template": ""}, "hypothesis_template is empty"),
        ({"hypothesis_template": "{}\ud800"}, "hypothesis_template is not valid Unicode"),
    ],
)
def test_bad_options_are_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        TASK.options(NLI, given)


@pytest.mark.parametrize(
    "template", ["no place", "{}{}", "{} {0}", "{1}", "{label}", "{", "}", "{{}}", "{!r}", "{:>99999999999}", "{0.x}"]
)
def test_a_template_has_one_plain_place_for_the_label(template: str) -> None:
    with pytest.raises(InputError, match="has no one place for the label") as caught:
        TASK.options(NLI, {"hypothesis_template": template})
    assert caught.value.hint == 'as in "This example is {}."'


@pytest.mark.parametrize("template", ["{}", "It is about {}.", "{0}, {0} and {0}", "{{{}}} in braces"])
def test_templates(template: str) -> None:
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
def test_entailment_is_found_as_the_pipeline_finds_it(labels: tuple[str, ...], yes: int, no: int) -> None:
    options = TASK.options(TaskSpec(TASK.name, labels), {})
    assert (options.yes, options.no) == (yes, no)


def test_a_guess_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    spec = TaskSpec(TASK.name, ("never", "asked", "before"))
    with caplog.at_level(logging.WARNING, "hasten"):
        for _ in range(3):
            TASK.options(spec, {})
        TASK.options(NLI, {})
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("none of the model's labels (never, asked, before) starts with 'entail'")


def test_what_one_output_cannot_say_is_refused(tokenizer: Tokenizer) -> None:
    """The pipeline weighs it against itself, and answers one half whatever the text."""
    with pytest.raises(InputError, match="multi_label"):
        TASK.options(ONE, {"multi_label": True})
    options = TASK.options(ONE, TEMPLATE)
    with pytest.raises(InputError, match="item 2 has one candidate label"):
        TASK.encode([Question("a", ("b", "c")), Question("a", ("b",))], tokenizer, options)


# --- rows of tokens


def rows_of(encoded: Questions, tokenizer: Tokenizer) -> list[str]:
    ids = np.split(encoded.batch.values["input_ids"], np.cumsum(encoded.batch.lengths)[:-1])
    return [" ".join(tokenizer.token(token) for token in row.tolist()) for row in ids]


def test_one_row_a_text_and_label_in_their_order(tokenizer: Tokenizer) -> None:
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


def test_the_text_alone_is_cut(tokenizer: Tokenizer) -> None:
    long = " ".join("abcdefghijklmnop")
    options = TASK.options(NLI, {"candidate_labels": ["x", "w x y z"]} | TEMPLATE)
    encoded = TASK.encode([Question("a"), Question(long)], tokenizer, options)
    assert rows_of(encoded, tokenizer)[2:] == [
        "[CLS] a b c d e f g h i j k l [SEP] x [SEP]",
        "[CLS] a b c d e f g h i [SEP] w x y z [SEP]",
    ]
    assert encoded.truncated == (2, 3)


def test_a_label_that_leaves_no_room_is_refused(tokenizer: Tokenizer) -> None:
    """The pipeline then cuts nothing, and the model fails."""
    label = " ".join("abcdefghijklm")
    options = TASK.options(NLI, {"candidate_labels": ["x", label]} | TEMPLATE)
    with pytest.raises(InputError, match="makes 13 tokens, which leaves no room for a text in the model's 16"):
        TASK.encode([Question("a")], tokenizer, options)
    TASK.encode([Question("a")], tokenizer, TASK.options(NLI, {"candidate_labels": [label[:-2]]} | TEMPLATE))


def test_no_labels_anywhere_is_one_line(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="item 2 has no candidate labels"):
        TASK.encode([Question("a", ("x",)), Question("b")], tokenizer, TASK.options(NLI, {}))


def test_ten_thousand_labels(tokenizer: Tokenizer) -> None:
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


def test_labels_share_one(asked: Asked) -> None:
    options = TASK.options(NLI, {})
    first, second = TASK.decode(by_entailment(1.0, 3.0, 2.0, -1.0, 5.0), asked(3, 2), options)
    assert first == {"sequence": "a", "labels": ["politics", "science", "sports"], "scores": first["scores"]}
    assert first["scores"] == pytest.approx(special.softmax([3.0, 2.0, 1.0]).tolist())
    assert second["labels"] == ["politics", "sports"]
    assert all(type(score) is float for score in first["scores"])


@pytest.mark.parametrize(("count", "given"), [(1, {}), (3, {"multi_label": True})])
def test_a_label_by_itself_is_weighed_against_contradiction(asked: Asked, count: int, given: dict[str, object]) -> None:
    (answer,) = TASK.decode(by_entailment(*[1.0, 3.0, -2.0][:count]), asked(count), TASK.options(NLI, given))
    expected = [special.expit(value - 0.25) for value in (3.0, 1.0, -2.0)] if count == 3 else [special.expit(0.75)]
    assert answer["scores"] == pytest.approx(expected)


def test_extreme_logits_saturate(asked: Asked) -> None:
    """Warnings are errors here; the pipeline overflows and answers nan."""
    (answer,) = TASK.decode(by_entailment(1000.0, -1000.0, 0.0), asked(3), TASK.options(NLI, {}))
    assert answer["scores"] == pytest.approx([1.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("payload", "expected"), [("a", "one"), ({"text": "a"}, "one"), (["a"], ["one"]), (("a",), ["one"])]
)
def test_answers_have_the_shape_of_the_payload(payload: object, expected: object) -> None:
    assert TASK.present(payload, ["one"], TASK.options(NLI, {})) == expected  # type: ignore[list-item]


# --- labelled rows


def row(label: object, *candidates: str) -> dict[str, object]:
    return {"text": "a", "candidate_labels": list(candidates or TOPICS), "label": label}


def test_gold_is_by_name_or_place() -> None:
    rows = [row("politics"), row(2), {"text": "a", "candidate_labels": "x, y", "label": "y"}]
    assert TASK.gold(rows, NLI) == ["politics", "science", "y"]
    assert TASK.gold([{"text": "a", "candidate_labels": ["x"]}], NLI) is None


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row("politics"), row("polities")], "row 2 .* none of its candidate labels: did you mean 'politics'"),
        ([row("entailment")], "row 1 has the label 'entailment', which is none of its candidate labels"),
        ([row(3)], "row 1 has the label 3"),
        ([row(-1)], "row 1 has the label -1"),
        ([row(True)], "row 1 has the label True"),
        ([row(["sports"])], "row 1 has the label"),
        ([row("sports"), {"text": "a", "candidate_labels": ["x"]}], 'row 2 has no "label"'),
    ],
)
def test_labels_that_are_no_candidates_are_refused(rows: list[dict[str, object]], said: str) -> None:
    with pytest.raises(InputError, match=said):
        TASK.gold(rows, NLI)


def test_accuracy_and_macro_f1(asked: Asked) -> None:
    random = np.random.default_rng(3)
    logits = random.normal(size=(120, 3)).astype(np.float32)
    gold = [TOPICS[place] for place in random.integers(0, 3, 40)]
    found = [TOPICS[place] for place in logits[:, 2].reshape(40, 3).argmax(axis=1)]
    metric = scored(TASK, {"logits": logits}, asked(*[3] * 40), gold, NLI)
    assert (metric.name, metric.rows) == ("accuracy", 40)
    assert metric.value == pytest.approx(np.mean([a == b for a, b in zip(found, gold, strict=True)]))
    assert metric.also == {"macro F1": pytest.approx(f1_score(gold, found, average="macro"))}


# --- agreement


@pytest.fixture
def reference() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(60, 3))


def test_equal_outputs_agree(asked: Asked, reference: np.ndarray) -> None:
    agreement = TASK.agree({"logits": reference}, {"logits": reference}, asked(*[3] * 20), NLI)
    assert (agreement.value, agreement.flips, agreement.max_error, agreement.rank_correlation) == (1.0, 0, 0.0, 1.0)
    assert agreement.rows == 60


def test_another_best_label_is_a_flip(asked: Asked, reference: np.ndarray) -> None:
    ours = reference.copy()
    for item in (4, 11):
        ours[3 * item : 3 * item + 3, 2] *= -1
    ours[3 * 7, 0] += 50  # a large error that changes no answer
    agreement = TASK.agree({"logits": ours}, {"logits": reference}, asked(*[3] * 20), NLI)
    assert (agreement.flips, agreement.value) == (2, pytest.approx(0.9))
    assert set(agreement.worst[:2]) == {4, 11}
    assert agreement.worst[2] == 7
    assert agreement.max_error == pytest.approx(50)


def test_equal_labels_do_not_flip_into_each_other(asked: Asked) -> None:
    twice = asked(labels=(("x", "x", "y"),))
    agreement = TASK.agree(by_entailment(1.0, 1.1, 0.0), by_entailment(1.1, 1.0, 0.0), twice, NLI)
    assert agreement.flips == 0


def test_one_label_flips_where_it_no_longer_fits(asked: Asked) -> None:
    agreement = TASK.agree(by_entailment(0.2, 0.9), by_entailment(0.3, 0.8), asked(1, 1), NLI)
    assert (agreement.flips, agreement.worst[0], agreement.rank_correlation) == (1, 0, None)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_outputs_that_are_not_finite_are_seen(asked: Asked, reference: np.ndarray, bad: float) -> None:
    ours = reference.copy()
    ours[15:17, 0] = bad
    ours[50, 1] = bad
    agreement = TASK.agree({"logits": ours}, {"logits": reference}, asked(*[3] * 20), NLI)
    assert not agreement.is_finite
    assert agreement.worst == (5, 16)


def test_rows_of_another_task_are_a_mistake(encoded: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match="own encode"):
        TASK.decode(by_entailment(1.0), encoded(1), TASK.options(NLI, {}))  # type: ignore[arg-type]
