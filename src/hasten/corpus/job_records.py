"""Define the records of a job: its identity and inputs, complete shards, and the row counts of inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hasten.corpus.windows import ShardKey


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input as it was when the run began."""

    name: str
    fingerprint: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """A run over some inputs. Every run but the first adds to a finished output."""

    inputs: list[InputFile]
    skip_existing: str | None = None
    is_complete: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """The sessions that run at once, and the threads of each."""

    sessions: int
    threads: int | None


@dataclass(frozen=True, slots=True)
class Job:
    """The content of job.json."""

    version: int
    # Everything that the content of the output depends on, but the inputs.
    identity: dict[str, Any]
    runs: list[Run]
    placement: Placement | None = None


@dataclass(frozen=True, slots=True)
class DoneShard:
    """A line about a complete shard."""

    run: int
    file: int
    index: int
    rows: int
    rejected: int
    covered: int
    tokens: int
    truncated: int
    bytes: int
    seconds: float

    @property
    def key(self) -> ShardKey:
        """Return the key of the shard."""
        return ShardKey(self.file, self.index)


@dataclass(frozen=True, slots=True)
class FileEnd:
    """A line about an input of which the number of rows became known."""

    run: int
    file: int
    input_rows: int


@dataclass(slots=True)
class RunProgress:
    """The complete shards and the known sizes of inputs, of one run."""

    done: dict[ShardKey, DoneShard] = field(default_factory=dict)
    input_rows: dict[int, int] = field(default_factory=dict)

    def is_complete(self, files: int, rows_per_shard: int) -> bool:
        """Return whether all shards of all inputs are done."""
        return all(
            file in self.input_rows
            and all(key in self.done for key in shards(file, self.input_rows[file], rows_per_shard))
            for file in range(files)
        )


def shards(file: int, rows: int, rows_per_shard: int) -> list[ShardKey]:
    """Return the shards of a file; one without rows has a single shard."""
    return [ShardKey(file, index) for index in range(max(1, -(-rows // rows_per_shard)))]
