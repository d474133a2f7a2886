"""Batches that warm up every bucket a server is likely to use."""

from __future__ import annotations

import numpy as np

from hasten.core.tensors import Batch, Signature, tile_rows
from hasten.kernels.cuda.packed_buckets import Bucket, round_up

# Batches of many rows with a shorter mean length are rare.
_MIN_MEAN_LENGTH = 8


def samples(tokens: int, rows: int, signature: Signature) -> list[Batch]:
    """Return one batch per bucket up to this many tokens and rows, small row counts first: they are most frequent."""
    values = {spec.name: np.array([spec.name == "input_ids"], np.int32) for spec in signature.inputs}
    row = Batch(values, np.ones(1, np.int32))
    batches: list[Batch] = []
    count = 1
    while count <= rows:
        max_tokens = min(tokens, count * signature.max_length)
        size = Bucket.of(_MIN_MEAN_LENGTH * (count // 2 + 1), 1).tokens
        while size <= round_up(max_tokens):
            total = min(size, max_tokens)
            lengths = np.full(count, total // count) + (np.arange(count) < total % count)
            batches.append(tile_rows(row, lengths, signature.mask_id))
            size = round_up(size + 1)
        count *= 2
    return batches
