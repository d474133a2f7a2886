"""A model that writes, in ONNX Runtime: keys and values of all rows lie in buffers that graphs read and write in place.

Rows in progress are the first ones of each buffer, so that all of them, or any that lie side by side, step in one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hasten.backends import DECODER, Artifact, RunOptions
from hasten.backends.onnxruntime.session import CPU_PROVIDER, settings
from hasten.core.closing import Closing
from hasten.core.errors import StageError
from hasten.core.tensors import FloatArray, IntArray

# Tokens a row has room for at first; doubled when one needs more. Memory that no row reached is never touched.
_CAPACITY = 256
# Bindings that are kept: one for each place and number of rows that stepped together.
_MOST_BINDINGS = 64
_PAST, _PRESENT = "past.", "present."


class DecoderSession(Closing):
    """Fulfils `Decoder`. A slot is somebody's name for a row; rows move, slots stay."""

    def __init__(self, artifact: Artifact, options: RunOptions, slots: int) -> None:
        import onnxruntime

        try:
            self._session: Any = onnxruntime.InferenceSession(
                str(artifact.path(DECODER)), settings(options.thread_count), providers=[CPU_PROVIDER]
            )
        except Exception as error:  # the binding raises its own unrelated classes
            raise StageError(f"ONNX Runtime cannot load {artifact.variant}: {error}") from error
        self.slots = slots
        self._context = artifact.signature.max_length
        past = [entry for entry in self._session.get_inputs() if entry.name.startswith(_PAST)]
        self._caches = _Caches({entry.name: (entry.shape[1], entry.shape[3]) for entry in past}, slots, self._context)
        self._vocabulary = next(entry.shape[1] for entry in self._session.get_outputs() if entry.name == "logits")
        # Of each slot in progress its row, and of each row how many tokens it holds.
        self._row_of: dict[int, int] = {}
        self._lengths = np.zeros(slots, np.int32)
        self._steps: dict[tuple[int, int], _Step] = {}

    def close(self) -> None:
        self._steps.clear()
        self._caches.drop()
        self._session = None

    def begin(self, slot: int, ids: IntArray) -> FloatArray:
        self._check_open()
        self._check_room(slot, len(ids))
        row = len(self._row_of)
        self._make_room(len(ids))
        run = _Step(self._session, self._caches, row, 1, len(ids), self._vocabulary)
        logits = run(np.asarray(ids)[None], np.array([len(ids)]))
        self._row_of[slot] = row
        self._lengths[row] = len(ids)
        return logits[0]

    def step(self, slots: Sequence[int], ids: IntArray) -> FloatArray:
        self._check_open()
        rows = self._side_by_side([self._row_of[slot] for slot in slots])
        first, count = min(rows), len(rows)
        lengths = self._lengths[first : first + count]
        longest = int(lengths.max()) + 1
        if longest > self._context:
            raise StageError(f"a row has no room left: the context is {self._context} tokens")
        self._make_room(longest)
        order = np.asarray(rows) - first
        given = np.empty((count, 1), np.int32)
        given[order, 0] = ids
        logits = self._step(first, count)(given, lengths + 1)
        lengths += 1
        return logits[order]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._check_open()
        wanted = {target: source for source, target in zip(sources, targets, strict=True) if source != target}
        for target in wanted:
            if target not in self._row_of:
                self._row_of[target] = len(self._row_of)
        rows = {self._row_of[target]: self._row_of[source] for target, source in wanted.items()}
        self._caches.copy(rows, self._lengths)
        before = self._lengths.copy()
        for target, source in rows.items():
            self._lengths[target] = before[source]

    def end(self, slot: int) -> None:
        """The last row takes its place, so that those in progress stay together."""
        self._check_open()
        row = self._row_of.pop(slot)
        last = len(self._row_of)
        if row != last:
            self._caches.copy({row: last}, self._lengths)
            self._lengths[row] = self._lengths[last]
            moved = next(other for other, place in self._row_of.items() if place == last)
            self._row_of[moved] = row

    def _check_open(self) -> None:
        if self._session is None:
            raise StageError("the session is closed")

    def _check_room(self, slot: int, tokens: int) -> None:
        if not 0 <= slot < self.slots:
            raise StageError(f"there is no slot {slot}: there are {self.slots}")
        if slot in self._row_of:
            raise StageError(f"slot {slot} is not empty")
        if not 0 < tokens <= self._context:
            raise StageError(f"a prompt of {tokens} tokens does not fit into a context of {self._context}")

    def _make_room(self, tokens: int) -> None:
        if tokens > self._caches.capacity:
            self._steps.clear()
            self._caches.grow(tokens, self._lengths[: len(self._row_of)])

    def _side_by_side(self, rows: list[int]) -> list[int]:
        """Where these rows are once they are neighbours: exchanged with others where they are not."""
        wanted = set(rows)
        if max(wanted) - min(wanted) + 1 == len(wanted):
            return rows
        # The first rows: those of them that are not wanted change places with the wanted ones behind.
        free = [row for row in range(len(wanted)) if row not in wanted]
        behind = sorted(row for row in wanted if row >= len(wanted))
        moves = dict(zip(free, behind, strict=True))
        moves |= {there: here for here, there in moves.items()}
        self._caches.copy(moves, self._lengths)
        self._lengths[list(moves)] = self._lengths[list(moves.values())]
        self._row_of = {slot: moves.get(row, row) for slot, row in self._row_of.items()}
        return [moves.get(row, row) for row in rows]

    def _step(self, first: int, count: int) -> _Step:
        if (first, count) not in self._steps:
            if len(self._steps) == _MOST_BINDINGS:
                self._steps.clear()
            self._steps[first, count] = _Step(self._session, self._caches, first, count, 1, self._vocabulary)
        return self._steps[first, count]


