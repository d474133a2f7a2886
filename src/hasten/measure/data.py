"""Texts to measure on: a data file of the user's, or the built-in sample."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from hasten.core.errors import InputError
from hasten.tasks import TASKS, Row, TaskSpec


def read_rows(path: Path | str) -> list[Row]:
    """A whole data file: JSON lines, each an object."""
    rows: list[Row] = []
    for number, row in read_lines(path):
        if not isinstance(row, dict):
            raise InputError(
                f"{path}, line {number} is not an object: {json.dumps(row)[:60]}", hint='as in {"text": "…"}'
            )
        rows.append(row)
    if not rows:
        raise InputError(f"{path} holds no rows")
    return rows


def read_lines(path: Path | str) -> Iterator[tuple[int, object]]:
    """JSON values, one a line, each with its number; blank lines are passed over, and '-' is stdin."""
    file = Path(path).expanduser()
    if str(path) != "-" and (not file.exists() or file.is_dir()):
        raise InputError(f"no data file at {path}")
    # Only the newline separates lines: texts may hold other separators.
    source = 0 if str(path) == "-" else file
    with open(source, encoding="utf-8-sig", newline="\n", closefd=source != 0) as stream:
        try:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield number, _parse(line, f"{path}, line {number}")
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not UTF-8 text", hint="data files are JSON lines") from error


def _parse(line: str, where: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise InputError(f"{where} is not JSON: {why}") from error


def sample_texts() -> list[str]:
    """The built-in sample: some 360 texts of many kinds, lengths and languages."""
    text = files("hasten.measure").joinpath("sample.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["text"] for line in text.split("\n") if line]


def sample_rows(spec: TaskSpec) -> list[Row]:
    """The built-in sample in the form the task takes."""
    return TASKS.get(spec.name).sample(sample_texts(), spec)
