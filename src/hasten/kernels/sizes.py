"""The sizes that batches have when texts are served: what is made ready before anyone asks."""

from __future__ import annotations

import numpy as np

from hasten.core.tensors import Batch, Signature, tiled
from hasten.kernels.packing import Bucket, round_up

# Batches of many rows that are shorter on the average hardly come.
_SHORT = 8


def samples(tokens: int, rows: int, signature: Signature) -> list[Batch]:
    """A batch for each size there is up to so many tokens and rows: few rows first, since those come most often."""
    values = {spec.name: np.array([spec.name == "input_ids"], np.int32) for spec in signature.inputs}
    row = Batch(values, np.ones(1, np.int32))
    found: list[Batch] = []
    count = 1
    while count <= rows:
        most = min(tokens, count * signature.max_length)
        size = Bucket.of(_SHORT * (count // 2 + 1), 1).tokens
        while size <= round_up(most):
            whole = min(size, most)
            lengths = np.full(count, whole // count) + (np.arange(count) < whole % count)
            found.append(tiled(row, lengths, signature.mask_id))
            size = round_up(size + 1)
        count *= 2
    return found
