from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hasten.core.text.tokenizer import Tokenizer
from hasten.measure.data import sample_texts
from hasten.tasks import Encoded, TaskSpec
from hasten.tasks.feature_extraction import HIDDEN, TASK

SPEC = TaskSpec("feature-extraction")


@pytest.fixture
def three(tokenizer: Tokenizer) -> Encoded:
    """Rows of 5, 3 and 6 tokens."""
    return TASK.encode(["a b c", "a", ("a b", "c")], tokenizer, TASK.options(SPEC, {}))


@pytest.fixture
def vectors() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(14, 8)).astype(np.float32)


def test_every_text_gets_the_vectors_of_its_tokens(three: Encoded, vectors: np.ndarray) -> None:
    answers = TASK.decode({HIDDEN: vectors}, three, TASK.options(SPEC, {}))
    assert [answer.shape for answer in answers] == [(1, 5, 8), (1, 3, 8), (1, 6, 8)]
    np.testing.assert_array_equal(np.concatenate(answers, axis=1)[0], vectors)
    assert {answer.dtype.name for answer in answers} == {"float32"}


def test_answers_have_the_shape_of_the_payload(three: Encoded, vectors: np.ndarray) -> None:
    options = TASK.options(SPEC, {})
    answers = TASK.decode({HIDDEN: vectors}, three, options)
    assert TASK.present("a b c", answers, options) is answers[0]
    assert TASK.present(["a b c", "a", "…"], answers, options) is answers


def test_agreement_is_over_tokens(three: Encoded, vectors: np.ndarray) -> None:
    same = TASK.agree({HIDDEN: vectors}, {HIDDEN: vectors}, three, SPEC)
    assert (same.measure, same.rows, same.max_error) == ("mean cosine", 14, 0.0)
    assert same.value == pytest.approx(1.0)
    ours = vectors.copy()
    ours[6] = -vectors[6]  # the second token of the second text
    ours[13] += 0.1
    agreement = TASK.agree({HIDDEN: ours}, {HIDDEN: vectors}, three, SPEC)
    assert agreement.value == pytest.approx(1 - 2 / 14, abs=0.02)
    assert agreement.cosine_min == pytest.approx(-1.0)
    assert agreement.worst == (1, 2, 0)


def test_non_finite_outputs_are_reported_by_item(three: Encoded, vectors: np.ndarray) -> None:
    ours = vectors.copy()
    ours[[6, 7, 13], 2] = np.inf
    agreement = TASK.agree({HIDDEN: ours}, {HIDDEN: vectors}, three, SPEC)
    assert (agreement.is_finite, agreement.value, agreement.worst) == (False, 0.0, (1, 2))


def test_vectors_have_no_gold_labels() -> None:
    rows: list[Any] = TASK.sample(sample_texts(), SPEC)
    assert len(rows) >= 100
    assert TASK.gold([{"text": "a", "label": 1}], SPEC) is None
