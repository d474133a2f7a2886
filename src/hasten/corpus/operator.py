"""The contract of an operator: windows of input rows in, the same rows with answers out."""

from __future__ import annotations

import re
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hasten.core.errors import InputError, PlanError
from hasten.core.registry import did_you_mean
from hasten.corpus.answer_columns import AnswerColumns
from hasten.corpus.settings import AnswerSettings
from hasten.corpus.windows import Window
from hasten.measure.data import HasColumns, check_columns

if TYPE_CHECKING:
    import pyarrow as pa

# Columns of labels, which a task reads only to be evaluated.
_LABELS = ("label", "labels", "score", "relevance", "tags", "answers")
_MAX_EXCERPT_CHARS = 200
# An item is parsed alone, so its number says nothing: "text 1 is empty".
_NUMBER = re.compile(r"\b(item|text|text_pair|row|question|context|prompt) 1\b")


class StageSeconds:
    """The seconds that the stages of a job took, over all threads. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}

    def add(self, stage: str, seconds: float) -> None:
        """Add to a stage."""
        with self._lock:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of the body to a stage."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - begin)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage so far."""
        with self._lock:
            return dict(self._seconds)


def stage_shares(stages: Iterable[StageSeconds]) -> dict[str, float]:
    """Return the share of each stage in the time of all, over several threads."""
    seconds: Counter[str] = Counter()
    for each in stages:
        seconds.update(each.seconds())
    total = sum(seconds.values())
    return {stage: spent / total for stage, spent in seconds.items()} if total else {}


@dataclass(frozen=True, slots=True)
class Rejected:
    """A row without an answer: its position in the input, the reason, and the beginning of its input."""

    position: int
    reason: str
    excerpt: str = ""


@dataclass(frozen=True, slots=True)
class AnsweredWindow:
    """The rows of a window that have an answer, with the answers as further columns."""

    window: Window
    rows: pa.RecordBatch
    rejected: tuple[Rejected, ...]
    tokens: int
    truncated: int


class InputColumns:
    """The columns of the input that a task reads, by the names of the task."""

    def __init__(self, task: HasColumns, schema: pa.Schema, columns: Mapping[str, str]) -> None:
        check_columns(columns, task)
        for column in columns.values():
            if column not in schema.names:
                raise PlanError(
                    f"the input has no column '{column}'{did_you_mean(column, schema.names)}",
                    hint=f"its columns: {', '.join(schema.names)}",
                )
        names = {name: columns.get(name, name) for name in task.columns if name not in _LABELS or name in columns}
        self.by_name = {name: column for name, column in names.items() if column in schema.names}
        self._required = [name for name in task.fields if name in self.by_name]
        if not self.by_name:
            raise PlanError(
                f"the input has none of the columns that {task.name} reads: {', '.join(names)}",
                hint=f"--columns {next(iter(names))}={next(iter(schema.names), 'COLUMN')} names one of"
                f" {', '.join(schema.names) or 'its columns'}",
            )

    def rows(self, batch: pa.RecordBatch) -> list[dict[str, Any]]:
        """Return the rows as the task reads them; a null value is left out."""
        columns = [batch.column(column).to_pylist() for column in self.by_name.values()]
        return [
            {name: value for name, value in zip(self.by_name, values, strict=True) if value is not None}
            for values in zip(*columns, strict=True)
        ]

    def reason(self, row: Mapping[str, Any], max_bytes: int) -> str | None:
        """Return why a row cannot be answered, if its values show that at once."""
        if missing := next((name for name in self._required if name not in row), None):
            return f"{self.by_name[missing]} is null"
        size = sum(map(_size, row.values()))
        return f"the inputs of the row have {size} bytes, more than --max-row {max_bytes}" if size > max_bytes else None


class Operator(ABC):
    """Answers windows of rows with an opened variant. One thread runs it at a time."""

    # Rows per window: enough to batch by length, few enough to bound the memory of their outputs.
    window_rows: int
    default_rows_per_file: int

    def __init__(self, inputs: InputColumns, answers: AnswerColumns, settings: AnswerSettings) -> None:
        self.inputs = inputs
        self.answers = answers
        self.settings = settings
        self.stages = StageSeconds()
        # Ends a run within a batch instead of a window, which may take minutes.
        self.stop = threading.Event()

    # Whether several sessions may be faster than one, as on CPUs, where they share the cores. Each must answer a window
    # before it takes the next one: a session that waited for more could wait for a window that another one holds.
    may_run_beside_others = False

    @abstractmethod
    def run(self, windows: Iterable[Window]) -> Generator[AnsweredWindow, None, None]:
        """Yield the answers of each window, in order. Close the iterator to stop earlier than at its end."""

    @abstractmethod
    def close(self) -> None:
        """Free the session."""

    def check_stop(self, _: int = 0) -> None:
        """Raise InterruptedError if the run should end."""
        if self.stop.is_set():
            raise InterruptedError

    def answer_schema(self) -> list[pa.Field]:
        """Return the fields of the answers, with the prefix that the user chose."""
        return [field.with_name(self.settings.prefix + field.name) for field in self.answers.fields]

    def read(self, window: Window) -> tuple[list[int], list[dict[str, Any]], dict[int, Rejected]]:
        """Return the indices and the rows that may be answered, and the rejected ones by index."""
        rejected: dict[int, Rejected] = {}
        indices: list[int] = []
        valid_rows: list[dict[str, Any]] = []
        for index, row in enumerate(self.inputs.rows(window.rows)):
            reason = window.bad.get(index) or self.inputs.reason(row, self.settings.max_row_bytes)
            if reason is None:
                indices.append(index)
                valid_rows.append(row)
            else:
                rejected[index] = self.rejection(window, index, reason, row)
        return indices, valid_rows, rejected

    def rejection(self, window: Window, index: int, reason: str, row: object) -> Rejected:
        """Return the record of a rejected row."""
        return Rejected(int(window.positions[index]), reason[:1000], str(row)[:_MAX_EXCERPT_CHARS] if row else "")

    def answered(
        self,
        window: Window,
        indices: Sequence[int],
        answers: Sequence[Any],
        rejected: Mapping[int, Rejected],
        *,
        tokens: int,
        truncated: int,
    ) -> AnsweredWindow:
        """Return the rows at the indices with their answers."""
        import pyarrow as pa

        output_rows = (
            window.rows if len(indices) == window.rows.num_rows else window.rows.take(pa.array(indices, pa.int64()))
        )
        arrays = [*output_rows.columns, *self.answers.arrays(answers)]
        schema = pa.schema([*window.rows.schema, *self.answer_schema()])
        rows = pa.RecordBatch.from_arrays(arrays, schema=schema)
        ordered = tuple(rejected[index] for index in sorted(rejected))
        return AnsweredWindow(window, rows, ordered, tokens, truncated)


def reason_of(error: InputError) -> str:
    """Return the message of an error about a single item without the item's number."""
    return _NUMBER.sub(r"\1", error.message)


def _size(value: object) -> int:
    """Return about how many bytes a value has."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode(errors="surrogatepass"))
    if isinstance(value, list):
        return sum(map(_size, value))
    return sum(map(_size, value.values())) if isinstance(value, dict) else 8
