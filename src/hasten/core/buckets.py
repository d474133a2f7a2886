"""Few shapes instead of many: what a GPU records or compiles for one shape serves every batch that fits into it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hasten.core.errors import InputError, StageError
from hasten.core.tensors import ATTENTION_MASK, BATCH, Batch, FloatArray, IntArray, Shape, Signature, real_positions

# Steps up to a power of two, half of which lie below the power before: a batch costs at most half more rows, or an
# eighth more tokens a row, than it has, unless they are few.
_ROW_STEPS = 4
_TOKEN_STEPS = 16
# Shorter ones cost a GPU the same.
_LEAST_TOKENS = 16


def bucket_of(batch: Batch, signature: Signature) -> Shape:
    """The smallest shape of the few that holds the batch."""
    check_lengths(batch, signature)
    longest = int(batch.lengths.max(initial=1))
    # Where padding would be seen, rows of one length come together, and the shape is theirs.
    width = _rounded(longest, _TOKEN_STEPS, _LEAST_TOKENS) if signature.ignores_padding else longest
    return Shape(_rounded(len(batch), _ROW_STEPS, 1), min(width, signature.max_length))


def check_lengths(batch: Batch, signature: Signature) -> None:
    """On a GPU a place that a table does not have goes unnoticed, or takes the whole process with it."""
    longest = int(batch.lengths.max(initial=0))
    if longest > signature.max_length:
        raise StageError(f"a row has {longest} tokens, and the model takes {signature.max_length}")


def check_ids(name: str, ids: IntArray, size: int) -> None:
    """Nor is an id noticed that a table of so many rows does not have."""
    least, most = ids.min(initial=0), ids.max(initial=0)
    if least < 0 or most >= size:
        raise InputError(f"the {name} {least if least < 0 else most} is beyond the model's {size}")


def fill(batch: Batch, signature: Signature, room: Shape) -> dict[str, IntArray]:
    """Rectangles of the bucket's shape, one per input; rows that the batch does not have are of one padding token."""
    count = len(batch)
    lengths = np.ones(room.batch, np.int32)
    lengths[:count] = batch.lengths
    mask = real_positions(lengths, room.sequence, signature.pads_left)
    feeds: dict[str, IntArray] = {}
    for spec in signature.inputs:
        dtype = np.dtype(spec.dtype.value)
        if spec.name == ATTENTION_MASK:
            feeds[spec.name] = mask.astype(dtype)
        else:
            feeds[spec.name] = np.full((room.batch, room.sequence), spec.pad, dtype)
            feeds[spec.name][:count][mask[:count]] = batch.values[spec.name]
    return feeds


def take_out(
    outputs: Mapping[str, FloatArray], batch: Batch, signature: Signature, room: Shape
) -> dict[str, FloatArray]:
    """Of what a bucket gives, what belongs to the batch, without padding."""
    count = len(batch)
    mask = real_positions(batch.lengths, room.sequence, signature.pads_left)
    found: dict[str, FloatArray] = {}
    for spec in signature.outputs:
        own = outputs[spec.name]
        if BATCH in spec.shape:
            own = own[:count]
        # Mask tokens are those of the batch alone: there are none in what fills the bucket.
        found[spec.name] = own[mask] if spec.is_per_token else own
    return found


def _rounded(size: int, steps: int, least: int) -> int:
    """Up to the next of so many steps below the next power of two."""
    power = 1 << max(0, size - 1).bit_length()
    step = max(least, power // steps)
    return -(-size // step) * step
