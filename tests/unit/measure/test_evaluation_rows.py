from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from hasten.core.errors import InputError, PlanError
from hasten.core.plan import Gate
from hasten.core.report import Interval, Metric
from hasten.measure.data import Data, sample_rows
from hasten.measure.evaluation_rows import check_calibration, check_rows, choose_rows, too_few_rows
from hasten.tasks import TASKS, Row, TaskSpec

FEELINGS = TaskSpec("text-classification", ("bad", "good"))
STARS = TaskSpec("text-classification", ("stars",), problem="regression")
TASK = TASKS.get(FEELINGS.name)


def data(rows: Sequence[Row], name: str = "dev.jsonl") -> Data:
    return Data(list(rows), name, {}, is_untyped=False)


def labelled(count: int, start: int = 0) -> list[Row]:
    return [{"text": f"text {index}", "label": index % 2} for index in range(start, start + count)]


def texts(rows: Sequence[Row]) -> list[object]:
    return [row["text"] for row in rows]


# --- which rows are for what


def test_calibration_split_is_deterministic() -> None:
    rows = labelled(872)
    chosen = choose_rows(FEELINGS, data(rows), None)
    assert choose_rows(FEELINGS, data(rows), None) == chosen
    assert (len(chosen.calibration), len(chosen.evaluation)) == (174, 698)
    assert sorted(map(str, texts(rows))) == sorted(map(str, texts(chosen.calibration) + texts(chosen.evaluation)))
    # Not the first of them: files are often sorted.
    assert texts(chosen.calibration) != texts(rows[:174])
    assert texts(chosen.evaluation) == [text for text in texts(rows) if text not in texts(chosen.calibration)]
    assert chosen.notes == ("174 of 872 rows of dev.jsonl set aside for calibration, 698 for evaluation",)


def test_calibration_split_is_bounded() -> None:
    chosen = choose_rows(FEELINGS, data(labelled(5000)), None)
    assert (len(chosen.calibration), len(chosen.evaluation)) == (256, 4744)


@pytest.mark.parametrize("count", [1, 4])
def test_calibration_split_is_empty_for_few_rows(count: int) -> None:
    chosen = choose_rows(FEELINGS, data(labelled(count)), None)
    assert (len(chosen.calibration), len(chosen.evaluation)) == (0, count)


def test_duplicates_are_never_on_both_sides_of_the_split() -> None:
    chosen = choose_rows(FEELINGS, data(labelled(50) * 2), None)
    assert not {*texts(chosen.calibration)} & {*texts(chosen.evaluation)}
    assert len(chosen.evaluation) == 80


@pytest.mark.parametrize("name", TASKS.names())
def test_sample_is_split_without_data(name: str) -> None:
    spec = TaskSpec(name, ("no", "yes"), mask_token="[MASK]")
    chosen = choose_rows(spec, None, None)
    assert 0 < len(chosen.calibration) < len(chosen.evaluation)
    assert len(chosen.evaluation) >= 0.8 * len(sample_rows(spec))
    assert "built-in sample" in chosen.notes[0]


def test_separate_calibration_rows_are_used_unchanged() -> None:
    rows, others = labelled(10), [{"text": f"other {index}"} for index in range(3)]
    chosen = choose_rows(FEELINGS, data(rows), data(others, "train.jsonl"))
    assert (chosen.evaluation, chosen.calibration, chosen.notes) == (rows, others, ())


def test_shared_rows_are_not_used_for_calibration_and_noted() -> None:
    rows = labelled(872)
    train = [{"text": row["text"]} for row in rows[:120]] + [{"text": "another"}]
    chosen = choose_rows(FEELINGS, data(rows), data(train, "train.jsonl"))
    assert chosen.evaluation == rows
    assert chosen.calibration == [{"text": "another"}]
    message = "calibration and evaluation data share 120 of 872 rows: those are not used for calibration"
    assert chosen.notes == check_calibration(TASK, data(rows), data(train, "train.jsonl")) == (message,)


def test_calibration_equal_to_evaluation_is_rejected() -> None:
    rows = labelled(8)
    for train in (rows, [{"text": row["text"]} for row in rows[2:5]]):
        with pytest.raises(PlanError, match=r"every row of train.jsonl is in dev.jsonl too") as caught:
            check_calibration(TASK, data(rows), data(train, "train.jsonl"))
        assert "--calibration" in (caught.value.hint or "")
        with pytest.raises(PlanError, match="every row"):
            choose_rows(FEELINGS, data(rows), data(train, "train.jsonl"))


def test_bad_calibration_row_error_names_the_file() -> None:
    for evaluation in (None, data(labelled(2))):
        with pytest.raises(InputError, match=r'train.jsonl: item 2 has no "text"; its fields are: sentence'):
            check_calibration(TASK, evaluation, data([{"text": "a"}, {"sentence": "b"}], "train.jsonl"))


