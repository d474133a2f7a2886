"""The options of `hasten map`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from hasten.core.errors import PlanError
from hasten.core.options import Option, parse_number, parse_whole
from hasten.core.plan import parse_columns

_BYTES = {"": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}
_ANSWERS, _OUTPUT, _RUN = "answers", "output", "run"


class VectorType(StrEnum):
    """The element types of stored vectors."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8"
    BINARY = "binary"


class OnLong(StrEnum):
    """The treatment of a text that is longer than the model's limit."""

    TRUNCATE = "truncate"
    ERROR = "error"


class FileFormat(StrEnum):
    """The formats of output files."""

    PARQUET = "parquet"
    JSONL = "jsonl"


@dataclass(frozen=True, slots=True)
class JobShard:
    """A share of the work: output file k belongs to it if k modulo `count` is `index`."""

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def has(self, number: int) -> bool:
        """Return whether an output file belongs to this share."""
        return number % self.count == self.index


def parse_size(text: str) -> int:
    """Parse `512KB`, `32MB` or `1GB`; return bytes."""
    match = re.fullmatch(r"(\d+)\s*(KB|MB|GB|)", text.strip().upper())
    if not match or not int(match[1]):
        raise PlanError(f"'{text}' is not a size", hint="write 512KB, 32MB or 1GB")
    return int(match[1]) * _BYTES[match[2]]


def _parse_count(text: str) -> int:
    if (number := parse_whole(text)) < 1:
        raise PlanError("the value must be at least 1")
    return number


def _parse_max_bad(text: str) -> int:
    if (number := parse_whole(text)) < 0:
        raise PlanError("the value must be at least 0")
    return number


def _parse_price(text: str) -> float:
    if not 0 < (number := parse_number(text)) < 1e9:
        raise PlanError(f"'{text}' is not an hourly price", hint="write 1.25")
    return number


def _parse_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise PlanError(f"'{text}' is not a list of column names", hint="write id,title")
    return names


def _parse_shard(text: str) -> JobShard:
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if not match or int(match[1]) >= int(match[2]):
        raise PlanError(f"'{text}' is not a share of the work", hint="write 0/4, 1/4, 2/4 and 3/4 for four processes")
    return JobShard(int(match[1]), int(match[2]))


def parse_task_options(pairs: list[str]) -> dict[str, Any]:
    """Parse NAME=VALUE options of a task; a value is JSON or text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise PlanError(f"'{pair}' is not NAME=VALUE", hint="-O top_k=3")
        try:
            options[name] = json.loads(value)
        except (ValueError, RecursionError):
            options[name] = value
    return options


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """The options that decide which rows are answered, and how."""

    columns: Annotated[
        dict[str, str],
        Option(parse_columns, "NAME=COLUMN,…", "columns of the input that the task reads: text=body", _ANSWERS),
    ] = field(default_factory=dict)
    # Options of the task, such as top_k.
    options: dict[str, Any] = field(default_factory=dict)
    where: Annotated[
        str | None,
        Option(str, "FILTER", 'answer only rows that pass: "lang = \'en\' and stars >= 3", "note is null"', _ANSWERS),
    ] = None
    on_long: Annotated[
        OnLong,
        Option(OnLong, "WHAT", "truncate texts beyond the model's limit, or reject their rows",
            _ANSWERS, choices=tuple(OnLong)),
    ] = OnLong.TRUNCATE  # fmt: skip
    max_row_bytes: Annotated[
        int, Option(parse_size, "SIZE", "reject rows whose inputs are larger", _ANSWERS, ("--max-row",))
    ] = 2**20
    vectors: Annotated[
        VectorType,
        Option(VectorType, "TYPE", "element type of vectors", _ANSWERS, choices=tuple(VectorType)),
    ] = VectorType.FLOAT32
    dimensions: Annotated[int | None, Option(_parse_count, "N", "keep the first N dimensions of vectors", _ANSWERS)] = (
        None
    )
    select: Annotated[
        tuple[str, ...], Option(_parse_names, "COLUMN,…", "input columns to keep (default: all)", _ANSWERS)
    ] = ()
    drop: Annotated[tuple[str, ...], Option(_parse_names, "COLUMN,…", "input columns to leave out", _ANSWERS)] = ()
    prefix: Annotated[str, Option(str, "TEXT", "begin the names of answer columns with this text", _ANSWERS)] = ""


@dataclass(frozen=True, slots=True)
class JobSettings:
    """The options of a job over files."""

    answers: AnswerSettings = field(default_factory=AnswerSettings)
    file_format: Annotated[
        FileFormat,
        Option(FileFormat, "FORMAT", "format of the output files", _OUTPUT, ("--format",),
            choices=tuple(FileFormat)),
    ] = FileFormat.PARQUET  # fmt: skip
    rows_per_file: Annotated[
        int | None,
        Option(_parse_count, "N", "input rows per output file, the unit of resuming (default: 16384; for generated"
            " text 512)", _OUTPUT),
    ] = None  # fmt: skip
    skip_existing: Annotated[
        str | None,
        Option(str, "KEY", "add to a finished output: skip rows whose value in this column it already has", _OUTPUT),
    ] = None
    max_bad: Annotated[int, Option(_parse_max_bad, "N", "stop after more than N rejected rows", _OUTPUT)] = 100
    variant: Annotated[
        str | None, Option(str, "NAME", "variant to run (default: the fastest that runs here)", _RUN)
    ] = None
    sessions: Annotated[
        int | None, Option(_parse_count, "N", "sessions to run at once (default: measured on the first rows)", _RUN)
    ] = None
    threads: Annotated[
        int | None, Option(_parse_count, "N", "CPU threads per session (default: the cores, shared equally)", _RUN)
    ] = None
    max_memory: Annotated[
        int | None, Option(parse_size, "SIZE", "resident memory that the process may reach, as 4GB", _RUN)
    ] = None
    shard: Annotated[
        JobShard,
        Option(_parse_shard, "I/N", "do share I of N, for an array of jobs that write to one output",
            _RUN),
    ] = JobShard()  # fmt: skip
    price_per_hour: Annotated[
        float | None,
        Option(_parse_price, "AMOUNT", "hourly price of this machine: report the cost per million rows", _RUN,
            ("--price",)),
    ] = None  # fmt: skip