@dataclass(frozen=True, slots=True)
class _Place:
    """Rows of one buffer, as a pointer."""

    name: str
    shape: tuple[int, ...]
    address: int


class _Caches:
    """Keys and values: for each layer a buffer (rows, heads, capacity, width)."""

    def __init__(self, sizes: dict[str, tuple[int, int]], rows: int, context: int) -> None:
        self._sizes, self._rows, self._context = sizes, rows, context
        self.capacity = 0
        self._buffers: dict[str, FloatArray] = {}

    def drop(self) -> None:
        self._buffers.clear()

    def grow(self, tokens: int, lengths: IntArray) -> None:
        """Room for so many tokens in each row, what is there kept."""
        capacity = max(self.capacity, _CAPACITY)
        while capacity < tokens:
            capacity *= 2
        self.capacity = min(capacity, self._context)
        for name, (heads, width) in self._sizes.items():
            # Not zeroed: the system gives memory for what is written alone, so room that nobody uses costs none.
            larger = np.empty((self._rows, heads, self.capacity, width), np.float32)
            if name in self._buffers:
                for row, length in enumerate(lengths):
                    larger[row, :, :length] = self._buffers[name][row, :, :length]
            self._buffers[name] = larger

    def copy(self, rows: dict[int, int], lengths: IntArray) -> None:
        """Each row becomes what another was before any was copied."""
        for buffer in self._buffers.values():
            kept = {source: buffer[source, :, : lengths[source]].copy() for source in set(rows.values()) & set(rows)}
            for target, source in rows.items():
                length = lengths[source]
                buffer[target, :, :length] = kept[source] if source in kept else buffer[source, :, :length]

    def places(self, first: int, count: int) -> list[_Place]:
        return [
            _Place(name, (count, *buffer.shape[1:]), buffer[first:].ctypes.data)
            for name, buffer in self._buffers.items()
        ]


class _Step:
    """One run over rows that lie side by side, everything bound where it lies."""

    def __init__(self, session: Any, caches: _Caches, first: int, count: int, tokens: int, vocabulary: int) -> None:
        self._session = session
        self._ids = np.empty((count, tokens), np.int32)
        self._last = np.empty(count, np.int32)
        self._longest = np.empty((), np.int32)
        self._logits = np.empty((count, vocabulary), np.float32)
        self._binding = binding = session.io_binding()
        given = {"input_ids": self._ids, "seqlens_k": self._last, "total_sequence_length": self._longest}
        for name, array in given.items():
            binding.bind_input(name, "cpu", 0, np.int32, array.shape, array.ctypes.data)
        for place in caches.places(first, count):
            binding.bind_input(place.name, "cpu", 0, np.float32, place.shape, place.address)
            present = place.name.replace(_PAST, _PRESENT)
            binding.bind_output(present, "cpu", 0, np.float32, place.shape, place.address)
        binding.bind_output("logits", "cpu", 0, np.float32, self._logits.shape, self._logits.ctypes.data)

    def __call__(self, ids: IntArray, lengths: IntArray) -> FloatArray:
        """Ids that are new in each row, and how many tokens it then holds."""
        self._ids[:] = ids
        self._last[:] = lengths - 1
        self._longest[...] = lengths.max()
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # the binding raises its own unrelated classes
            raise StageError(f"ONNX Runtime failed on {len(ids)} rows: {error}") from error
        return self._logits.copy()
