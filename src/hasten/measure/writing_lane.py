"""A model that writes in a benchmark's process of its own: `python -m hasten.measure.writing_lane read|write`.

As `lane.py`, but a run is one more token in each row (write), or the rows' prompts read (read).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from hasten.backends import BACKENDS, Artifact, Decodes, RunOptions
from hasten.core.errors import HastenError
from hasten.core.hardware import peak_memory_bytes
from hasten.core.tensors import IntArray
from hasten.measure.lane import GpuMemory, Opened, Opening, Times, Turn

# That go on together.
MOST_ROWS = 64


class Pen(Protocol):
    """Rows of one length that go on together."""

    def read(self, rows: IntArray) -> None:
        """These from now on, whatever was there before."""
        ...

    def write(self) -> None: ...


class DecoderPen:
    def __init__(self, opening: Opening) -> None:
        backend = BACKENDS.get(opening.variant.backend)
        assert isinstance(backend, Decodes)
        artifact = Artifact(opening.variant, opening.signature, Path(opening.directory), opening.graphs)
        self._decoder = backend.open_decoder(artifact, RunOptions(opening.threads), MOST_ROWS)
        self._next = np.empty(0, np.int32)

    def read(self, rows: IntArray) -> None:
        for slot in reversed(range(len(self._next))):
            self._decoder.end(slot)
        logits = [self._decoder.begin(slot, row) for slot, row in enumerate(rows)]
        self._next = np.argmax(logits, axis=-1).astype(np.int32)

    def write(self) -> None:
        self._next = self._decoder.step(range(len(self._next)), self._next).argmax(axis=-1).astype(np.int32)


def serve(open_pen: Callable[[Opening], Pen], *, writes: bool) -> None:
    # The protocol owns the real stdout; whatever a library prints goes to stderr.
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    opening = msgspec.json.decode(requests.readline(), type=Opening)
    gpu_memory = GpuMemory(opening.variant.device)
    with gpu_memory:
        start = time.perf_counter()
        pen = open_pen(opening)
        load_ms = (time.perf_counter() - start) * 1e3
    replies.write(msgspec.json.encode(Opened(load_ms, opening.variant.precision)) + b"\n")
    prompts: dict[str, IntArray] = {}
    for line in requests:
        turn = msgspec.json.decode(line, type=Turn)
        if turn.rows is not None:
            prompts[turn.shape] = np.asarray(turn.rows.values["input_ids"], np.int32).reshape(
                len(turn.rows.lengths), -1
            )
        rows = prompts[turn.shape]
        times: list[float] = []
        error = None
        # A shape takes all its memory when it is new.
        with gpu_memory if turn.rows is not None else nullcontext():
            try:
                room = 0
                for place in range(turn.warm + turn.count):
                    if writes and not room:
                        # Every turn starts from the same length, and goes back to it where a row is full.
                        pen.read(rows)
                        room = max(1, opening.signature.max_length - rows.shape[1])
                    begin = time.perf_counter()
                    pen.write() if writes else pen.read(rows)
                    took = (time.perf_counter() - begin) * 1e3
                    room -= writes
                    times += [took] if place >= turn.warm else []
            except HastenError as failure:
                error = str(failure)
        reply = Times(times, peak_memory_bytes(), time.process_time(), error, gpu_memory.taken_bytes)
        replies.write(msgspec.json.encode(reply) + b"\n")


if __name__ == "__main__":
    serve(DecoderPen, writes=sys.argv[1] == "write")
