"""Texts to measure on: a data file of the user's, or the built-in sample."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from hasten.core.errors import InputError
from hasten.tasks import AnyTask, Row


def read_rows(path: Path | str) -> list[Row]:
    """JSON lines, each an object."""
    file = Path(path)
    if not file.is_file():
        raise InputError(f"no data file at {file}")
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 text", hint="data files are JSON lines") from error
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise InputError(f"{file}, line {number} is not JSON: {why}") from error
        if not isinstance(row, dict):
            raise InputError(f"{file}, line {number} is not an object: {line[:60]}", hint='as in {"text": "…"}')
        rows.append(row)
    if not rows:
        raise InputError(f"{file} holds no rows")
    return rows


def sample_texts() -> list[str]:
    """The built-in sample: some 360 texts of many kinds, lengths and languages."""
    text = files("hasten.measure").joinpath("sample.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["text"] for line in text.split("\n") if line]


def sample_rows(task: AnyTask) -> list[Row]:
    """The built-in sample in the form the task takes."""
    return task.sample(sample_texts())
