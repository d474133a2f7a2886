"""Read rows to evaluate and predict: the user's data in any supported file format, or the built-in sample."""

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
from hasten.measure.text_files import STDIN, DataSource, LocatedRow, json_lines, json_values, read_cell, table
from hasten.tasks import TASKS, Row, TaskSpec

Value = TypeVar("Value")

logger = logging.getLogger("hasten")

_READERS: dict[str, Callable[[str], DataSource]] = {
    ".jsonl": json_lines,
    ".ndjson": json_lines,
    ".json": json_values,
    ".csv": partial(table, delimiter=","),
    ".tsv": partial(table, delimiter="\t"),
    ".parquet": parquet,
    "": json_lines,  # a pipe: /dev/stdin, /dev/fd/63
}
# The tasks whose labels are those of the model, and the columns that hold them.
_LABEL_COLUMNS = {"text-classification": "label", "token-classification": "tags"}


@dataclass(frozen=True, slots=True)
class Data:
    """All rows of a data file, unchanged."""

    rows: list[Row]
    name: str
    classes: Mapping[str, tuple[str, ...]]
    is_untyped: bool

    def rows_for(self, spec: TaskSpec, *, is_quiet: bool = False) -> list[Row]:
        """Return the rows with the labels of the model.

        Classes are matched by name if the model knows any of the names: the class numbers of a dataset and of a model
        need not mean the same.
        """
        column = _LABEL_COLUMNS.get(spec.name)
        if column is None or len(spec.labels) < 2:
            return self.rows
        if names := self.classes.get(column):
            labels = self._match_names(names, spec.labels, is_quiet=is_quiet)
            return [_replace_labels(row, column, labels) for row in self.rows]
        if self.is_untyped:
            numbers = {str(number): number for number in range(len(spec.labels)) if str(number) not in spec.labels}
            return [_replace_labels(row, column, numbers) for row in self.rows]
        return self.rows

    def _match_names(self, names: Sequence[str], labels: Sequence[str], *, is_quiet: bool) -> dict[int, str]:
        """Map each class number to the label of that name, or to the name; empty if the model knows none of them."""
        is_unambiguous = all(len({_fold(name) for name in side}) == len(side) for side in (names, labels))
        normalize = _fold if is_unambiguous else str
        known = {normalize(label): label for label in labels}
        if not any(normalize(name) in known for name in names):
            if not is_quiet:
                logger.warning(
                    "the classes of %s (%s) match none of the model's labels (%s): they are matched by number",
                    self.name,
                    _shorten(names),
                    _shorten(labels),
                )
            return {}
        return {number: known.get(normalize(name), name) for number, name in enumerate(names)}


def read_data(source: Path | str, columns: Mapping[str, str] | None = None, *, may_lack_columns: bool = False) -> Data:
    """Read a whole data file, every row an object. `columns` maps the task's column names to those of the file."""
    opened = _open(source, columns or {}, may_lack_columns=may_lack_columns)
    rows: list[Row] = []
    for location, row in opened.rows:
        if not isinstance(row, dict):
            raise InputError(f"{location} is not an object: {json.dumps(row)[:60]}", hint='as in {"text": "…"}')
        rows.append(row)
    if not rows:
        raise InputError(f"{source} has no rows")
    return Data(rows, str(source), opened.classes, opened.is_untyped)


class HasColumns(Protocol):
    """Reads rows of data: every task, and text generation."""

    @property
    def name(self) -> str: ...

    @property
    def columns(self) -> Sequence[str]:
        """Return all columns it reads."""

    @property
    def fields(self) -> Sequence[str]:
        """Return the columns that a row must have."""


def check_columns(columns: Mapping[str, str], task: HasColumns) -> None:
    """Raise PlanError if the task does not know a column; those of the file are checked when it is opened."""
    for name in columns:
        if name not in task.columns:
            raise PlanError(
                f"--columns names '{name}', which {task.name} does not know{did_you_mean(name, task.columns)}",
                hint=f"known: {', '.join(task.columns)}",
            )


