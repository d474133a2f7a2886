"""Pack a batch without padding into one array, whose layout its bucket defines."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from hasten.core.tensors import Batch, IntArray
from hasten.kernels.cuda.packed_buckets import Bucket
from hasten.kernels.encoder_base import PackedBatch
from hasten.kernels.ops.attention import query_tiles

# The most tokens, and the most picked tokens, that run at once. Larger batches are split into parts of PART_TOKENS,
# which was fastest on an H200.
MAX_TOKENS = 16384
PART_TOKENS = 11264
MAX_PICKED = 256


def split_rows(lengths: IntArray, max_tokens: int, picked: IntArray | None = None) -> list[IntArray]:
    """Split rows into parts of at most `max_tokens` tokens, long rows first; `picked` counts picked tokens per row.

    The rows of a part have similar lengths, and short rows fill the remaining space.
    """
    order = np.argsort(-lengths, kind="stable")
    tokens = lengths[order].tolist()
    picks = [0] * len(tokens) if picked is None else picked[order].tolist()
    parts: list[IntArray] = []
    begin, end = 0, len(order)
    while begin < end:
        # The first row is always taken: a single sequence may be longer than the limit.
        free_tokens, free_picks = max_tokens - tokens[begin], MAX_PICKED - picks[begin]
        head = begin + 1
        while head < end and tokens[head] <= free_tokens and picks[head] <= free_picks:
            free_tokens, free_picks, head = free_tokens - tokens[head], free_picks - picks[head], head + 1
        tail = end
        while tail > head and tokens[tail - 1] <= free_tokens and picks[tail - 1] <= free_picks:
            tail -= 1
            free_tokens, free_picks = free_tokens - tokens[tail], free_picks - picks[tail]
        parts.append(np.concatenate((order[begin:head], order[tail:end])))
        begin, end = head, tail
    return parts


def row_positions(batch: Batch, position_offset: int) -> IntArray | None:
    """Return the position of each token, or None where positions simply count up.

    RoBERTa skips padding tokens when it counts: each of them has the padding position, `position_offset` − 1.
    """
    if not position_offset:
        return None
    is_padding = batch.values["input_ids"] == position_offset - 1
    if not is_padding.any():
        return None
    starts = np.repeat(np.cumsum(batch.lengths) - batch.lengths, batch.lengths)
    counts = np.concatenate(([0], np.cumsum(~is_padding)))
    positions: IntArray = np.where(is_padding, 0, counts[1:] - counts[starts]) + position_offset - 1
    return positions


def pack(
    buffer: IntArray,
    batch: Batch,
    bucket: Bucket,
    position_offset: int = 0,
    positions: IntArray | None = None,
    picked: IntArray | None = None,
) -> None:
    """Write a batch into the buffer, which one copy takes to the device and `unpack` splits there.

    Positions count from `position_offset` in each sequence, unless they are given. Stale ids, positions and token types
    of earlier batches may remain past the end, where they are not read. This runs for every batch, so NumPy calls are
    kept few.
    """
    ids, token_positions, token_types, sequence, starts, tiles, picks = (buffer[part] for part in _slices(bucket))
    if len(batch) == 1:
        tokens = int(batch.lengths[0])
        buffer[bucket.tokens :] = _single_sequence(bucket, tokens, position_offset)
    else:
        ends = np.cumsum(batch.lengths, dtype=np.int32)
        tokens, count = int(ends[-1]), len(batch)
        firsts = ends - batch.lengths
        sequence[:tokens] = np.repeat(np.arange(count), batch.lengths)
        sequence[tokens:] = -1
        if positions is None:
            counted = np.arange(position_offset, position_offset + tokens, dtype=np.int32)
            np.subtract(counted, np.repeat(firsts, batch.lengths), out=token_positions[:tokens])
        starts[:count] = firsts
        starts[count:] = tokens
        batch_tiles = query_tiles(batch.lengths, bucket.tile_rows).ravel()
        tiles[: batch_tiles.size] = batch_tiles
        tiles[batch_tiles.size :] = 0
    ids[:tokens] = batch.values["input_ids"]
    token_types[:tokens] = batch.values.get("token_type_ids", 0)
    if positions is not None:
        token_positions[:tokens] = positions
    if picked is not None:
        picks[: len(picked)] = picked
        picks[len(picked) :] = 0


@lru_cache(maxsize=1024)
def _single_sequence(bucket: Bucket, tokens: int, position_offset: int) -> IntArray:
    """Return everything but the ids of a single sequence: batches of one are the ones limited by the host."""
    buffer = np.zeros(sum(bucket.segment_sizes), np.int32)
    _, positions, _, sequence, starts, tiles, _ = (buffer[part] for part in _slices(bucket))
    positions[:tokens] = np.arange(position_offset, position_offset + tokens)
    sequence[tokens:] = -1
    starts[1:] = tokens
    sequence_tiles = query_tiles(np.array([tokens], np.int32), bucket.tile_rows).ravel()
    tiles[: sequence_tiles.size] = sequence_tiles
    return buffer[bucket.tokens :]


@lru_cache(maxsize=1024)
def _slices(bucket: Bucket) -> tuple[slice, ...]:
    ends = [0, *accumulate(bucket.segment_sizes)]
    return tuple(slice(begin, end) for begin, end in pairwise(ends))


def unpack(buffer: Any, bucket: Bucket) -> PackedBatch:
    """Split a packed buffer on the device into its segments."""
    ids, positions, token_types, sequence, starts, tiles, _ = buffer.split(bucket.segment_sizes)
    return PackedBatch(ids, positions, token_types, sequence, starts, tiles.view(-1, 3))


def picked_rows(buffer: Any, bucket: Bucket) -> Any:
    """Return the indices of the picked tokens in a packed buffer."""
    return buffer[-bucket.picked :]
