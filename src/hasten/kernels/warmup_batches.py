"""Batches that warm up every bucket a server is likely to use."""

from __future__ import annotations

import numpy as np

from hasten.core.tensors import Batch, Signature, tile_rows
from hasten.kernels.cuda.packed_buckets import Bucket, round_up

# Batches of many rows with a shorter mean length are rare.
_MIN_MEAN_LENGTH = 8
# From one covering bucket to the next.
_COVERING_STEP = 4


def samples(tokens: int, rows: int, signature: Signature) -> list[Batch]:
    """Return one batch per bucket up to this many tokens and rows, small row counts first: they are most frequent."""
    batches: list[Batch] = []
    count = 1
    while count <= rows:
        max_tokens = min(tokens, count * signature.max_length)
        size = _min_tokens(count)
        while size <= round_up(max_tokens):
            batches.append(_batch(count, min(size, max_tokens), signature))
            size = round_up(size + 1)
        count *= 2
    return batches


def covering_samples(tokens: int, rows: int, signature: Signature) -> list[Batch]:
    """Return batches of few buckets that hold those of all `samples`, in at most about four times the size."""
    batches: list[Batch] = []
    for count in _powers(1, rows):
        max_tokens = min(tokens, count * signature.max_length)
        batches += [_batch(count, size, signature) for size in _powers(_min_tokens(count), max_tokens)]
    return batches


def _powers(start: int, end: int) -> list[int]:
    """Return the start, its multiples by powers of four, and the end."""
    sizes = []
    while start < end:
        sizes.append(start)
        start *= _COVERING_STEP
    return [*sizes, end]


def _min_tokens(count: int) -> int:
    return Bucket.of(_MIN_MEAN_LENGTH * (count // 2 + 1), 1).tokens


def _batch(count: int, tokens: int, signature: Signature) -> Batch:
    values = {spec.name: np.array([spec.name == "input_ids"], np.int32) for spec in signature.inputs}
    row = Batch(values, np.ones(1, np.int32))
    lengths = np.full(count, tokens // count) + (np.arange(count) < tokens % count)
    return tile_rows(row, lengths, signature.mask_id)
