from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hasten.core.errors import InputError
from hasten.core.tensors import Batch
from hasten.core.text.tokenizer import Tokenizer
from hasten.measure.data import sample_texts
from hasten.tasks import TaskSpec
from hasten.tasks.multiple_choice import TASK, Questions
from support.metrics import scored

SPEC = TaskSpec("multiple-choice")
ITEMS = [
    {"prompt": "a", "choices": ["b", "c d"]},
    {"text": "e f", "choices": ["g"]},
    {"prompt": "h", "choices": ["i", "j", "k"], "id": 7},
]


@pytest.fixture
def questions(tokenizer: Tokenizer) -> Questions:
    return TASK.encode(TASK.parse(ITEMS), tokenizer, TASK.options(SPEC, {}))


def outputs(*values: float) -> dict[str, np.ndarray]:
    return {"logits": np.array(values, np.float32)[:, None]}


def test_each_choice_is_a_row_with_its_prompt(questions: Questions, spelled: Callable[[Batch], list[str]]) -> None:
    assert questions.item_of_row.tolist() == [0, 0, 1, 2, 2, 2]
    assert spelled(questions.batch) == [
        "[CLS] a [SEP] b [SEP]",
        "[CLS] a [SEP] c d [SEP]",
        "[CLS] e f [SEP] g [SEP]",
        "[CLS] h [SEP] i [SEP]",
        "[CLS] h [SEP] j [SEP]",
        "[CLS] h [SEP] k [SEP]",
    ]


def test_scores_of_an_item_add_up_to_one(questions: Questions) -> None:
    logits = outputs(1, 3, -7, 0, 2, 1)
    best = TASK.decode(logits, questions, TASK.options(SPEC, {}))
    assert [chosen["answer"] for chosen in best] == ["c d", "g", "j"]
    ranked = TASK.decode(logits, questions, TASK.options(SPEC, {"top_k": None}))
    assert [[chosen["index"] for chosen in answer] for answer in ranked] == [[1, 0], [0], [1, 2, 0]]
    for answer in ranked:
        assert sum(chosen["score"] for chosen in answer) == pytest.approx(1.0)
    assert ranked[0][0]["score"] == pytest.approx(1 / (1 + np.exp(-2)))
    assert TASK.decode(logits, questions, TASK.options(SPEC, {"top_k": 2}))[2] == ranked[2][:2]


def test_extreme_logits_raise_no_warning(questions: Questions) -> None:
    best = TASK.decode(outputs(-1e4, 1e4, 0, 88, -88, 1e4), questions, TASK.options(SPEC, {}))
    assert [chosen["score"] for chosen in best] == [1.0, 1.0, 1.0]


def test_gold_is_an_index_or_a_choice() -> None:
    assert TASK.gold(ITEMS, SPEC) is None
    rows = [{**item, "label": label} for item, label in zip(ITEMS, [1, "g", "k"], strict=True)]
    assert TASK.gold(rows, SPEC) == [1, 0, 2]


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (None, 'row 3 has no "label"'),
        (3, "row 3 has the label 3, which is not one of its 3 choices"),
        (-1, "not one of its 3"),
        (True, "not one of its 3"),
        ("x", "row 3 has the label 'x'"),
        ([0], "not one of its 3"),
    ],
)
def test_label_outside_the_choices_is_rejected(label: object, message: str) -> None:
    rows = [{**item, "label": 0} for item in ITEMS]
    rows[2]["label"] = label
    with pytest.raises(InputError, match=message):
        TASK.gold(rows, SPEC)


def test_score_is_accuracy_over_items(questions: Questions) -> None:
    metric = scored(TASK, outputs(1, 3, -7, 0, 2, 1), questions, [1, 0, 0], SPEC)
    assert (metric.name, metric.rows) == ("accuracy", 3)
    assert metric.value == pytest.approx(2 / 3)


def test_agreement_counts_items(questions: Questions) -> None:
    reference = outputs(1, 3, -7, 0, 2, 1)
    same = TASK.agree(reference, reference, questions, SPEC)
    assert (same.measure, same.value, same.rows, same.flips, same.max_error) == ("same choice", 1.0, 3, 0, 0.0)
    # The third item flips by a small error; the second has one choice and cannot flip.
    agreement = TASK.agree(outputs(1, 3.5, 8, 0, 1.9, 2), reference, questions, SPEC)
    assert agreement.value == pytest.approx(2 / 3)
    assert (agreement.flips, agreement.worst) == (1, (2, 1, 0))
    assert agreement.max_error == pytest.approx(15.0)


def test_non_finite_outputs_are_reported_by_item(questions: Questions) -> None:
    reference: dict[str, Any] = outputs(1, 3, -7, 0, 2, 1)
    agreement = TASK.agree(outputs(1, 3, -7, np.nan, 2, np.inf), reference, questions, SPEC)
    assert (agreement.is_finite, agreement.value, agreement.worst) == (False, 0.0, (2,))


def test_sample_rows_differ_and_have_two_to_four_choices() -> None:
    rows = TASK.sample(sample_texts(), SPEC)
    questions = TASK.parse(rows)
    assert len(set(questions)) == len(questions) >= 100
    assert {len(question.choices) for question in questions} == {2, 3, 4}
    assert all(question.prompt not in question.choices for question in questions)


def test_rows_of_another_task_are_rejected(encoded: Any) -> None:
    with pytest.raises(TypeError, match="needs the result of this task's encode"):
        TASK.decode(outputs(1), encoded(1), TASK.options(SPEC, {}))
