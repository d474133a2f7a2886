"""Write the output file of one shard: beside its target, synced, renamed, then recorded."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from hasten.core.errors import StageError, translate_os_errors
from hasten.corpus.job_records import DoneShard
from hasten.corpus.operator import AnsweredWindow, Rejected
from hasten.corpus.settings import FileFormat
from hasten.corpus.state import JobState, fsync_directory
from hasten.corpus.windows import ShardKey

if TYPE_CHECKING:
    import pyarrow as pa

# Rows are collected into row groups of at least this size.
_ROW_GROUP_BYTES = 32 * 2**20
PROOF_KEY = "hasten"


class _FileWriter(Protocol):
    def write(self, rows: pa.Table) -> None: ...

    def close(self, proof: Mapping[str, Any]) -> None: ...

    def abandon(self) -> None: ...


class _ParquetFile:
    def __init__(self, stream: IO[bytes], schema: pa.Schema) -> None:
        import pyarrow as pa
        from pyarrow.parquet import ParquetWriter

        # Dictionaries pay for repeated text, not for numbers.
        is_text = [pa.types.is_string(field.type) or pa.types.is_large_string(field.type) for field in schema]
        texts = [field.name for field, is_one in zip(schema, is_text, strict=True) if is_one]
        self._writer = ParquetWriter(stream, schema, compression="zstd", use_dictionary=texts or False)

    def write(self, rows: pa.Table) -> None:
        self._writer.write_table(rows, row_group_size=max(1, rows.num_rows))

    def close(self, proof: Mapping[str, Any]) -> None:
        self._writer.add_key_value_metadata({PROOF_KEY: json.dumps(proof, sort_keys=True)})
        self._writer.close()

    def abandon(self) -> None:
        """Close the writer, which may fail for want of space, since it would otherwise try again when it is freed."""
        with suppress(OSError, ValueError):
            self._writer.close()


class _JsonLinesFile:
    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def write(self, rows: pa.Table) -> None:
        for row in rows.to_pylist():
            self._stream.write(json.dumps(row, ensure_ascii=False, default=_plain).encode(errors="replace") + b"\n")

    def close(self, proof: Mapping[str, Any]) -> None:
        """Write nothing: a line is a row, and the proof is in the report."""

    def abandon(self) -> None:
        """Do nothing: the stream is closed by its owner."""


def _plain(value: Any) -> Any:
    """Convert values that JSON lacks: dates and times as ISO text, bytes and decimals as text."""
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


class ShardWriter:
    """The output file of one shard, and the file of its rejected rows."""

    def __init__(self, state: JobState, run: int, key: ShardKey, schema: pa.Schema, file_format: FileFormat) -> None:
        self._state, self._run, self._key, self._schema = state, run, key, schema
        self._begin = time.perf_counter()
        self._part = state.part(run, key)
        self._path = state.temporary / self._part.name
        with self._errors():
            self._stream = self._path.open("wb")
            is_parquet = file_format is FileFormat.PARQUET
            self._file: _FileWriter = _ParquetFile(self._stream, schema) if is_parquet else _JsonLinesFile(self._stream)
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = self._rows = self._covered = self._tokens = self._truncated = 0
        self._rejected: list[Rejected] = []

    def write(self, answered: AnsweredWindow) -> None:
        """Write the rows of a window."""
        rows = answered.rows.select(self._schema.names)
        self._pending.append(rows)
        self._pending_bytes += rows.nbytes
        self._rows += rows.num_rows
        self._covered += answered.window.covered
        self._tokens += answered.tokens
        self._truncated += answered.truncated
        self._rejected += answered.rejected
        if self._pending_bytes >= _ROW_GROUP_BYTES:
            self._flush()

    def finish(self, source: str, proof: Mapping[str, Any]) -> DoneShard:
        """Put the file in place and record it; rejected rows come first, so that none is lost.

        The footer of a Parquet file holds the proof and the counts, but no times: a repeated job writes the same bytes.
        """
        self._flush()
        counts = {"input": source, "input_shard": self._key.index, "rows": self._rows, "rejected": len(self._rejected)}
        with self._errors():
            self._file.close({**proof, **counts})
            self._stream.flush()
            os.fsync(self._stream.fileno())
            size = self._stream.tell()
            self._stream.close()
            self._write_rejected(source)
            self._path.rename(self._part)
            fsync_directory(self._part.parent)
            done = DoneShard(
                run=self._run,
                file=self._key.file,
                index=self._key.index,
                rows=self._rows,
                rejected=len(self._rejected),
                covered=self._covered,
                tokens=self._tokens,
                truncated=self._truncated,
                bytes=size,
                seconds=round(time.perf_counter() - self._begin, 3),
            )
            self._state.add(done)
        return done

    def abandon(self) -> None:
        """Close the file, which is not complete."""
        self._file.abandon()
        with suppress(OSError, ValueError):
            self._stream.close()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._pending and self._pending_bytes:
            with self._errors():
                self._file.write(pa.Table.from_batches(self._pending).cast(self._schema))
        self._pending, self._pending_bytes = [], 0

    def _write_rejected(self, source: str) -> None:
        target = self._state.rejected_part(self._run, self._key)
        if not self._rejected:
            target.unlink(missing_ok=True)
            return
        path = self._state.temporary / target.name
        write_rejected(path, rejected_table(source, self._rejected))
        path.rename(target)
        fsync_directory(target.parent)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        hint = "free some space; the same command continues after the last complete file"
        try:
            with translate_os_errors(f"writing {self._part}"):
                yield
        except StageError as error:
            raise StageError(error.message, hint=hint) from error
        except OSError as error:
            raise StageError(f"writing {self._part} failed: {error.strerror or error}", hint=hint) from error
        except (ValueError, NotImplementedError) as error:  # a type that the format does not have
            raise StageError(
                f"writing {self._part} failed: {error}", hint="--drop leaves out columns of the input"
            ) from error


def rejected_schema() -> pa.Schema:
    """Return the schema of rejected rows."""
    import pyarrow as pa

    return pa.schema([("file", pa.string()), ("row", pa.int64()), ("reason", pa.string()), ("input", pa.string())])


def rejected_table(source: str, rejected: Sequence[Rejected]) -> pa.Table:
    """Return rejected rows as a table; rows of the input are counted from 0."""
    import pyarrow as pa

    columns: Mapping[str, list[Any]] = {
        "file": [source] * len(rejected),
        "row": [row.position for row in rejected],
        "reason": [_valid(row.reason) for row in rejected],
        "input": [_valid(row.excerpt) for row in rejected],
    }
    return pa.table(columns, schema=rejected_schema())


def write_rejected(path: Path, table: pa.Table) -> None:
    """Write and sync a Parquet file of rejected rows."""
    from pyarrow.parquet import write_table

    with path.open("wb") as stream:
        write_table(table, stream)
        stream.flush()
        os.fsync(stream.fileno())


def _valid(text: str) -> str:
    """Return text without lone surrogates, which no file of text can hold."""
    return text.encode(errors="replace").decode()
