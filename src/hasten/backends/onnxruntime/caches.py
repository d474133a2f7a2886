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


@dataclass(frozen=True, slots=True)
class Place:
    """Rows of one buffer, as a pointer."""

    name: str
    shape: tuple[int, ...]
    address: int


class Caches:
    def __init__(self, prefix: str, inputs: Sequence[Any], rows: int, limit: int | None) -> None:
        """Of a graph's inputs those that are named so."""
        self._sizes = {
            entry.name: (entry.shape[1], entry.shape[3]) for entry in inputs if entry.name.startswith(prefix)
        }
        self._rows, self._limit = rows, limit
        self._buffers: dict[str, FloatArray] = {}
        self.capacity = 0
        # Of each row, the tokens it holds.
        self.lengths = np.zeros(rows, np.int32)

    @property
    def is_used(self) -> bool:
        return bool(self._sizes)

    def drop(self) -> None:
        self._buffers.clear()

    def grow(self, tokens: int, rows: int) -> None:
        """Room for so many tokens in each row, what the first rows hold kept."""
        capacity = max(self.capacity, _CAPACITY)
        while capacity < tokens:
            capacity *= 2
        self.capacity = capacity if self._limit is None else min(capacity, self._limit)
        for name, (heads, width) in self._sizes.items():
            # Zeros, since what a row does not reach is multiplied by nothing, and nothing times no number is none. The
            # system gives memory for what is written alone: room that nobody uses costs none.
            larger = np.zeros((self._rows, heads, self.capacity, width), np.float32)
            if name in self._buffers:
                for row, length in enumerate(self.lengths[:rows]):
                    larger[row, :, :length] = self._buffers[name][row, :, :length]
            self._buffers[name] = larger

    def put(self, row: int, values: Mapping[str, FloatArray], length: int) -> None:
        for name, value in values.items():
            self._buffers[name][row, :, :length] = value[0]
        self.lengths[row] = length

    def copy(self, rows: Mapping[int, int]) -> None:
        """Each row becomes what another was before any was copied."""
        lengths = self.lengths.copy()
        twice = set(rows.values()) & set(rows)
        for buffer in self._buffers.values():
            kept = {source: buffer[source, :, : lengths[source]].copy() for source in twice}
            for target, source in rows.items():
                if target != source:
                    length = lengths[source]
                    buffer[target, :, :length] = kept[source] if source in kept else buffer[source, :, :length]
        for target, source in rows.items():
            self.lengths[target] = lengths[source]

    def places(self, first: int, count: int) -> list[Place]:
        return [
            Place(name, (count, *buffer.shape[1:]), buffer[first:].ctypes.data)
            for name, buffer in self._buffers.items()
        ]
