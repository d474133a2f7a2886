"""Cut inputs into shards, the units of resuming, and shards into windows, whose rows are batched by length.

Both depend on the input alone, so that a repeated job computes the same batches and writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hasten.core.tensors import IntArray
from hasten.corpus.filters import RowFilter
from hasten.corpus.sources import Piece, Source

if TYPE_CHECKING:
    import pyarrow as pa

# A window ends early at this size, which bounds the memory of long rows.
_MAX_WINDOW_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class ShardKey:
    """A range of input rows, which becomes one output file: `index` counts the shards of a file."""

    file: int
    index: int


@dataclass(frozen=True, slots=True)
class Window:
    """Rows that are answered together, and their positions in the input file."""

    shard: ShardKey
    rows: pa.RecordBatch
    positions: IntArray
    # The reason by index of rows that could not be read.
    bad: dict[int, str]
    # Input rows that this window covers, those that a filter left out included.
    covered: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Cut:
    """The sizes of shards and windows, the columns to read and the rows to leave out."""

    rows_per_shard: int
    rows_per_window: int
    columns: Sequence[str]
    schema: pa.Schema
    row_filter: RowFilter | None = None
    # The column of the keys, and the keys that need no answer.
    key: str | None = None
    known_keys: pa.Array | None = None

    def windows(
        self,
        source: Source,
        file: int,
        is_needed: Callable[[ShardKey], bool],
        on_end: Callable[[int], None],
    ) -> Iterator[Window]:
        """Yield the windows of the shards that are needed, in order; a file without rows has one empty shard.

        `on_end` receives the number of rows once all that are needed are read.
        """
        size = self.rows_per_shard

        def is_wanted(start: int, stop: int) -> bool:
            return any(is_needed(ShardKey(file, index)) for index in range(start // size, -(-stop // size)))

        collector: _Collector | None = None
        end = 0
        for piece in source.pieces(self.columns, is_wanted):
            for shard, part in self._by_shard(piece, file):
                if collector is not None and collector.shard != shard:
                    yield collector.window(is_last=True)
                    collector = None
                if not is_needed(shard):
                    continue
                collector = collector or _Collector(shard, self)
                yield from collector.add(part)
            end = piece.start + piece.rows.num_rows
        if collector is not None:
            yield collector.window(is_last=True)
        # A reader that left out the last rows has counted them.
        on_end(end if source.row_count is None else source.row_count)
        if end == 0 and not source.row_count and is_needed(ShardKey(file, 0)):
            yield _Collector(ShardKey(file, 0), self).window(is_last=True)

    def keep(self, rows: pa.RecordBatch, bad: Sequence[int]) -> IntArray:
        """Return the indices of rows to answer; bad rows are kept, since they are reported."""
        import pyarrow as pa
        import pyarrow.compute as pc

        mask = np.ones(rows.num_rows, bool)
        if self.row_filter is not None:
            mask &= np.asarray(self.row_filter.mask(rows))
        if self.key is not None and self.known_keys is not None:
            column = rows.column(self.key)
            known = pc.is_in(column, value_set=self.known_keys.cast(column.type), skip_nulls=True)
            mask &= ~np.asarray(known.cast(pa.bool_()))
        mask[list(bad)] = True
        return np.flatnonzero(mask)

    def _by_shard(self, piece: Piece, file: int) -> Iterator[tuple[ShardKey, Piece]]:
        start, stop = piece.start, piece.start + piece.rows.num_rows
        while start < stop:
            index = start // self.rows_per_shard
            count = min(stop, (index + 1) * self.rows_per_shard) - start
            offset = start - piece.start
            bad = {row - offset: reason for row, reason in piece.bad.items() if offset <= row < offset + count}
            yield ShardKey(file, index), Piece(start, piece.rows.slice(offset, count), bad)
            start += count


class _Collector:
    """Collects the rows of one shard until a window is full."""

    def __init__(self, shard: ShardKey, cut: Cut) -> None:
        self.shard = shard
        self._cut = cut
        self._clear()

    def _clear(self) -> None:
        self._rows: list[pa.RecordBatch] = []
        self._positions: list[IntArray] = []
        self._bad: dict[int, str] = {}
        self._count = self._bytes = self._covered = 0

    def add(self, piece: Piece) -> Iterator[Window]:
        row_indices = self._cut.keep(piece.rows, tuple(piece.bad))
        rows = piece.rows if len(row_indices) == piece.rows.num_rows else piece.rows.take(row_indices)
        positions = piece.start + row_indices
        bad = {int(index): piece.bad[row] for index, row in enumerate(row_indices.tolist()) if row in piece.bad}
        self._covered += piece.rows.num_rows - len(row_indices)
        for start, count in self._parts(rows):
            self._rows.append(rows.slice(start, count))
            self._positions.append(positions[start : start + count])
            self._bad |= {
                self._count + row - start: reason for row, reason in bad.items() if start <= row < start + count
            }
            self._count += count
            self._covered += count
            self._bytes += self._rows[-1].nbytes
            if self._count >= self._cut.rows_per_window or self._bytes >= _MAX_WINDOW_BYTES:
                yield self.window(is_last=False)

    def _parts(self, rows: pa.RecordBatch) -> Iterator[tuple[int, int]]:
        """Split rows where the window is full, and where rows are so large that a few of them fill it."""
        start = 0
        largest = max(1, _MAX_WINDOW_BYTES * rows.num_rows // max(1, 4 * rows.nbytes))
        while start < rows.num_rows:
            count = min(rows.num_rows - start, self._cut.rows_per_window - self._count, largest)
            yield start, count
            start += count

    def window(self, *, is_last: bool) -> Window:
        import pyarrow as pa

        rows = pa.concat_batches(self._rows) if self._rows else _empty(self._cut)
        positions = np.concatenate(self._positions) if self._positions else np.zeros(0, np.int64)
        window = Window(self.shard, rows, positions, self._bad, self._covered, is_last)
        self._clear()
        return window


def _empty(cut: Cut) -> pa.RecordBatch:
    import pyarrow as pa

    schema = pa.schema([cut.schema.field(name) for name in cut.columns])
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
