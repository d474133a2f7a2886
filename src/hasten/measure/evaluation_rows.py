"""Choose the rows to evaluate and to calibrate on, and check whether they support the requested gate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from hasten.core.errors import InputError, PlanError
from hasten.core.plan import Gate
from hasten.core.report import Interval, Metric, find_metric
from hasten.measure.data import Data, HasColumns, sample_rows
from hasten.tasks import TASKS, AnyTask, Row, TaskSpec

# The share of rows set aside for calibration if there is one set of rows: enough to see the range of most values.
_CALIBRATION_SHARE = 0.2
_MAX_CALIBRATION_ROWS = 256
# The metrics to which every row contributes equally.
_PER_ROW_METRICS = ("accuracy", "F1", "exact match", "top-5 accuracy")
SAMPLE = "the built-in sample"


@dataclass(frozen=True, slots=True)
class EvaluationRows:
    """Rows to evaluate, and others to calibrate on; `notes` say how they were separated."""

    evaluation: list[Row]
    calibration: list[Row]
    notes: tuple[str, ...] = ()


def choose_rows(
    spec: TaskSpec, data: Data | None, calibration: Data | None, *, is_needed: bool = True
) -> EvaluationRows:
    """Return the user's rows, or the built-in sample.

    Without separate calibration rows some are set aside, the same ones each time; if no calibration is needed
    (`is_needed`), all rows are evaluated.
    """
    task = TASKS.get(spec.name)
    rows = data.rows_for(spec) if data is not None else sample_rows(spec)
    name = data.name if data is not None else SAMPLE
    if not is_needed:
        return EvaluationRows(rows, [])
    if calibration is None:
        return _split(task, rows, name)
    separate, notes = _without_shared_rows(task, rows, name, calibration)
    return EvaluationRows(rows, separate, notes)


def check_rows(
    task: AnyTask, spec: TaskSpec | None, rows: Sequence[Row], gate: Gate, needed_for: str | None
) -> tuple[str, ...]:
    """Raise if the rows cannot be evaluated; return notes for the user before long work starts.

    `needed_for` is the option that needs labels. Without the spec, labels are not read.
    """
    task.parse(rows)
    gold = task.gold(rows, spec) if spec is not None else None
    if spec is not None and gold is None and needed_for is not None:
        raise PlanError(f"{needed_for} needs labels, and these rows have none", hint="pass --data with labelled rows")
    if spec is not None and gold is not None:
        metrics = task.metrics(gold, spec)
        name = metrics[0] if gate.metric is None else find_metric(gate.metric, metrics)
        row_points = 100 / len(rows)
        if name in _PER_ROW_METRICS and gate.max_drop and gate.max_drop < row_points:
            return (f"{_cannot_show(len(rows), gate.max_drop)}: one row is {float(f'{row_points:.2g}'):g}",)
    return ("the data has one row: measurements on it mean little",) if len(rows) == 1 else ()


@contextmanager
def naming_source(name: str, task: HasColumns, rows: Sequence[Row]) -> Iterator[None]:
    """Add the name of the data to errors about rows and, if a column is missing in all rows, how to name it."""
    try:
        yield
    except InputError as error:
        missing = [column for column in task.fields if rows and not any(column in row for row in rows)]
        hints = [error.hint, *(f"--columns {column}=COLUMN names the column of the data" for column in missing[:1])]
        raise InputError(f"{name}: {error.message}", hint="; ".join(filter(None, hints)) or None) from error


def check_calibration(task: AnyTask, data: Data | None, calibration: Data) -> tuple[str, ...]:
    """Raise if the rows cannot be calibrated on or are all in the evaluation data; return a note about shared rows."""
    with naming_source(calibration.name, task, calibration.rows):
        task.parse(calibration.rows)
    return () if data is None else _without_shared_rows(task, data.rows, data.name, calibration)[1]


def too_few_rows(interval: Interval | None, metric: Metric | None, gate: Gate) -> tuple[str, ...]:
    """Return the note of a verdict whose confidence interval is wider than the drop that the gate allows."""
    if interval is None or metric is None or not gate.max_drop:
        return ()
    half_width = (interval.high - interval.low) / 2
    if half_width <= gate.max_drop:
        return ()
    return (f"{_cannot_show(metric.rows, gate.max_drop)}: the interval is ±{half_width:.2f} points",)


def _cannot_show(rows: int, drop: float) -> str:
    return f"{rows} row{'' if rows == 1 else 's'} cannot show a drop of {drop:g} point{'' if drop <= 1 else 's'}"


def split_calibration(rows: int) -> int:
    """Return how many rows are set aside for calibration if there are no others."""
    return min(_MAX_CALIBRATION_ROWS, int(rows * _CALIBRATION_SHARE))


def _split(task: AnyTask, rows: list[Row], name: str) -> EvaluationRows:
    count = split_calibration(len(rows))
    if not count:
        return EvaluationRows(rows, [])
    picked = set(np.random.default_rng(0).permutation(len(rows))[:count].tolist())
    items = task.parse(rows)
    evaluated = {item for index, item in enumerate(items) if index not in picked}
    # A duplicate may fall on both sides: it is evaluated only.
    calibration = [rows[index] for index in sorted(picked) if items[index] not in evaluated]
    evaluation = [row for index, row in enumerate(rows) if index not in picked]
    note = f"{len(calibration)} of {len(rows)} rows of {name} set aside for calibration"
    return EvaluationRows(evaluation, calibration, (f"{note}, {len(evaluation)} for evaluation",))


def _without_shared_rows(
    task: AnyTask, rows: Sequence[Row], name: str, calibration: Data
) -> tuple[list[Row], tuple[str, ...]]:
    """Return the calibration rows that are not evaluated, whatever their labels, and a note if some are."""
    items, calibration_items = task.parse(rows), task.parse(calibration.rows)
    evaluated, calibrated = set(items), set(calibration_items)
    shared = sum(item in calibrated for item in items)
    if not shared:
        return calibration.rows, ()
    separate = [row for row, item in zip(calibration.rows, calibration_items, strict=True) if item not in evaluated]
    if not separate:
        raise PlanError(
            f"every row of {calibration.name} is in {name} too: evaluating on calibration rows proves nothing",
            hint="pass --calibration with other rows, for example of a training set",
        )
    note = f"calibration and evaluation data share {shared} of {len(rows)} rows: those are not used for calibration"
    return separate, (note,)
