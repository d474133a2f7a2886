"""The contract of an input: record batches with the position of every row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

# Rows read at a time, and about how many bytes of them. The borders of pieces depend on the file alone, whatever is
# skipped.
PIECE_ROWS = 1024
MAX_PIECE_BYTES = 64 * 2**20

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


def file_fingerprint(path: str) -> dict[str, Any]:
    """Return the size and the modification time of a file."""
    status = Path(path).stat()
    return {"size": status.st_size, "modified_ns": status.st_mtime_ns}