# --- what rows cannot show


@pytest.mark.parametrize(
    ("rows", "drop", "note"),
    [
        (872, 0.1, "872 rows cannot show a drop of 0.1 point: one row is 0.11"),
        (872, 0.2, None),
        (100, 1.0, None),
        (50, 1.5, "50 rows cannot show a drop of 1.5 points: one row is 2"),
        (1, 0.5, "1 row cannot show a drop of 0.5 point: one row is 100"),
        (872, 0.0, None),  # no drop at all is what they can show
        (872, None, None),
    ],
)
def test_too_few_rows_for_the_drop_are_noted(rows: int, drop: float | None, note: str | None) -> None:
    result = check_rows(TASK, FEELINGS, labelled(rows), Gate(max_drop=drop), None)
    assert result == (() if note is None else (note,))


def test_single_row_is_noted() -> None:
    assert "one row" in check_rows(TASK, None, [{"text": "a"}], Gate(), None)[0]


def test_correlation_has_no_note_about_row_count() -> None:
    rows = [{"text": "a", "score": index} for index in range(9)]
    assert check_rows(TASK, STARS, rows, Gate(max_drop=0.01), "--max-drop") == ()


@pytest.mark.parametrize(
    ("low", "high", "drop", "note"),
    [
        (-0.22, 0.46, 0.3, ("872 rows cannot show a drop of 0.3 point: the interval is ±0.34 points",)),
        (-0.23, 0.46, 0.5, ()),
        (-0.23, 0.46, None, ()),
    ],
)
def test_wide_interval_is_noted(low: float, high: float, drop: float | None, note: tuple[str, ...]) -> None:
    assert too_few_rows(Interval(0.1, low, high), Metric("accuracy", 0.9, 872), Gate(max_drop=drop)) == note
    assert too_few_rows(None, None, Gate(max_drop=drop)) == ()


# --- what rows are refused for


def test_missing_labels_are_rejected_when_needed() -> None:
    rows = [{"text": "a"}, {"text": "b"}]
    with pytest.raises(PlanError, match="--max-drop needs labels, and these rows have none"):
        check_rows(TASK, FEELINGS, rows, Gate(max_drop=1.0), "--max-drop")
    assert check_rows(TASK, FEELINGS, rows, Gate(max_drop=1.0), None) == ()
    assert check_rows(TASK, None, rows, Gate(max_drop=1.0), "--max-drop") == ()  # unknown yet


@pytest.mark.parametrize(
    ("spec", "rows", "gate", "error", "note"),
    [
        (FEELINGS, [{"text": "a", "label": "godo"}], Gate(), InputError, "did you mean 'good'"),
        (FEELINGS, [{"text": "a", "label": 10**400}], Gate(), InputError, "does not know"),
        (FEELINGS, labelled(3), Gate(metric="rouge"), PlanError, "no metric 'rouge'"),
        (FEELINGS, [{"sentence": "a"}], Gate(), InputError, 'no "text"'),
        (STARS, [{"text": "a", "score": 3}, {"text": "b", "score": 3.0}], Gate(), InputError, "is undefined"),
        (STARS, [{"text": "a", "score": 3}], Gate(), InputError, "correlation is undefined"),
        (STARS, [{"text": "a", "score": 10**400}], Gate(), InputError, "no number"),
        (STARS, [{"text": "a", "score": math.inf}], Gate(), InputError, "no number"),
        (TaskSpec("sentence-similarity"), [{"text": "a", "text_pair": "b", "score": 10**400}] * 2, Gate(), InputError,
         "a number in"),
        (TaskSpec("sentence-similarity"), [{"text": "a", "text_pair": "b", "score": 1}] * 2, Gate(), InputError,
         "correlation is undefined"),
        (TaskSpec("text-ranking", ("x",)), [{"text": "a", "text_pair": "b", "score": 1}] * 2, Gate(), InputError,
         "correlation is undefined"),
        (TaskSpec("text-ranking", ("x",)), [{"query": "a", "documents": ["b"], "relevance": [0]}], Gate(), InputError,
         "no document is relevant"),
    ],
)  # fmt: skip
def test_invalid_rows_are_rejected(
    spec: TaskSpec, rows: list[Row], gate: Gate, error: type[Exception], note: str
) -> None:
    with pytest.raises(error, match=note):
        check_rows(TASKS.get(spec.name), spec, rows, gate, None)


@pytest.mark.parametrize("name", TASKS.names())
def test_every_field_is_a_column(name: str) -> None:
    task = TASKS.get(name)
    assert {*task.fields} <= {*task.columns}
    spec = TaskSpec(name, ("no", "yes"), mask_token="[MASK]")
    assert {key for row in sample_rows(spec) for key in row} <= {*task.columns}
