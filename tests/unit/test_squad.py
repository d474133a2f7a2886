from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.core.squad import best, exact, f1, normalize

RECORDED = Path(__file__).parents[1] / "contract" / "recorded" / "question_answering.json"


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The Bridge", "bridge"),
        ("  a   grey\tbridge\n", "grey bridge"),
        ("An answer, (the) second!", "answer second"),
        ("another theory of anatomy", "another theory of anatomy"),
        ("U.S.A.", "usa"),
        ("3.5%", "35"),
        ("the-end", "theend"),
        ("“quoted” – dash", "“quoted” – dash"),
        ("THE", ""),
        ("?!", ""),
        ("", ""),
    ],
)
def test_normalize(text: str, normalized: str) -> None:
    assert normalize(text) == normalized


@pytest.mark.parametrize(
    ("answer", "right", "is_exact", "overlap"),
    [
        ("the grey bridge", "Grey bridge.", 1.0, 1.0),
        ("grey bridge", "bridge", 0.0, 2 / 3),
        ("bridge bridge", "bridge", 0.0, 2 / 3),
        ("bridge", "bridge bridge bridge", 0.0, 1 / 2),
        ("in 1932", "1932", 0.0, 2 / 3),
        ("red", "grey", 0.0, 0.0),
        ("", "", 1.0, 1.0),
        ("", "grey", 0.0, 0.0),
        ("grey", "", 0.0, 0.0),
        ("the", "", 1.0, 1.0),
    ],
)
def test_scores(answer: str, right: str, is_exact: float, overlap: float) -> None:
    assert exact(answer, right) == is_exact
    assert f1(answer, right) == pytest.approx(overlap)


def test_the_scores_are_those_of_the_official_script() -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))["squad"]
    assert len(recorded) >= 300
    assert {0.0, 1.0} < {overlap for *_, overlap in recorded}
    for answer, right, is_exact, overlap in recorded:
        assert exact(answer, right) == is_exact
        assert f1(answer, right) == pytest.approx(overlap)


def test_the_closest_right_answer_counts() -> None:
    assert best(f1, "in 1932", ["the year 1933", "1932"]) == pytest.approx(2 / 3)
    assert best(exact, "1932", ["1933", "1932."]) == 1.0


def test_without_a_right_answer_none_is_right() -> None:
    for measure in (exact, f1):
        assert best(measure, "", []) == 1.0
        assert best(measure, "1932", []) == 0.0
        # An answer of articles and punctuation is no right answer: with it alone, none is right; beside others, it
        # does not count.
        assert best(measure, "", ["the", "?"]) == 1.0
        assert best(measure, "", ["the", "1932"]) == 0.0


@given(st.text(), st.text())
def test_scores_are_symmetric_and_between_zero_and_one(answer: str, right: str) -> None:
    assert 0.0 <= exact(answer, right) <= f1(answer, right) <= 1.0
    assert f1(answer, right) == f1(right, answer)
    assert f1(answer, answer) == 1.0
