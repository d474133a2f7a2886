"""Read JSON lines, JSON arrays, CSV and TSV as record batches; a row that does not fit is marked as bad."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.core.errors import InputError
from hasten.corpus.sources import MAX_PIECE_BYTES, PIECE_ROWS, IsWanted, Piece, Source, file_fingerprint
from hasten.measure.text_files import DataSource, LocatedRow, json_lines, json_values, table

if TYPE_CHECKING:
    import pyarrow as pa

_READERS: dict[str, Callable[..., DataSource]] = {
    ".jsonl": json_lines,
    ".ndjson": json_lines,
    ".json": json_values,
    ".csv": partial(table, delimiter=","),
    ".tsv": partial(table, delimiter="\t"),
}
SUFFIXES = tuple(_READERS)
# Rows that decide on the columns of a JSON file and on their types.
_TYPED_ROWS = 1000
_UNFIT = (ValueError, TypeError, OverflowError)


class TextSource(Source):
    """A file of text. The cells of a table are text; the types of JSON columns follow from the first rows."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        opened = self._open()
        first = list(islice(opened.rows, _TYPED_ROWS))
        self.has_types = not opened.is_untyped
        self.schema = _schema(opened.columns or (), [row for _, row in first if isinstance(row, dict)], self.has_types)
        self._estimate = self._estimated(first)

    @property
    def estimated_rows(self) -> float:
        return self._estimate

    def fingerprint(self) -> dict[str, Any]:
        return file_fingerprint(self.name)

    def pieces(self, columns: Sequence[str], is_wanted: IsWanted) -> Iterator[Piece]:
        start = 0
        for block in _blocks(self._open().rows):
            if is_wanted(start, start + len(block)):
                yield _piece(start, block, self.schema, columns)
            start += len(block)
        self.row_count = start

    def _open(self) -> DataSource:
        reader = _READERS[Path(self.name).suffix.lower()]
        return reader(self.name, keeps_errors=True)

    def _estimated(self, first: Sequence[LocatedRow]) -> float:
        if len(first) < _TYPED_ROWS:
            return len(first)
        size = Path(self.name).stat().st_size
        return size * len(first) / sum(len(str(row)) for _, row in first)


def _blocks(rows: Iterable[LocatedRow]) -> Iterator[list[LocatedRow]]:
    """Yield the rows in lists of bounded length and size."""
    block: list[LocatedRow] = []
    size = 0
    for located in rows:
        block.append(located)
        if isinstance(row := located[1], dict):
            size += sum(len(value) for value in row.values() if isinstance(value, str))
        if len(block) == PIECE_ROWS or size >= MAX_PIECE_BYTES:
            yield block
            block, size = [], 0
    if block:
        yield block


def unify_types(sources: Sequence[TextSource]) -> None:
    """Give all JSON files the same columns: one file may lack what another has, or have whole numbers for fractions."""
    import pyarrow as pa

    typed = [source for source in sources if source.has_types]
    unified: dict[str, pa.Field] = {}
    for source in typed:
        for field in source.schema:
            before = unified.get(field.name, field)
            try:
                schemas = [pa.schema([before]), pa.schema([field])]
                unified[field.name] = pa.unify_schemas(schemas, promote_options="permissive").field(0)
            except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
                raise InputError(
                    f"column '{field.name}' is {field.type} in {source.name} and {before.type} in files before it",
                    hint="inputs of one job have the same columns: run the others as a job of their own",
                ) from error
    for source in typed:
        source.schema = pa.schema([field.with_type(_without_null(field.type)) for field in unified.values()])


def _schema(columns: Sequence[str], rows: Sequence[dict[str, Any]], has_types: bool) -> pa.Schema:
    import pyarrow as pa

    names = columns or dict.fromkeys(chain.from_iterable(rows))
    if not has_types:
        return pa.schema([(name, pa.string()) for name in names])
    return pa.schema([(name, _type([row.get(name) for row in rows])) for name in names])


def _type(values: list[object]) -> pa.DataType:
    """Return the type of all values or, if they differ, that of the first; others are then bad rows."""
    import pyarrow as pa

    try:
        return pa.array(values).type
    except _UNFIT:
        first = next(value for value in values if value is not None)
    try:
        return pa.array([first]).type
    except _UNFIT:
        return pa.string()


def _without_null(type_: pa.DataType) -> pa.DataType:
    """Return the type with text where only nulls were seen."""
    import pyarrow as pa

    if pa.types.is_null(type_):
        return pa.string()
    if pa.types.is_list(type_):
        return pa.list_(_without_null(type_.value_type))
    if pa.types.is_struct(type_):
        return pa.struct([field.with_type(_without_null(field.type)) for field in type_])
    return type_


def _piece(start: int, block: Sequence[LocatedRow], schema: pa.Schema, columns: Sequence[str]) -> Piece:
    import pyarrow as pa

    bad: dict[int, str] = {}
    rows: list[dict[str, Any]] = []
    for index, (_, row) in enumerate(block):
        if isinstance(row, InputError):
            bad[index] = row.message
        elif not isinstance(row, dict):
            bad[index] = "the row is not an object"
        elif unknown := next((name for name in row if name not in schema.names), None):
            bad[index] = f"the first {_TYPED_ROWS} rows have no column '{unknown}'"
        rows.append({} if index in bad else row)  # type: ignore[arg-type]
    arrays = [_array(rows, name, schema.field(name).type, bad) for name in columns]
    return Piece(start, pa.RecordBatch.from_arrays(arrays, schema=pa.schema([schema.field(c) for c in columns])), bad)


def _array(rows: Sequence[dict[str, Any]], name: str, type_: pa.DataType, bad: dict[int, str]) -> pa.Array:
    import pyarrow as pa

    values = [row.get(name) for row in rows]
    try:
        return pa.array(values, type_)
    except _UNFIT:
        for index, value in enumerate(values):
            try:
                pa.array([value], type_)
            except _UNFIT:
                values[index] = None
                bad.setdefault(index, f"column '{name}' is {value!r:.60}, not {type_}")
        return pa.array(values, type_)
