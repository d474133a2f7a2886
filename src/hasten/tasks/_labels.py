"""Read the labels of data rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard

from hasten.core.errors import InputError
from hasten.core.registry import did_you_mean
from hasten.tasks import Row

_MAX_NUMBER = 1e300


def read_labels(rows: Sequence[Row], column: str, read: Callable[[Row, int], object]) -> list[object] | None:
    """Apply `read` to each row and its position, counted from 1; None if no row has the column."""
    if not any(column in row for row in rows):
        return None
    return [read(row, position) for position, row in enumerate(rows, 1)]


def require_label(row: Row, column: str, position: int, others: str = "one") -> object:
    """Return the value of a row in a column of labels, or raise InputError if it has none."""
    value = row.get(column)
    if value is None:
        raise InputError(f'row {position} has no "{column}", but other rows have {others}')
    return value


def find_label(
    value: object, labels: Sequence[str], position: int, *, kind: str = "label", candidates: str = ""
) -> int:
    """Return the index of a label of row `position`, which is named or numbered; raise InputError for another value.

    Without `candidates`, a description of the row's own labels, the message is about the labels of the model.
    """
    if isinstance(value, str) and value in labels:
        return labels.index(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(labels):
        return value
    reason = f"is not one of its {candidates}" if candidates else "the model does not know"
    shown = ", ".join(labels[:8]) + (", …" if len(labels) > 8 else "")
    raise InputError(
        f"row {position} has the {kind} {value!r:.60}, which {reason}{did_you_mean(str(value), labels)}",
        hint=None if candidates else f"its labels: {shown}",
    )


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether the value is a number that is finite and fits a float."""
    return isinstance(value, int | float) and -_MAX_NUMBER < value < _MAX_NUMBER


def check_spread(gold: Sequence[object]) -> None:
    """Raise InputError if all scores are equal, since a correlation needs different ones."""
    if len(set(gold)) == 1:
        raise InputError(f"correlation is undefined: the score of all rows is {gold[0]}")
