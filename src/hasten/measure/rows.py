"""Which rows a model is judged on, which it is calibrated on, and whether they can carry what is asked of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from hasten.core.errors import InputError, PlanError
from hasten.core.plan import Gate
from hasten.core.report import Metric, find_metric
from hasten.core.statistics import Interval
from hasten.measure.data import Data, HasColumns, sample_rows
from hasten.tasks import TASKS, AnyTask, Row, TaskSpec

# What is set aside to calibrate on where there is one set of rows: enough to see the range of most values.
_SET_ASIDE = 0.2
_MOST_SET_ASIDE = 256
# The metrics of which one row is worth the same part, whatever is in it.
_BY_ROW = ("accuracy", "F1", "exact match", "top-5 accuracy")
SAMPLE = "the built-in sample"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows to judge on, and others to calibrate on; `notes` say how they were told apart."""

    evaluation: list[Row]
    calibration: list[Row]
    notes: tuple[str, ...] = ()


def choose_rows(spec: TaskSpec, data: Data | None, calibration: Data | None, *, is_needed: bool = True) -> Rows:
    """The user's, or the built-in sample; without rows to calibrate on some are set aside, the same ones each time.

    Where nothing is calibrated (`is_needed`), all are judged on.
    """
    task = TASKS.get(spec.name)
    rows = data.rows_for(spec) if data is not None else sample_rows(spec)
    name = data.name if data is not None else SAMPLE
    if not is_needed:
        return Rows(rows, [])
    if calibration is None:
        return _split(task, rows, name)
    kept, notes = _apart(task, rows, name, calibration)
    return Rows(rows, kept, notes)


def check_rows(
    task: AnyTask, spec: TaskSpec | None, rows: Sequence[Row], gate: Gate, needed_for: str | None
) -> tuple[str, ...]:
    """Refuse rows that cannot be judged on; what else a person should know about them before long work starts.

    `needed_for` is the option that needs labels. Without the spec, labels are left unread.
    """
    task.parse(rows)
    gold = task.gold(rows, spec) if spec is not None else None
    if spec is not None and gold is None and needed_for is not None:
        raise PlanError(f"{needed_for} needs labels, and these rows have none", hint="--data with labelled rows")
    if spec is not None and gold is not None:
        metrics = task.metrics(gold, spec)
        name = metrics[0] if gate.metric is None else find_metric(gate.metric, metrics)
        one = 100 / len(rows)
        if name in _BY_ROW and gate.max_drop and gate.max_drop < one:
            return (f"{_cannot_show(len(rows), gate.max_drop)}: one row is {float(f'{one:.2g}'):g}",)
    return ("one row was given: what is measured on it says little",) if len(rows) == 1 else ()


@contextmanager
def naming(name: str, task: HasColumns, rows: Sequence[Row]) -> Iterator[None]:
    """Say of which data a complaint about rows is and, where a column is nowhere in it, how to tell its name there."""
    try:
        yield
    except InputError as error:
        missing = [column for column in task.fields if rows and not any(column in row for row in rows)]
        hints = [error.hint, *(f"--columns {column}=COLUMN says what the data calls it" for column in missing[:1])]
        raise InputError(f"{name}: {error.message}", hint="; ".join(filter(None, hints)) or None) from error


def check_calibration(task: AnyTask, data: Data | None, calibration: Data) -> tuple[str, ...]:
    """Refuse rows that cannot be calibrated on, or that are the same as those to judge on; say how many are."""
    with naming(calibration.name, task, calibration.rows):
        task.parse(calibration.rows)
    return () if data is None else _apart(task, data.rows, data.name, calibration)[1]


def too_few_rows(interval: Interval | None, metric: Metric | None, gate: Gate) -> tuple[str, ...]:
    """What a verdict says where chance alone moves the metric by more than may be lost."""
    if interval is None or metric is None or not gate.max_drop:
        return ()
    half = (interval.high - interval.low) / 2
    if half <= gate.max_drop:
        return ()
    return (f"{_cannot_show(metric.rows, gate.max_drop)}: the interval is ±{half:.2f} points",)


def _cannot_show(rows: int, drop: float) -> str:
    return f"{rows} row{'' if rows == 1 else 's'} cannot show a drop of {drop:g} point{'' if drop <= 1 else 's'}"


def set_aside(rows: int) -> int:
    """How many of so many rows are calibrated on where there are no others."""
    return min(_MOST_SET_ASIDE, int(rows * _SET_ASIDE))


def _split(task: AnyTask, rows: list[Row], name: str) -> Rows:
    picked = np.zeros(len(rows), bool)
    count = set_aside(len(rows))
    if not count:
        return Rows(rows, [])
    picked[np.random.default_rng(0).permutation(len(rows))[:count]] = True
    items = task.parse(rows)
    judged = {item for item, is_picked in zip(items, picked, strict=True) if not is_picked}
    # A text that is there twice may lie on both sides.
    aside = [row for row, item, own in zip(rows, items, picked, strict=True) if own and item not in judged]
    evaluation = [row for row, own in zip(rows, picked, strict=True) if not own]
    note = f"{len(aside)} of {len(rows)} rows of {name} set aside to calibrate on, {len(evaluation)} to judge on"
    return Rows(evaluation, aside, (note,))


def _apart(task: AnyTask, rows: Sequence[Row], name: str, calibration: Data) -> tuple[list[Row], tuple[str, ...]]:
    """The rows to calibrate on that are not judged on, whatever their labels, and a note where there were others."""
    items, others = task.parse(rows), task.parse(calibration.rows)
    judged, seen = set(items), set(others)
    shared = sum(item in seen for item in items)
    if not shared:
        return calibration.rows, ()
    kept = [row for row, item in zip(calibration.rows, others, strict=True) if item not in judged]
    if not kept:
        raise PlanError(
            f"every row of {calibration.name} is in {name} too: what is calibrated on proves nothing",
            hint="--calibration with other rows, as of a training set",
        )
    note = f"calibration and evaluation data share {shared} of {len(rows)} rows: those are not calibrated on"
    return kept, (note,)
