"""Answer a stream of Arrow batches in a program."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from hasten.core.errors import InputError
from hasten.corpus.filters import RowFilter
from hasten.corpus.job import kept_columns, output_schema
from hasten.corpus.operator import Operator
from hasten.corpus.settings import AnswerSettings
from hasten.corpus.windows import ShardKey, Window

if TYPE_CHECKING:
    import pyarrow as pa


def answer_batches(
    open_operator: Callable[[pa.Schema], Operator],
    batches: Iterable[pa.RecordBatch | pa.Table],
    settings: AnswerSettings,
) -> Generator[pa.RecordBatch, None, None]:
    """Yield one batch with answers per input batch, in order; a few batches are read ahead.

    A row without an answer is an InputError that names it.
    """
    import pyarrow as pa

    iterator = _record_batches(batches)
    first = next(iterator, None)
    if first is None:
        return
    row_filter = RowFilter.parse(settings.where) if settings.where is not None else None
    if row_filter is not None:
        row_filter.check(first.schema)
    column_names = kept_columns(first.schema, settings)
    with closing(open_operator(first.schema)) as operator:
        schema = output_schema(first.schema, column_names, operator)
        windows = _windows(chain([first], iterator), first.schema, row_filter, operator.window_rows)
        pending: list[pa.RecordBatch] = []
        with closing(operator.run(windows)) as answers:
            for answered in answers:
                if answered.rejected:
                    rejected = answered.rejected[0]
                    raise InputError(f"row {rejected.position}: {rejected.reason}")
                pending.append(answered.rows.select(schema.names))
                if answered.window.is_last:
                    yield pa.concat_batches(pending).cast(schema)
                    pending = []


def _record_batches(batches: Iterable[pa.RecordBatch | pa.Table]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    for batch in batches:
        if not isinstance(batch, pa.RecordBatch | pa.Table):
            raise InputError(
                f"the batches hold {type(batch).__name__}, not Arrow batches", hint="pass pyarrow.RecordBatch objects"
            )
        yield batch if isinstance(batch, pa.RecordBatch) else pa.concat_batches(batch.to_batches() or [_empty(batch)])


def _empty(table: pa.Table) -> pa.RecordBatch:
    import pyarrow as pa

    return pa.RecordBatch.from_pylist([], schema=table.schema)


def _windows(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, row_filter: RowFilter | None, size: int
) -> Iterator[Window]:
    start = 0
    for number, batch in enumerate(batches):
        if batch.schema != schema:
            raise InputError(f"batch {number} has the columns {batch.schema.names}, not those of the first batch")
        row_indices = np.flatnonzero(row_filter.mask(batch)) if row_filter is not None else np.arange(batch.num_rows)
        rows = batch if row_filter is None else batch.take(row_indices)
        for offset in range(0, max(1, rows.num_rows), size):
            part = rows.slice(offset, size)
            positions = start + row_indices[offset : offset + size]
            yield Window(ShardKey(0, number), part, positions, {}, part.num_rows, offset + size >= rows.num_rows)
        start += batch.num_rows
