"""Find the input files, and read them as record batches with the position of every row."""

from __future__ import annotations

import glob
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.core.errors import InputError
from hasten.corpus.arrow_library import arrow_errors
from hasten.measure.arrow import DATASETS, load_dataset, parse_address, translate_read_errors

if TYPE_CHECKING:
    import pyarrow as pa

# Rows read at a time. Borders of pieces are multiples of it from the start of a row group, whatever is skipped.
PIECE_ROWS = 1024
_FOOTER_BYTES = 8

# Whether any row of a range is needed.
IsWanted = Callable[[int, int], bool]


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of a file; `bad` has the reason by index of rows that could not be read, which are null."""

    start: int
    rows: pa.RecordBatch
    bad: Mapping[int, str] = field(default_factory=dict)


class Source(ABC):
    """A file or a dataset. Opening it checks that it can be read at all."""

    # The number of rows, if it is known before reading.
    row_count: int | None = None
    schema: pa.Schema

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def estimated_rows(self) -> float:
        """Return about how many rows there are."""
        return float(self.row_count or 0)

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Return what changes if the content changes."""

    @abstractmethod
    def pieces(self, columns: Sequence[str], is_wanted: IsWanted) -> Iterator[Piece]:
        """Yield the rows in order. Ranges that are not wanted may be left out, and only these."""


class ParquetSource(Source):
    """A Parquet file, of which only the needed columns and row groups are read."""

    def __init__(self, path: str) -> None:
        from pyarrow.parquet import ParquetFile

        super().__init__(path)
        with arrow_errors(f"{path} is not a Parquet file"), ParquetFile(path) as file:
            self.schema, self.row_count = file.schema_arrow, file.metadata.num_rows

    def fingerprint(self) -> dict[str, Any]:
        """Return the size and the digest of the footer, which has the statistics of all columns."""
        with arrow_errors(f"{self.name} cannot be read"), Path(self.name).open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(size - _FOOTER_BYTES)
            length = min(int.from_bytes(stream.read(4), "little"), size - _FOOTER_BYTES)
            stream.seek(size - _FOOTER_BYTES - length)
            return {"size": size, "footer": hashlib.sha256(stream.read(length)).hexdigest()}

    def pieces(self, columns: Sequence[str], is_wanted: IsWanted) -> Iterator[Piece]:
        from pyarrow.parquet import ParquetFile

        with arrow_errors(f"{self.name} cannot be read"):
            file = ParquetFile(self.name)
        with file:
            start = 0
            for group in range(file.num_row_groups):
                stop = start + file.metadata.row_group(group).num_rows
                if is_wanted(start, stop):
                    batches = file.iter_batches(PIECE_ROWS, row_groups=[group], columns=list(columns))
                    yield from _located(self.name, batches, start, columns)
                start = stop


