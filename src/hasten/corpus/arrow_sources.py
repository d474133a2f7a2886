"""Read Parquet and Arrow files, and datasets of the `datasets` library."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.corpus.arrow_library import arrow_errors
from hasten.corpus.sources import MAX_PIECE_BYTES, PIECE_ROWS, IsWanted, Piece, Source, file_fingerprint
from hasten.measure.arrow import DATASETS, load_dataset, parse_address, translate_read_errors

if TYPE_CHECKING:
    import pyarrow as pa

_FOOTER_BYTES = 8


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
                metadata = file.metadata.row_group(group)
                stop = start + metadata.num_rows
                if is_wanted(start, stop):
                    # Fewer rows at a time where they are large.
                    rows = MAX_PIECE_BYTES * metadata.num_rows // max(1, metadata.total_byte_size)
                    size = min(PIECE_ROWS, max(1, rows))
                    batches = file.iter_batches(size, row_groups=[group], columns=list(columns))
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
        import pyarrow as pa

        def batches() -> Iterator[pa.RecordBatch]:
            with translate_read_errors(self.name):
                for table in self._loaded.with_format("arrow").iter(PIECE_ROWS):
                    yield pa.concat_batches(table.select(list(columns)).to_batches())

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
