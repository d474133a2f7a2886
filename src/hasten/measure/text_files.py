"""Read data files of text lazily: JSON lines, a JSON array, CSV and TSV."""

from __future__ import annotations

import csv
import json
import re
from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TypeAlias

from hasten.core.errors import InputError

STDIN = "-"

# A row and its location, for messages; where a reader keeps errors, an invalid row is an InputError.
LocatedRow: TypeAlias = tuple[str, object]

# Longer than any text, short enough that an unclosed quote or a missing newline does not fill the memory.
_MAX_CELL = 2**27
_CHUNK = 2**20
# A value that ends this close to the end of the text read so far may continue in the next chunk.
_UNFINISHED = 16
_BLANK = re.compile(r"[ \t\n\r]*")
# Columns that are text even if a cell looks like JSON; in others a list is a list (tokens, tags, answers).
_TEXT_COLUMNS = ("text", "text_pair", "question", "context", "query", "title", "id")
_NUMBER_COLUMNS = ("score",)


@dataclass(frozen=True, slots=True)
class DataSource:
    """An open data file: its rows, and its columns as far as they are known before reading."""

    rows: Iterator[LocatedRow]
    # None if every row has its own columns.
    columns: tuple[str, ...] | None = None
    # The class names of columns with class numbers.
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Whether all cells are text, so that "1" may be a name or a number.
    is_untyped: bool = False


def json_lines(path: str, *, keeps_errors: bool = False) -> DataSource:
    """Open JSON lines; blank lines are skipped."""

    def rows() -> Iterator[LocatedRow]:
        for number, line in _byte_lines(path):
            location = f"{path}, line {number}"
            try:
                text = _decode(line, path, number)
                if text.strip():
                    yield location, _parse(text, location)
            except InputError as error:
                if not keeps_errors:
                    raise
                yield location, error

    return DataSource(rows())


def json_values(path: str, *, keeps_errors: bool = False) -> DataSource:
    """Open a JSON array of objects; many .json files are JSON lines instead."""
    with _opened(path) as stream:
        is_array = stream.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    return DataSource(_items(path)) if is_array else json_lines(path, keeps_errors=keeps_errors)


def table(path: str, delimiter: str, *, keeps_errors: bool = False) -> DataSource:
    """Open a table with a header; quoted cells may hold delimiters, newlines and doubled quotes."""
    lines = (line for _, line in _lines(path))
    csv.field_size_limit(_MAX_CELL)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    _, cells = next(_cells(reader, path), (0, []))
    header = [name.strip() for name in cells]
    # The index that pandas writes has no name.
    names = [name for name in header if name]
    if not names:
        raise InputError(f"{path} has no header: its first line names no columns")
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{path} has two columns named '{duplicates[0]}'")

    def rows() -> Iterator[LocatedRow]:
        for number, cells in _cells(reader, path):
            if len(cells) != len(header):
                error = InputError(f"{path}, line {number} has {len(cells)} cells, and the header has {len(header)}")
                if not keeps_errors:
                    raise error
                yield f"{path}, line {number}", error
                continue
            # An empty cell is a missing value.
            row = {name: cell for name, cell in zip(header, cells, strict=True) if name and cell}
            yield f"{path}, line {number}", row

    return DataSource(rows(), tuple(names), is_untyped=True)


def _cells(reader: Iterator[list[str]], path: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a table that are not blank, each with the number of its first line."""
    while True:
        number = reader.line_num + 1  # type: ignore[attr-defined]
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise InputError(f"{path}, line {number} is broken: {error}") from error
        if cells is None:
            return
        if cells:
            yield number, cells


def read_cell(name: str, cell: str) -> object:
    """Parse a cell by the task's name of its column: a number, JSON, or text."""
    try:
        if name in _NUMBER_COLUMNS:
            return float(cell)
        if name not in _TEXT_COLUMNS and cell.lstrip().startswith(("[", "{")):
            return json.loads(cell)
    except (ValueError, RecursionError):
        pass  # it is text
    return cell


def _items(path: str) -> Iterator[LocatedRow]:
    with _opened(path) as stream:
        yield from _Array(stream, path)


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    try:
        with open(0 if path == STDIN else Path(path).expanduser(), "rb", closefd=path != STDIN) as stream:
            yield stream
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """Yield numbered lines as text."""
    return ((number, _decode(line, path, number)) for number, line in _byte_lines(path))


def _byte_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Yield numbered lines. Only the newline separates them: texts may hold other separators."""
    with _opened(path) as stream:
        for number, line in enumerate(iter(partial(stream.readline, _MAX_CELL + 1), b""), 1):
            if len(line) > _MAX_CELL:
                raise InputError(f"{path}, line {number} is longer than {_MAX_CELL >> 20} MB")
            yield number, line


def _decode(line: bytes, path: str, number: int) -> str:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}, line {number} is not UTF-8 text: byte {error.start + 1} of it is {line[error.start]:#x}"
        ) from error
    return text.removeprefix("\ufeff") if number == 1 else text


def _parse(line: str, location: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise InputError(f"{location} is not JSON: {reason}") from error


class _Array:
    """The items of a JSON array, whose text is read in chunks."""

    def __init__(self, stream: IO[bytes], path: str) -> None:
        self._stream, self._characters = stream, getincrementaldecoder("utf-8-sig")()
        self._decoder = json.JSONDecoder()
        self._path, self._number = path, 0
        self._text, self._position = "", 0

    def __iter__(self) -> Iterator[LocatedRow]:
        letter = self._take()  # the opening bracket
        if self._next() == "]":
            letter = self._take()
        while letter != "]":
            self._number += 1
            self._next()
            yield self._location, self._value()
            letter = self._take()
            if letter not in (",", "]"):
                raise InputError(f"{self._location} is followed by {letter or 'the end of the file'!r}, not by , or ]")
        if letter := self._next():
            raise InputError(f"{self._path} continues with {letter!r} after its array")

    @property
    def _location(self) -> str:
        return f"{self._path}, item {self._number}"

    def _value(self) -> object:
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._position)
            except json.JSONDecodeError as error:
                may_be_incomplete = len(self._text) - error.pos < _UNFINISHED or error.msg.startswith("Unterminated")
                if may_be_incomplete and self._read():
                    continue
                raise InputError(f"{self._location} is not JSON: {error.msg}") from error
            except (ValueError, RecursionError) as error:
                raise InputError(f"{self._location} is not JSON: {error}") from error
            # A number at the end of a chunk may continue in the next: 1, 1.5, 1.5e-8.
            if len(self._text) - end < _UNFINISHED and self._read():
                continue
            self._position = end
            return value

    def _next(self) -> str:
        """Return the next character that is not blank, or an empty string at the end."""
        while (match := _BLANK.match(self._text, self._position)) and match.end() == len(self._text):
            if not self._read():
                return ""
        self._position = match.end() if match else self._position
        return self._text[self._position]

    def _take(self) -> str:
        letter = self._next()
        self._position += len(letter)
        return letter

    def _read(self) -> bool:
        """Read more text, at least as much as is left, so that a long item is not parsed too often."""
        rest = self._text[self._position :]
        chunk = self._stream.read(max(_CHUNK, len(rest)))
        try:
            characters = self._characters.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise InputError(f"{self._path} is not UTF-8 text, somewhere after item {self._number}") from error
        if chunk:
            self._text, self._position = rest + characters, 0
        return bool(chunk)
