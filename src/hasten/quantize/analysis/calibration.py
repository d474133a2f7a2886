"""Feed calibration rows to a graph in small batches, so that memory does not grow with their number."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator
from dataclasses import dataclass

import numpy as np

from hasten.core.batching import batch_by_length
from hasten.core.tensors import Batch, IntArray, Signature, pad

# Enough to use all cores, few enough that all activations of a model fit into memory at once.
_BATCH_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Calibration:
    """Token rows to calibrate on, and the signature of the model that reads them."""

    rows: Batch
    signature: Signature

    def feeds(self, inputs: Container[str] | None = None) -> Iterator[dict[str, IntArray]]:
        """Yield padded batches in a fixed order, rows of similar length together; `inputs` selects the tensors."""
        for rows in batch_by_length(self.rows.lengths, budget=_BATCH_TOKENS):
            batch = pad(self.rows.take(rows), self.signature)
            yield {name: values for name, values in batch.items() if inputs is None or name in inputs}

    def first(self, rows: int) -> Calibration:
        """Return the first `rows` rows."""
        return Calibration(self.rows.take(np.arange(min(rows, len(self.rows)))), self.signature)

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the tokens: equal for equal texts, whatever file they came from."""
        content = hashlib.sha256(self.rows.lengths.astype("<i4").tobytes())
        for name in sorted(self.rows.values):
            content.update(name.encode() + self.rows.values[name].astype("<i4").tobytes())
        return content.hexdigest()