class ArrowSource(Source):
    """An Arrow IPC file or stream, mapped into memory."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        with arrow_errors(f"{path} is not an Arrow file"):
            reader, self._is_file = self._open()
            self.schema = reader.schema
            if self._is_file:
                self.row_count = sum(reader.get_batch(index).num_rows for index in range(reader.num_record_batches))

    def fingerprint(self) -> dict[str, Any]:
        return file_fingerprint(self.name)

    def pieces(self, columns: Sequence[str], is_wanted: IsWanted) -> Iterator[Piece]:
        with arrow_errors(f"{self.name} cannot be read"):
            reader, is_file = self._open()
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        slices = (
            batch.select(list(columns)).slice(offset, PIECE_ROWS)
            for batch in batches
            for offset in range(0, batch.num_rows, PIECE_ROWS)
        )
        return _located(self.name, slices, 0, columns)

    def _open(self) -> tuple[Any, bool]:
        import pyarrow as pa

        mapped = pa.memory_map(self.name)
        try:
            return pa.ipc.open_file(mapped), True
        except pa.ArrowInvalid:
            mapped.seek(0)
            return pa.ipc.open_stream(mapped), False


class DatasetSource(Source):
    """A split of a dataset of the `datasets` library."""

    def __init__(self, name: str) -> None:
        import pyarrow as pa

        super().__init__(name)
        self._loaded = load_dataset(*parse_address(name.removeprefix(DATASETS)))
        if self._loaded.features is None:
            first: Any = next(iter(self._loaded.with_format("arrow").iter(PIECE_ROWS)), pa.table({}))
            self.schema = first.schema
        else:
            self.schema = self._loaded.features.arrow_schema
        self.schema = self.schema.remove_metadata()
        if hasattr(self._loaded, "__len__"):
            self.row_count = len(self._loaded)

    def fingerprint(self) -> dict[str, Any]:
        """Return the fingerprint of the library; a streamed folder has none."""
        return {"rows": self.row_count, "fingerprint": getattr(self._loaded, "_fingerprint", None)}

    def pieces(self, columns: Sequence[str], is_wanted: IsWanted) -> Iterator[Piece]:
        def batches() -> Iterator[pa.RecordBatch]:
            with translate_read_errors(self.name):
                for table in self._loaded.with_format("arrow").iter(PIECE_ROWS):
                    yield table.select(list(columns)).combine_chunks().to_batches(PIECE_ROWS)[0]

        return _located(self.name, batches(), 0, columns)


def _located(name: str, batches: Any, start: int, columns: Sequence[str]) -> Iterator[Piece]:
    """Yield the batches with their positions; an error in the middle of a file names the row."""
    iterator = iter(batches)
    while True:
        with arrow_errors(f"{name}, after row {start}, cannot be read"):
            rows = next(iterator, None)
        if rows is None:
            return
        yield Piece(start, rows.select(list(columns)))
        start += rows.num_rows


def file_fingerprint(path: str) -> dict[str, Any]:
    """Return the size and the modification time of a file."""
    status = Path(path).stat()
    return {"size": status.st_size, "modified_ns": status.st_mtime_ns}


def open_sources(pattern: str) -> list[Source]:
    """Open all inputs: a file, the data files of a directory, the matches of a glob, or `datasets:NAME:SPLIT`.

    They are in the order of their names. Raise InputError if one cannot be read or differs in its columns.
    """
    from hasten.corpus.text_source import SUFFIXES as TEXT_SUFFIXES
    from hasten.corpus.text_source import TextSource

    kinds: dict[str, Callable[[str], Source]] = dict.fromkeys(TEXT_SUFFIXES, TextSource)
    kinds |= {".parquet": ParquetSource, ".arrow": ArrowSource, ".feather": ArrowSource}
    if pattern.startswith(DATASETS):
        return [DatasetSource(pattern)]
    paths = _paths(pattern, tuple(kinds))
    sources = []
    for path in paths:
        try:
            suffix = Path(path).suffix.lower()
            if suffix not in kinds:
                raise InputError(f"{path} has an unknown file type: {suffix}", hint=f"known: {', '.join(kinds)}")
            sources.append(kinds[suffix](path))
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from error
    check_equal_schemas(sources)
    return sources


def _paths(pattern: str, suffixes: Sequence[str]) -> list[str]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [str(path)]
    if path.is_dir():
        # As other readers do: names that begin with . or _ are not data.
        found = [
            file
            for file in path.rglob("*")
            if file.suffix.lower() in suffixes and not any(part[0] in "._" for part in file.relative_to(path).parts)
        ]
        if not found:
            raise InputError(f"{pattern} has no data files", hint=f"known: {', '.join(suffixes)}")
        return sorted(str(file) for file in found if file.is_file())
    matches = sorted(match for match in glob.glob(str(path), recursive=True) if Path(match).is_file())  # noqa: PTH207
    if not matches:
        hint = f"a file, a directory, a glob in quotes, or {DATASETS}NAME:SPLIT"
        raise InputError(f"no input at {pattern or 'all: its name is empty'}", hint=hint)
    return matches


def check_equal_schemas(sources: Sequence[Source]) -> None:
    """Raise InputError if files differ in the names or types of their columns; the order may differ."""
    first = sources[0]
    for source in sources:
        names = source.schema.names
        if duplicates := [name for name in names if names.count(name) > 1]:
            raise InputError(f"{source.name} has two columns named '{duplicates[0]}'")
        for one, other in ((first, source), (source, first)):
            if missing := [name for name in one.schema.names if name not in other.schema.names]:
                raise InputError(
                    f"{other.name} has no column '{missing[0]}', which {one.name} has",
                    hint="inputs of one job have the same columns: run the others as a job of their own",
                )
        for field_ in source.schema:
            expected = first.schema.field(field_.name).type
            if field_.type != expected:
                raise InputError(
                    f"column '{field_.name}' is {field_.type} in {source.name} and {expected} in {first.name}",
                    hint="inputs of one job have the same columns: run the others as a job of their own",
                )
