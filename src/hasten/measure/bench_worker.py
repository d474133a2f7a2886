"""Time one benchmark contender in its own process: `python -m hasten.measure.bench_worker [batch|prefill|decode]`.

Requests and replies are JSON lines. In its own process a variant does not compete with the threads of the others, its
load time includes its libraries, and the peak of the process is the variant's own memory.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec
import numpy as np

from hasten.backends import BACKENDS, Artifact, RunOptions, SupportsDecoding
from hasten.core.errors import HastenError
from hasten.core.system.hardware import gpu_memory_used_bytes, peak_memory_bytes
from hasten.core.tensors import Batch, IntArray, Signature
from hasten.core.variant import CPU, Variant

# Sequences that are decoded together.
MAX_ROWS = 64


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """The variant that the worker loads."""

    variant: Variant
    signature: Signature
    directory: str
    graphs: dict[str, str]
    threads: int | None

    @property
    def artifact(self) -> Artifact:
        """Return the variant's files."""
        return Artifact(self.variant, self.signature, Path(self.directory), self.graphs)


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The reply to an `OpenRequest`."""

    load_ms: float


@dataclass(frozen=True, slots=True)
class RowsRequest:
    """A batch that is sent once per shape and kept by the worker; later rounds name the shape alone."""

    values: dict[str, list[int]]
    lengths: list[int]


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """A round of runs at one shape: untimed warm-up runs, then timed ones."""

    shape: str
    warmup_runs: int
    timed_runs: int
    rows: RowsRequest | None = None


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """The reply to a `RoundRequest`."""

    ms: list[float]
    peak_memory_bytes: int
    cpu_s: float
    error: str | None = None
    gpu_memory_bytes: int | None = None


class Runner:
    """A loaded contender whose runs are timed."""

    def start_round(self, batch: Batch) -> None:
        """Select the batch of the following runs."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Do the work before a run that must not be timed; nothing by default."""

    def run(self) -> None:
        """Do the work that is timed."""
        raise NotImplementedError


class BatchRunner(Runner):
    """Runs an encoder on a whole batch."""

    def __init__(self, request: OpenRequest) -> None:
        backend = BACKENDS.get(request.variant.backend)
        self._session = backend.open(request.artifact, RunOptions(request.threads))

    def start_round(self, batch: Batch) -> None:
        self._batch = batch

    def run(self) -> None:
        self._session.run(self._batch)


class LockstepDecoder(Protocol):
    """Greedily decodes sequences of one length in lockstep."""

    def prefill(self, rows: IntArray) -> None:
        """Replace the current sequences with these prompts."""

    def decode(self) -> None:
        """Generate one more token of every sequence."""


class BackendDecoder:
    """A `LockstepDecoder` on the decoder of a backend."""

    def __init__(self, request: OpenRequest) -> None:
        backend = BACKENDS.get(request.variant.backend)
        assert isinstance(backend, SupportsDecoding)
        self._decoder = backend.open_decoder(request.artifact, RunOptions(request.threads), MAX_ROWS)
        self._next_ids = np.empty(0, np.int32)

    def prefill(self, rows: IntArray) -> None:
        for slot in reversed(range(len(self._next_ids))):
            self._decoder.free(slot)
        logits = [self._decoder.prefill(slot, row) for slot, row in enumerate(rows)]
        self._next_ids = np.argmax(logits, axis=-1).astype(np.int32)

    def decode(self) -> None:
        logits = self._decoder.decode(range(len(self._next_ids)), self._next_ids)
        self._next_ids = logits.argmax(axis=-1).astype(np.int32)


class PrefillRunner(Runner):
    """Times the prefill of all prompts of a batch."""

    def __init__(self, decoder: LockstepDecoder) -> None:
        self._decoder = decoder

    def start_round(self, batch: Batch) -> None:
        self._prompts = batch.values["input_ids"].reshape(len(batch), -1)

    def run(self) -> None:
        self._decoder.prefill(self._prompts)


class DecodeRunner(Runner):
    """Times one decode step of all sequences of a batch.

    Every round starts from the prompts, and returns to them when the context is full.
    """

    def __init__(self, decoder: LockstepDecoder, max_length: int) -> None:
        self._decoder = decoder
        self._max_length = max_length

    def start_round(self, batch: Batch) -> None:
        self._prompts = batch.values["input_ids"].reshape(len(batch), -1)
        self._steps_left = 0

    def prepare(self) -> None:
        if not self._steps_left:
            self._decoder.prefill(self._prompts)
            self._steps_left = max(1, self._max_length - self._prompts.shape[1])

    def run(self) -> None:
        self._decoder.decode()
        self._steps_left -= 1


class GpuMemory:
    """Measures the GPU memory that this process allocates; other contenders are idle meanwhile."""

    def __init__(self, device: str) -> None:
        self.allocated_bytes = None if device == CPU else 0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Add the memory that is allocated inside the context."""
        before = 0 if self.allocated_bytes is None else gpu_memory_used_bytes()
        yield
        if self.allocated_bytes is not None:
            self.allocated_bytes += gpu_memory_used_bytes() - before


def generation_runner(
    open_decoder: Callable[[OpenRequest], LockstepDecoder], mode: str
) -> Callable[[OpenRequest], Runner]:
    """Return the function that opens the runner of `prefill` or `decode`."""

    def open_runner(request: OpenRequest) -> Runner:
        decoder = open_decoder(request)
        return PrefillRunner(decoder) if mode == "prefill" else DecodeRunner(decoder, request.signature.max_length)

    return open_runner


def serve(open_runner: Callable[[OpenRequest], Runner]) -> None:
    """Load the contender of the first request, then time a round for every further one, until stdin ends."""
    # The protocol owns the real stdout; output of libraries goes to stderr.
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    opening = msgspec.json.decode(requests.readline(), type=OpenRequest)
    gpu_memory = GpuMemory(opening.variant.device)
    with gpu_memory.measure():
        start = time.perf_counter()
        runner = open_runner(opening)
        load_ms = (time.perf_counter() - start) * 1e3
    _reply(replies, WorkerReady(load_ms))
    batches: dict[str, Batch] = {}
    for line in requests:
        request = msgspec.json.decode(line, type=RoundRequest)
        if request.rows is not None:
            values = {name: np.asarray(column, np.int32) for name, column in request.rows.values.items()}
            batches[request.shape] = Batch(values, np.asarray(request.rows.lengths, np.int32))
        # A shape allocates all its memory when it is new.
        with gpu_memory.measure() if request.rows is not None else nullcontext():
            times, error = _run_round(runner, batches[request.shape], request)
        _reply(replies, RoundTimes(times, peak_memory_bytes(), time.process_time(), error, gpu_memory.allocated_bytes))


def _run_round(runner: Runner, batch: Batch, request: RoundRequest) -> tuple[list[float], str | None]:
    times: list[float] = []
    try:
        runner.start_round(batch)
        for run in range(request.warmup_runs + request.timed_runs):
            runner.prepare()
            start = time.perf_counter()
            runner.run()
            elapsed_ms = (time.perf_counter() - start) * 1e3
            times += [elapsed_ms] if run >= request.warmup_runs else []
    except HastenError as error:
        return times, str(error)
    return times, None


def _reply(stream: BinaryIO, message: object) -> None:
    stream.write(msgspec.json.encode(message) + b"\n")


def main() -> None:
    """Serve the mode named on the command line, whole batches by default."""
    mode = sys.argv[1] if len(sys.argv) > 1 else "batch"
    serve(BatchRunner if mode == "batch" else generation_runner(BackendDecoder, mode))


if __name__ == "__main__":
    main()
