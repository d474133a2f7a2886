"""A benchmark's contender in a process of its own: `python -m hasten.measure.lane`, JSON lines in and out.

Alone in its process, a variant does not fight the threads of the others, its load time includes its libraries,
and the peak of the process is the variant's own memory.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec
import numpy as np

from hasten.backends import BACKENDS, Artifact, RunOptions
from hasten.core.errors import HastenError
from hasten.core.hardware import gpu_memory_used_bytes, peak_memory_bytes
from hasten.core.tensors import Batch, Signature
from hasten.core.variant import CPU, Variant


@dataclass(frozen=True, slots=True)
class Opening:
    variant: Variant
    signature: Signature
    directory: str
    graphs: dict[str, str]
    threads: int | None


@dataclass(frozen=True, slots=True)
class Opened:
    load_ms: float
    precision: str


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch whose values are sent once and kept; later turns name it."""

    values: dict[str, list[int]]
    lengths: list[int]


@dataclass(frozen=True, slots=True)
class Turn:
    shape: str
    warm: int
    count: int
    rows: Rows | None = None


@dataclass(frozen=True, slots=True)
class Times:
    ms: list[float]
    peak_memory_bytes: int
    cpu_s: float
    error: str | None = None
    gpu_memory_bytes: int | None = None


class GpuMemory:
    """What this process takes of it while it is watched: the others stand still meanwhile."""

    def __init__(self, device: str) -> None:
        self.taken_bytes = None if device == CPU else 0

    def __enter__(self) -> None:
        self._before = 0 if self.taken_bytes is None else gpu_memory_used_bytes()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.taken_bytes is not None:
            self.taken_bytes += gpu_memory_used_bytes() - self._before


def main() -> None:
    # The protocol owns the real stdout; whatever a library prints goes to stderr.
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    opening = msgspec.json.decode(requests.readline(), type=Opening)
    artifact = Artifact(opening.variant, opening.signature, Path(opening.directory), opening.graphs)
    gpu_memory = GpuMemory(opening.variant.device)
    with gpu_memory:
        start = time.perf_counter()
        session = BACKENDS.get(opening.variant.backend).open(artifact, RunOptions(opening.threads))
        load_ms = (time.perf_counter() - start) * 1e3
    _reply(replies, Opened(load_ms, session.spec.precision))
    batches: dict[str, Batch] = {}
    for line in requests:
        turn = msgspec.json.decode(line, type=Turn)
        if turn.rows is not None:
            values = {name: np.asarray(column, np.int32) for name, column in turn.rows.values.items()}
            batches[turn.shape] = Batch(values, np.asarray(turn.rows.lengths, np.int32))
        batch = batches[turn.shape]
        times: list[float] = []
        error = None
        # A shape takes all its memory when it is new.
        with gpu_memory if turn.rows is not None else nullcontext():
            try:
                for _ in range(turn.warm):
                    session.run(batch)
                for _ in range(turn.count):
                    begin = time.perf_counter()
                    session.run(batch)
                    times.append((time.perf_counter() - begin) * 1e3)
            except HastenError as failure:
                error = str(failure)
        _reply(replies, Times(times, peak_memory_bytes(), time.process_time(), error, gpu_memory.taken_bytes))


def _reply(stream: BinaryIO, message: object) -> None:
    stream.write(msgspec.json.encode(message) + b"\n")


if __name__ == "__main__":
    main()