def read_rows(source: Path | str, columns: Mapping[str, str] | None = None, spec: TaskSpec | None = None) -> list[Row]:
    """Read the rows of a data file, with the labels of the model if its spec is passed."""
    data = read_data(source, columns)
    return data.rows if spec is None else data.rows_for(spec)


def stream(source: Path | str, columns: Mapping[str, str] | None = None) -> Iterator[object]:
    """Read a file of any size row by row; in JSON a row may be a plain string."""
    return (row for _, row in _open(source, columns or {}).rows)


def sample_texts() -> list[str]:
    """Return the built-in sample: some 360 texts of many kinds, lengths and languages."""
    text = files("hasten.measure").joinpath("sample.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["text"] for line in text.split("\n") if line]


def sample_rows(spec: TaskSpec) -> list[Row]:
    """Return the built-in sample as rows of the task."""
    return TASKS.get(spec.name).sample(sample_texts(), spec)


def _open(source: Path | str, columns: Mapping[str, str], *, may_lack_columns: bool = False) -> DataSource:
    name = str(source)
    opened = _reader(name)(name.removeprefix(DATASETS))
    if opened.columns is not None:
        if may_lack_columns:
            columns = {key: column for key, column in columns.items() if column in opened.columns}
        _check_columns(columns, opened.columns, name)
    rows = _rows(opened, name, columns, may_lack_columns=may_lack_columns)
    return replace(opened, rows=rows, classes=_rename(opened.classes, columns))


def _reader(name: str) -> Callable[[str], DataSource]:
    if name == STDIN:
        return json_lines
    if name.startswith(DATASETS):
        return dataset
    path = Path(name).expanduser()
    if not name or not path.exists():
        raise InputError(
            f"no data file at {name or 'all: its name is empty'}",
            hint=f"for a dataset on the hub: {DATASETS}NAME:SPLIT",
        )
    if path.is_dir():
        return folder
    if path.suffix.lower() not in _READERS:
        known = ", ".join(suffix for suffix in _READERS if suffix)
        raise InputError(f"{name} has an unknown file type: {path.suffix}", hint=f"known: {known}")
    return _READERS[path.suffix.lower()]


def _rows(opened: DataSource, name: str, columns: Mapping[str, str], *, may_lack_columns: bool) -> Iterator[LocatedRow]:
    """Yield the rows with the task's column names, and the cells of a table parsed accordingly."""
    seen: dict[str, None] = {}
    for location, row in opened.rows:
        if not isinstance(row, dict):
            yield location, row
            continue
        seen.update(dict.fromkeys(row))
        renamed = _rename(row, {key: name for key, name in columns.items() if name in row or not may_lack_columns})
        yield location, {key: read_cell(key, cell) for key, cell in renamed.items()} if opened.is_untyped else renamed
    # If each row has its own columns, only all rows together show that one is missing.
    if opened.columns is None and seen and not may_lack_columns:
        _check_columns(columns, tuple(seen), name)


def _check_columns(columns: Mapping[str, str], available: Sequence[str], name: str) -> None:
    for column in columns.values():
        if column not in available:
            raise InputError(
                f"{name} has no column '{column}'{did_you_mean(column, available)}",
                hint=f"its columns: {', '.join(available)}",
            )


def _rename(row: Mapping[str, Value], columns: Mapping[str, str]) -> dict[str, Value]:
    others = {key: value for key, value in row.items() if key not in columns and key not in columns.values()}
    return others | {key: row[column] for key, column in columns.items() if column in row}


def _replace_labels(row: Row, column: str, values: Mapping[Any, object]) -> Row:
    """Replace the label of a row, or each of a list of labels."""
    value = row.get(column)
    if value == NO_CLASS:
        return {key: value for key, value in row.items() if key != column}
    if isinstance(value, list):
        return {**row, column: [values.get(entry, entry) if isinstance(entry, str | int) else entry for entry in value]}
    return {**row, column: values[value]} if isinstance(value, str | int) and value in values else row


def _fold(name: str) -> str:
    """Normalize the spelling of a label: NOT_ENTAILMENT and "not entailment" are the same."""
    return " ".join(name.casefold().replace("_", " ").split())


def _shorten(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
