"""Data files that are text: JSON lines, a JSON array, CSV and TSV. Rows are read as they are asked for."""

from __future__ import annotations

import csv
import json
import re
from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeAlias

from hasten.core.errors import InputError

STDIN = "-"

# A row and where it stands, for messages.
Placed: TypeAlias = tuple[str, object]

# Longer than any text, short enough that a quote nobody closed does not fill the memory.
_MAX_CELL = 2**27
_CHUNK = 2**20
# How near the end of what was read so far more of it may change what is found there.
_UNFINISHED = 16
_BLANK = re.compile(r"[ \t\n\r]*")
# What tasks take as text even where it looks like JSON; in other columns a list is a list (tokens, tags, answers).
_TEXTS = ("text", "text_pair", "question", "context", "query", "title", "id")
_NUMBERS = ("score",)


@dataclass(frozen=True, slots=True)
class Source:
    """An open data file: its rows, and what is known about its columns before they are read."""

    rows: Iterator[Placed]
    # None where every row has its own.
    columns: tuple[str, ...] | None = None
    # The names that the numbers in a column stand for.
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Whether cells are text, whatever they mean, so that "1" may be a name or a number.
    is_untyped: bool = False


def json_lines(path: str) -> Source:
    """A value a line; blank lines are passed over."""
    return Source(
        (f"{path}, line {number}", _parse(line, f"{path}, line {number}"))
        for number, line in _lines(path)
        if line.strip()
    )


def json_values(path: str) -> Source:
    """An array of objects; many files of this name are JSON lines all the same."""
    with _opened(path) as stream:
        is_array = stream.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    return Source(_items(path)) if is_array else json_lines(path)


def table(path: str, delimiter: str) -> Source:
    """Cells under a header; in a quoted one there may be delimiters and newlines, and a quote is written twice."""
    lines = (line for _, line in _lines(path))
    csv.field_size_limit(_MAX_CELL)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] = []
    for _, cells in _cells(reader, path):
        header = [name.strip() for name in cells]
        break
    # What pandas writes as its index has no name.
    names = [name for name in header if name]
    if not names:
        raise InputError(f"{path} has no header: its first line names no columns")
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{path} has two columns called '{twice[0]}'")

    def rows() -> Iterator[Placed]:
        for number, cells in _cells(reader, path):
            if len(cells) != len(header):
                raise InputError(f"{path}, line {number} has {len(cells)} cells, and the header has {len(header)}")
            # An empty cell is how a table says that there is nothing.
            row = {name: cell for name, cell in zip(header, cells, strict=True) if name and cell}
            yield f"{path}, line {number}", row

    return Source(rows(), tuple(names), is_untyped=True)


def _cells(reader: Iterator[list[str]], path: str) -> Iterator[tuple[int, list[str]]]:
    """The rows of a table that are not blank, each with the number of its first line."""
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
    """What a cell of a table means in a column that a task calls so: a number, what is written as JSON, or text."""
    if name in _NUMBERS:
        try:
            return float(cell)
        except ValueError:
            return cell
    if name not in _TEXTS and cell.lstrip().startswith(("[", "{")):
        try:
            return json.loads(cell)
        except (ValueError, RecursionError):
            return cell
    return cell


def _items(path: str) -> Iterator[Placed]:
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
    """Only the newline separates lines: texts may hold other separators."""
    with _opened(path) as stream:
        for number, line in enumerate(stream, 1):
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{path}, line {number} is not UTF-8 text: byte {error.start + 1} of it is {line[error.start]:#x}"
                ) from error
            yield number, text.removeprefix("\ufeff") if number == 1 else text


def _parse(line: str, where: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise InputError(f"{where} is not JSON: {why}") from error


class _Array:
    """The items of a JSON array, of whose text only a piece is held at a time."""

    def __init__(self, stream: IO[bytes], path: str) -> None:
        self._stream, self._characters = stream, getincrementaldecoder("utf-8-sig")()
        self._decoder = json.JSONDecoder()
        self._path, self._number = path, 0
        self._text, self._at = "", 0

    def __iter__(self) -> Iterator[Placed]:
        letter = self._take()  # the bracket, for which this was taken for an array
        if self._next() == "]":
            letter = self._take()
        while letter != "]":
            self._number += 1
            self._next()
            yield self._where, self._value()
            letter = self._take()
            if letter not in (",", "]"):
                raise InputError(f"{self._where} is followed by {letter or 'the end of the file'!r}, not by , or ]")
        if letter := self._next():
            raise InputError(f"{self._path} goes on with {letter!r} after its array")

    @property
    def _where(self) -> str:
        return f"{self._path}, item {self._number}"

    def _value(self) -> object:
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                may_be_cut = len(self._text) - error.pos < _UNFINISHED or error.msg.startswith("Unterminated")
                if may_be_cut and self._read():
                    continue
                raise InputError(f"{self._where} is not JSON: {error.msg}") from error
            except (ValueError, RecursionError) as error:
                raise InputError(f"{self._where} is not JSON: {error}") from error
            # A number at the end of the piece may go on in the next one: 1, 1.5, 1.5e-8.
            if len(self._text) - end < _UNFINISHED and self._read():
                continue
            self._at = end
            return value

    def _next(self) -> str:
        """The next character that is not blank; none at the end."""
        while (match := _BLANK.match(self._text, self._at)) and match.end() == len(self._text):
            if not self._read():
                return ""
        self._at = match.end() if match else self._at
        return self._text[self._at]

    def _take(self) -> str:
        letter = self._next()
        self._at += len(letter)
        return letter

    def _read(self) -> bool:
        """More text, at least as much as is left, so that a long item is not tried too often."""
        left = self._text[self._at :]
        piece = self._stream.read(max(_CHUNK, len(left)))
        try:
            characters = self._characters.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            raise InputError(f"{self._path} is not UTF-8 text, somewhere after item {self._number}") from error
        if piece:
            self._text, self._at = left + characters, 0
        return bool(piece)
