"""A model that writes, in ONNX Runtime: keys and values of all rows lie in buffers that graphs read and write in place.

Rows in progress are the first ones of each buffer, so that all of them, or any that lie side by side, step in one run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hasten.backends import DECODER, ENCODER, Artifact, RunOptions
from hasten.backends.onnxruntime.caches import CROSS, PAST, PRESENT, Caches, Place
from hasten.backends.onnxruntime.session import CPU_PROVIDER, settings
from hasten.core.closing import Closing
from hasten.core.errors import StageError
from hasten.core.tensors import FloatArray, IntArray

# What a decoder behind an encoder says in its graph: the tokens that an answer begins with.
START_IDS = "hasten.start_ids"
# Bindings that are kept: one for each place and number of rows that stepped together.
_MOST_BINDINGS = 64


class DecoderSession(Closing):
    """Fulfils `Decoder`. A slot is somebody's name for a row; rows move, slots stay."""

    def __init__(self, artifact: Artifact, options: RunOptions, slots: int, profile: str | None = None) -> None:
        self.slots = slots
        self._session = self._load(artifact, DECODER, options, profile)
        self._encoder = self._load(artifact, ENCODER, options, profile) if ENCODER in artifact.graphs else None
        self._context = artifact.signature.max_length
        inputs = self._session.get_inputs()
        self._past = self._new_caches(PAST, inputs, slots, self._context)
        self._cross = self._new_caches(CROSS, inputs, slots, None)
        said = self._session.get_modelmeta().custom_metadata_map.get(START_IDS, "")
        self._starts = np.array(said.split(",") if said else [], np.int32)
        self._vocabulary = next(entry.shape[1] for entry in self._session.get_outputs() if entry.name == "logits")
        self._row_of: dict[int, int] = {}
        self._steps: dict[tuple[int, int], Step] = {}

    @property
    def runtimes(self) -> list[Any]:
        """A session for each graph."""
        return [session for session in (self._encoder, self._session) if session is not None]

    def close(self) -> None:
        self._steps.clear()
        self._past.drop()
        self._cross.drop()
        self._session = self._encoder = None

    def begin(self, slot: int, ids: IntArray) -> FloatArray:
        self._check_empty(slot)
        row = len(self._row_of)
        if self._encoder is not None:
            self._encode(row, ids)
            ids = self._starts
        if not 0 < len(ids) <= self._context:
            raise StageError(f"a prompt of {len(ids)} tokens does not fit into a context of {self._context}")
        self._make_room(self._past, len(ids))
        self._past.lengths[row] = len(ids)
        logits: FloatArray = self._new_step(row, 1, len(ids))(np.asarray(ids, np.int32)[None])[0]
        self._row_of[slot] = row
        return logits

    def step(self, slots: Sequence[int], ids: IntArray) -> FloatArray:
        rows = self._side_by_side([self._row(slot) for slot in slots])
        first, count = min(rows), len(rows)
        lengths = self._past.lengths[first : first + count]
        longest = int(lengths.max()) + 1
        if longest > self._context:
            raise StageError(f"a row has no room left: the context is {self._context} tokens")
        self._make_room(self._past, longest)
        order = np.asarray(rows) - first
        given = np.empty((count, 1), np.int32)
        given[order, 0] = ids
        lengths += 1
        try:
            logits: FloatArray = self._step(first, count)(given)[order]
        except StageError:
            lengths -= 1
            raise
        return logits

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        wanted = {target: self._row(source) for source, target in zip(sources, targets, strict=True)}
        for target in wanted:
            if target not in self._row_of:
                self._check_empty(target)
                self._row_of[target] = len(self._row_of)
        self._move({self._row_of[target]: row for target, row in wanted.items()})

    def end(self, slot: int) -> None:
        """The last row takes its place, so that those in progress stay together."""
        row = self._row(slot)
        del self._row_of[slot]
        last = len(self._row_of)
        if row != last:
            self._move({row: last})
            moved = next(other for other, place in self._row_of.items() if place == last)
            self._row_of[moved] = row

    def _encode(self, row: int, ids: IntArray) -> None:
        """What the encoder made of a prompt, beside the row that will be written."""
        assert self._encoder is not None
        names = [entry.name for entry in self._encoder.get_outputs()]
        try:
            found = self._encoder.run(names, {"input_ids": np.asarray(ids, np.int32)[None]})
        except Exception as error:  # the binding raises its own unrelated classes
            raise StageError(f"ONNX Runtime failed on a prompt of {len(ids)} tokens: {error}") from error
        self._make_room(self._cross, len(ids))
        self._cross.put(row, dict(zip(names, found, strict=True)), len(ids))

    def _row(self, slot: int) -> int:
        if self._session is None:
            raise StageError("the session is closed")
        if slot not in self._row_of:
            raise StageError(f"slot {slot} is empty")
        return self._row_of[slot]

    def _check_empty(self, slot: int) -> None:
        if self._session is None:
            raise StageError("the session is closed")
        if not 0 <= slot < self.slots:
            raise StageError(f"there is no slot {slot}: there are {self.slots}")
        if slot in self._row_of:
            raise StageError(f"slot {slot} is not empty")

    def _make_room(self, caches: Caches, tokens: int) -> None:
        if tokens > caches.capacity:
            self._steps.clear()
            caches.grow(tokens, len(self._row_of))

    def _move(self, rows: Mapping[int, int]) -> None:
        for caches in (self._past, self._cross):
            caches.copy(rows)

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
        self._move(moves)
        self._row_of = {slot: moves.get(row, row) for slot, row in self._row_of.items()}
        return [moves.get(row, row) for row in rows]

    def _step(self, first: int, count: int) -> Step:
        if (first, count) not in self._steps:
            if len(self._steps) == _MOST_BINDINGS:
                self._steps.clear()
            self._steps[first, count] = self._new_step(first, count, 1)
        return self._steps[first, count]

    def _load(self, artifact: Artifact, graph: str, options: RunOptions, profile: str | None) -> Any:
        try:
            # Profiles in folders of their own: ONNX Runtime calls them by the second they begin in.
            return self._open(artifact.path(graph), options, profile and subfolder(profile, graph))
        except StageError:
            raise
        except Exception as error:  # the binding raises its own unrelated classes
            raise StageError(f"ONNX Runtime cannot load {artifact.variant}: {error}") from error

    # What depends on where the rows lie.

    def _open(self, graph: Path, options: RunOptions, profile: str | None) -> Any:
        import onnxruntime

        return onnxruntime.InferenceSession(
            str(graph), settings(options.thread_count, profile), providers=[CPU_PROVIDER]
        )

    def _new_caches(self, prefix: str, inputs: Sequence[Any], rows: int, limit: int | None) -> Caches:
        return Caches(prefix, inputs, rows, limit)

    def _new_step(self, first: int, count: int, tokens: int) -> Step:
        return _CpuStep(self._session, (self._past, self._cross), first, count, tokens, self._vocabulary)


