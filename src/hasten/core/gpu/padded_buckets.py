"""Bucket shapes for GPU backends: a CUDA graph or kernel for one shape serves every batch that fits into it."""

from __future__ import annotations

from hasten.core.errors import InputError, StageError
from hasten.core.tensors import Batch, IntArray, Shape, Signature

# Sizes are multiples of a fraction of the next power of two. Padding adds at most half to the rows and an eighth to the
# tokens per row, except for small sizes.
_ROW_STEPS = 4
_TOKEN_STEPS = 16
# Shorter rows take a GPU as long.
_MIN_TOKENS = 16


def bucket_of(batch: Batch, signature: Signature) -> Shape:
    """Return the smallest bucket that holds the batch."""
    check_lengths(batch, signature)
    longest = int(batch.lengths.max(initial=1))
    # Where padding would change the results, batches have rows of one length, which is not rounded.
    width = _round_up(longest, _TOKEN_STEPS, _MIN_TOKENS) if signature.ignores_padding else longest
    return Shape(_round_up(len(batch), _ROW_STEPS, 1), min(width, signature.max_length))


def check_lengths(batch: Batch, signature: Signature) -> None:
    """Raise StageError if a row is too long: on a GPU, reading past a table goes unnoticed or kills the process."""
    longest = int(batch.lengths.max(initial=0))
    if longest > signature.max_length:
        raise StageError(f"a row has {longest} tokens, and the model takes {signature.max_length}")


def check_ids(name: str, ids: IntArray, size: int) -> None:
    """Raise InputError if an id is not in a table of this size, for the same reason."""
    smallest, largest = ids.min(initial=0), ids.max(initial=0)
    if smallest < 0 or largest >= size:
        invalid = smallest if smallest < 0 else largest
        raise InputError(f"the {name} {invalid} is out of range: the maximum is {size - 1}")


def _round_up(size: int, steps: int, min_step: int) -> int:
    """Round up to a multiple of the next power of two divided by `steps`."""
    power = 1 << max(0, size - 1).bit_length()
    step = max(min_step, power // steps)
    return -(-size // step) * step
