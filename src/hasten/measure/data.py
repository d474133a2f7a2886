"""Texts to measure on and to answer: a user's data in whatever file it is, or the built-in sample."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hasten.core.errors import InputError, PlanError
from hasten.core.registry import did_you_mean
from hasten.measure.arrow import DATASETS, NO_CLASS, dataset, folder, parquet
from hasten.measure.files import STDIN, Placed, Source, json_lines, json_values, read_cell, table
from hasten.tasks import TASKS, Row, TaskSpec

Value = TypeVar("Value")

logger = logging.getLogger("hasten")

_READERS: dict[str, Callable[[str], Source]] = {
    ".jsonl": json_lines,
    ".ndjson": json_lines,
    ".json": json_values,
    ".csv": partial(table, delimiter=","),
    ".tsv": partial(table, delimiter="\t"),
    ".parquet": parquet,
    "": json_lines,  # a pipe: /dev/stdin, /dev/fd/63
}
# What people judge by is one of the model's own labels in these tasks, and in these columns.
_OWN_LABELS = {"text-classification": "label", "token-classification": "tags"}


@dataclass(frozen=True, slots=True)
class Data:
    """All rows of a data file, as they stand in it."""

    rows: list[Row]
    name: str
    classes: Mapping[str, tuple[str, ...]]
    is_untyped: bool

    def rows_for(self, spec: TaskSpec, *, is_quiet: bool = False) -> list[Row]:
        """The rows with labels as the model knows them.

        Classes go by their names wherever the model knows any of them: that the numbers of two parties mean the same
        is what nobody may assume.
        """
        column = _OWN_LABELS.get(spec.name)
        if column is None or len(spec.labels) < 2:
            return self.rows
        if names := self.classes.get(column):
            labels = self._by_name(names, spec.labels, is_quiet=is_quiet)
            return [_replaced(row, column, labels) for row in self.rows]
        if self.is_untyped:
            numbers = {str(number): number for number in range(len(spec.labels)) if str(number) not in spec.labels}
            return [_replaced(row, column, numbers) for row in self.rows]
        return self.rows

    def _by_name(self, names: Sequence[str], labels: Sequence[str], *, is_quiet: bool) -> dict[int, str]:
        """What each class number stands for: the label of that name, or the name; nothing where none is known."""
        is_folding = all(len({_folded(name) for name in side}) == len(side) for side in (names, labels))
        spelled = _folded if is_folding else str
        known = {spelled(label): label for label in labels}
        if not any(spelled(name) in known for name in names):
            if not is_quiet:
                logger.warning(
                    "the classes of %s (%s) are none of the model's labels (%s): matched by their numbers",
                    self.name,
                    _few(names),
                    _few(labels),
                )
            return {}
        return {number: known.get(spelled(name), name) for number, name in enumerate(names)}


def read_data(source: Path | str, columns: Mapping[str, str] | None = None, *, may_lack_columns: bool = False) -> Data:
    """A whole data file, every row an object. `columns`: what the task calls a column to what the file calls it."""
    opened = _open(source, columns or {}, may_lack_columns=may_lack_columns)
    rows: list[Row] = []
    for place, row in opened.rows:
        if not isinstance(row, dict):
            raise InputError(f"{place} is not an object: {json.dumps(row)[:60]}", hint='as in {"text": "…"}')
        rows.append(row)
    if not rows:
        raise InputError(f"{source} holds no rows")
    return Data(rows, str(source), opened.classes, opened.is_untyped)


class HasColumns(Protocol):
    """What takes rows of data: every task, and models that write."""

    @property
    def name(self) -> str: ...

    @property
    def columns(self) -> Sequence[str]:
        """All that it knows."""
        ...

    @property
    def fields(self) -> Sequence[str]:
        """Those that a row must have."""
        ...


def check_columns(columns: Mapping[str, str], task: HasColumns) -> None:
    """That the task knows them; what the file calls them is checked when it is opened."""
    for name in columns:
        if name not in task.columns:
            raise PlanError(
                f"--columns names '{name}', which {task.name} does not know{did_you_mean(name, task.columns)}",
                hint=f"it knows {', '.join(task.columns)}",
            )


def read_rows(source: Path | str, columns: Mapping[str, str] | None = None, spec: TaskSpec | None = None) -> list[Row]:
    data = read_data(source, columns)
    return data.rows if spec is None else data.rows_for(spec)


def stream(source: Path | str, columns: Mapping[str, str] | None = None) -> Iterator[object]:
    """One row after the other, of a file of any size; in JSON a row may be a mere text."""
    return (row for _, row in _open(source, columns or {}).rows)


def sample_texts() -> list[str]:
    """The built-in sample: some 360 texts of many kinds, lengths and languages."""
    text = files("hasten.measure").joinpath("sample.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["text"] for line in text.split("\n") if line]


def sample_rows(spec: TaskSpec) -> list[Row]:
    """The built-in sample in the form the task takes."""
    return TASKS.get(spec.name).sample(sample_texts(), spec)


def _open(source: Path | str, columns: Mapping[str, str], *, may_lack_columns: bool = False) -> Source:
    name = str(source)
    opened = _reader(name)(name.removeprefix(DATASETS))
    if opened.columns is not None:
        if may_lack_columns:
            columns = {key: column for key, column in columns.items() if column in opened.columns}
        _check_columns(columns, opened.columns, name)
    rows = _rows(opened, name, columns, may_lack_columns=may_lack_columns)
    return replace(opened, rows=rows, classes=_renamed(opened.classes, columns))


def _reader(name: str) -> Callable[[str], Source]:
    if name == STDIN:
        return json_lines
    if name.startswith(DATASETS):
        return dataset
    path = Path(name).expanduser()
    if not name or not path.exists():
        raise InputError(
            f"no data file at {name or 'all: its name is empty'}",
            hint=f"a dataset on the hub is written {DATASETS}NAME:SPLIT",
        )
    if path.is_dir():
        return folder
    if path.suffix.lower() not in _READERS:
        known = ", ".join(suffix for suffix in _READERS if suffix)
        raise InputError(
            f"{name} ends in {path.suffix}, which says nothing about what is in it", hint=f"known: {known}"
        )
    return _READERS[path.suffix.lower()]


def _rows(opened: Source, name: str, columns: Mapping[str, str], *, may_lack_columns: bool) -> Iterator[Placed]:
    """The rows with columns called as the task calls them, and cells of a table read as what they then mean."""
    seen: dict[str, None] = {}
    for place, row in opened.rows:
        if not isinstance(row, dict):
            yield place, row
            continue
        seen.update(dict.fromkeys(row))
        renamed = _renamed(row, {key: own for key, own in columns.items() if own in row or not may_lack_columns})
        yield place, {key: read_cell(key, cell) for key, cell in renamed.items()} if opened.is_untyped else renamed
    # Where each row names its own columns, only all of them together can tell that one is nowhere.
    if opened.columns is None and seen and not may_lack_columns:
        _check_columns(columns, tuple(seen), name)


def _check_columns(columns: Mapping[str, str], there: Sequence[str], name: str) -> None:
    for column in columns.values():
        if column not in there:
            raise InputError(
                f"{name} has no column '{column}'{did_you_mean(column, there)}", hint=f"its columns: {', '.join(there)}"
            )


def _renamed(row: Mapping[str, Value], columns: Mapping[str, str]) -> dict[str, Value]:
    kept = {key: value for key, value in row.items() if key not in columns and key not in columns.values()}
    return kept | {key: row[column] for key, column in columns.items() if column in row}


def _replaced(row: Row, column: str, values: Mapping[Any, object]) -> Row:
    """The row with what stands for its label put in place of it, one by one where there are several."""
    value = row.get(column)
    if value == NO_CLASS:
        return {key: value for key, value in row.items() if key != column}
    if isinstance(value, list):
        return {**row, column: [values.get(entry, entry) if isinstance(entry, str | int) else entry for entry in value]}
    return {**row, column: values[value]} if isinstance(value, str | int) and value in values else row


def _folded(name: str) -> str:
    """NOT_ENTAILMENT as not entailment: the differences under which people publish the same labels."""
    return " ".join(name.casefold().replace("_", " ").split())


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