def subfolder(folder: str, name: str) -> str:
    made = Path(folder) / name
    made.mkdir()
    return str(made)


class Step(Protocol):
    """One run over rows that lie side by side, everything bound where it lies."""

    def __call__(self, ids: IntArray) -> FloatArray:
        """Of ids that are new in each row, its length with them already told: the logits after the last."""
        ...


class _CpuStep:
    """Fulfils `Step`."""

    def __init__(
        self, session: Any, caches: tuple[Caches, Caches], first: int, count: int, tokens: int, vocabulary: int
    ) -> None:
        self._session = session
        past, cross = caches
        self._lengths = past.lengths[first : first + count]
        self._ids = np.empty((count, tokens), np.int32)
        self._last = np.empty(count, np.int32)
        self._longest = np.empty((), np.int32)
        self._logits = np.empty((count, vocabulary), np.float32)
        self._binding = binding = session.io_binding()
        given: dict[str, IntArray] = {
            "input_ids": self._ids,
            "seqlens_k": self._last,
            "total_sequence_length": self._longest,
        }
        if cross.is_used:
            given["cross_lengths"] = cross.lengths[first : first + count]
        for name, array in given.items():
            binding.bind_input(name, "cpu", 0, np.int32, array.shape, array.ctypes.data)
        for place in (*past.places(first, count), *cross.places(first, count)):
            bind_place(binding, place, "cpu")
        binding.bind_output("logits", "cpu", 0, np.float32, self._logits.shape, self._logits.ctypes.data)

    def __call__(self, ids: IntArray) -> FloatArray:
        self._ids[:] = ids
        self._last[:] = self._lengths - 1
        self._longest[...] = self._lengths.max()
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # the binding raises its own unrelated classes
            raise StageError(f"ONNX Runtime failed on {len(ids)} rows: {error}") from error
        return self._logits.copy()


def bind_place(binding: Any, place: Place, device: str) -> None:
    """What came before and what comes of it are one buffer."""
    about = (device, 0, place.kind, place.shape, place.address)
    binding.bind_input(place.name, *about)
    if place.name.startswith(PAST):
        binding.bind_output(place.name.replace(PAST, PRESENT), *about)
