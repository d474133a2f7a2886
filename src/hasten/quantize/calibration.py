"""Rows of tokens to calibrate on, fed to a graph a few at a time: memory does not grow with their number."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hasten.core.batching import by_length
from hasten.core.tensors import Batch, IntArray, Signature, pad

# Enough to use the cores, few enough that all of a model's activations fit into memory at once.
_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Calibration:
    rows: Batch
    signature: Signature

    def feeds(self) -> Iterator[dict[str, IntArray]]:
        """Rectangles, in a fixed order, rows of similar length together."""
        for rows in by_length(self.rows.lengths, budget=_TOKENS):
            yield pad(self.rows.take(rows), self.signature)

    def first(self, rows: int) -> Calibration:
        return Calibration(self.rows.take(np.arange(min(rows, len(self.rows)))), self.signature)

    @property
    def digest(self) -> str:
        """SHA-256 of the tokens: the same for the same texts, whatever file they came in."""
        content = hashlib.sha256(self.rows.lengths.astype("<i4").tobytes())
        for name in sorted(self.rows.values):
            content.update(name.encode() + self.rows.values[name].astype("<i4").tobytes())
        return content.hexdigest()
