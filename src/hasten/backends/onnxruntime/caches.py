"""Keys and values of rows in progress: for each layer a buffer (rows, heads, capacity, width), grown on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hasten.core.tensors import FloatArray

# How graphs call them: what was read and written so far, what comes of it, and what an encoder made of a prompt.
PAST, PRESENT, CROSS = "past.", "present.", "cross."
# Tokens a row has room for at first; doubled when one needs more.
_CAPACITY = 256
_KINDS: dict[str, type[np.floating[Any]]] = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


@dataclass(frozen=True, slots=True)
class Place:
    """Rows of one buffer, as a pointer."""

    name: str
    kind: type[np.floating[Any]]
    shape: tuple[int, ...]
    address: int


class Caches:
    """In the memory of the processor."""

    def __init__(self, prefix: str, inputs: Sequence[Any], rows: int, limit: int | None) -> None:
        """Of a graph's inputs those that are named so."""
        own = [entry for entry in inputs if entry.name.startswith(prefix)]
        self.sizes = {entry.name: (entry.shape[1], entry.shape[3]) for entry in own}
        self.kinds = {entry.name: _KINDS[entry.type] for entry in own}
        self._rows, self._limit = rows, limit
        self._buffers: dict[str, Any] = {}
        self.capacity = 0
        # Of each row, the tokens it holds.
        self.lengths = np.zeros(rows, np.int32)

    @property
    def is_used(self) -> bool:
        return bool(self.sizes)

    def drop(self) -> None:
        self._buffers.clear()

    def grow(self, tokens: int, rows: int) -> None:
        """Room for so many tokens in each row, what the first rows hold kept."""
        capacity = max(self.capacity, _CAPACITY)
        while capacity < tokens:
            capacity *= 2
        self.capacity = capacity if self._limit is None else min(capacity, self._limit)
        for name in self.sizes:
            self._enlarge(name, rows)

    def put(self, row: int, values: Mapping[str, FloatArray], length: int) -> None:
        for name, value in values.items():
            self._buffers[name][row, :, :length] = value[0]
        self.lengths[row] = length

    def copy(self, rows: Mapping[int, int]) -> None:
        """Each row becomes what another was before any was copied."""
        self._copy(rows)
        lengths = self.lengths.copy()
        for target, source in rows.items():
            self.lengths[target] = lengths[source]

    def places(self, first: int, count: int) -> list[Place]:
        return [
            Place(name, self.kinds[name], (count, *buffer.shape[1:]), buffer[first:].ctypes.data)
            for name, buffer in self._buffers.items()
        ]

    def larger(self, name: str, before: FloatArray | None, rows: int, held: int) -> FloatArray:
        """A new buffer of so many rows, the first of them as they were in the old one.

        Zeros, since what a row does not reach is multiplied by nothing, and nothing times no number is none. The
        system gives memory for what is written alone: room that nobody uses costs none.
        """
        heads, width = self.sizes[name]
        made = np.zeros((rows, heads, self.capacity, width), self.kinds[name])
        if before is not None:
            for row, length in enumerate(self.lengths[:held]):
                made[row, :, :length] = before[row, :, :length]
        return made

    def _enlarge(self, name: str, held: int) -> None:
        self._buffers[name] = self.larger(name, self._buffers.get(name), self._rows, held)

    def _copy(self, rows: Mapping[int, int]) -> None:
        twice = set(rows.values()) & set(rows)
        for buffer in self._buffers.values():
            kept = {source: buffer[source, :, : self.lengths[source]].copy() for source in twice}
            for target, source in rows.items():
                if target != source:
                    length = self.lengths[source]
                    buffer[target, :, :length] = kept[source] if source in kept else buffer[source, :, :length]
