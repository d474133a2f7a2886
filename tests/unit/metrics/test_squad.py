from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.metrics.squad import best, exact, f1, normalize

RECORDED = Path(__file__).parents[2] / "contract" / "recorded" / "question_answering.json"


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
def test_normalize_removes_case_articles_and_punctuation(text: str, normalized: str) -> None:
    assert normalize(text) == normalized


@pytest.mark.parametrize(
    ("answer", "reference", "is_exact", "overlap"),
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
def test_scores(answer: str, reference: str, is_exact: float, overlap: float) -> None:
    assert exact(answer, reference) == is_exact
    assert f1(answer, reference) == pytest.approx(overlap)


def test_scores_equal_those_of_the_official_script() -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))["squad"]
    assert len(recorded) >= 300
    assert {0.0, 1.0} < {overlap for *_, overlap in recorded}
    for answer, reference, is_exact, overlap in recorded:
        assert exact(answer, reference) == is_exact
        assert f1(answer, reference) == pytest.approx(overlap)


def test_closest_reference_counts() -> None:
    assert best(f1, "in 1932", ["the year 1933", "1932"]) == pytest.approx(2 / 3)
    assert best(exact, "1932", ["1933", "1932."]) == 1.0


def test_empty_answer_is_expected_without_references() -> None:
    for measure in (exact, f1):
        assert best(measure, "", []) == 1.0
        assert best(measure, "1932", []) == 0.0
        # References of articles and punctuation are ignored: alone, they mean that the empty answer is expected.
        assert best(measure, "", ["the", "?"]) == 1.0
        assert best(measure, "", ["the", "1932"]) == 0.0


@given(st.text(), st.text())
def test_scores_are_symmetric_and_between_zero_and_one(answer: str, reference: str) -> None:
    assert 0.0 <= exact(answer, reference) <= f1(answer, reference) <= 1.0
    assert f1(answer, reference) == f1(reference, answer)
    assert f1(answer, answer) == 1.0
