"""Read back what a job has written: keys of rows, and rejected rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hasten.core.errors import PlanError
from hasten.corpus.arrow_library import arrow_errors
from hasten.corpus.shard_writer import rejected_schema, write_rejected
from hasten.corpus.state import REJECTED, JobState, fsync_directory

if TYPE_CHECKING:
    import pyarrow as pa


def read_keys(parts: Sequence[Path], column: str) -> pa.Array:
    """Return the distinct values of a column of output files."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow.parquet import read_table

    arrays = []
    for part in parts:
        with arrow_errors(f"{part} cannot be read"):
            if part.suffix == ".parquet":
                arrays.append(pc.unique(read_table(part, columns=[column], partitioning=None).column(column)))
            else:
                with part.open("rb") as lines:
                    arrays.append(pc.unique(pa.array([json.loads(line)[column] for line in lines])))
    if not arrays:
        raise PlanError("--skip-existing found no output to add to")
    return pc.unique(pa.concat_arrays([array.cast(arrays[0].type) for array in arrays]))


def merge_rejected(state: JobState) -> None:
    """Write the rejected rows of all shards to one file, in the order of the input."""
    import pyarrow as pa
    from pyarrow.parquet import read_table

    tables = [read_table(file, partitioning=None) for file in sorted(state.rejected.glob("*.parquet"))]
    temporary = state.temporary / REJECTED
    write_rejected(temporary, pa.concat_tables([rejected_schema().empty_table(), *tables]))
    temporary.replace(state.output / REJECTED)
    fsync_directory(state.output)
