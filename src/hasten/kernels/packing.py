"""A batch as the device takes it: one array of everything, in a bucket of a size that was seen before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hasten.core.tensors import Batch, IntArray
from hasten.kernels.attention import tiles
from hasten.kernels.encoder import TILE, Packed

if TYPE_CHECKING:
    from collections.abc import Sequence

# Tokens that run at once; more are run one part after the other.
MOST_TOKENS = 16384
_SMALLEST = 16


@dataclass(frozen=True, slots=True)
class Bucket:
    """Room for so many tokens, in so many sequences."""

    tokens: int
    sequences: int

    @classmethod
    def of(cls, lengths: Sequence[int] | IntArray) -> Bucket:
        return cls(round_up(max(_SMALLEST, int(sum(lengths)))), 1 << (len(lengths) - 1).bit_length())

    @property
    def sizes(self) -> list[int]:
        """Of the parts of the array: words, places, kinds and sequences of the tokens, starts, and tiles."""
        return [self.tokens] * 4 + [self.sequences + 1, 3 * (self.tokens // TILE + self.sequences)]


def round_up(tokens: int) -> int:
    """To a sixteenth of the next power of two, at most an eighth more than there are; few, to the power itself."""
    power = 1 << (tokens - 1).bit_length()
    step = power if tokens <= 128 else power // 16
    return -(-tokens // step) * step


def parts(lengths: IntArray) -> list[IntArray]:
    """Rows in their order, as many at a time as may run at once."""
    found: list[list[int]] = [[]]
    tokens = 0
    for row, length in enumerate(lengths.tolist()):
        if found[-1] and tokens + length > MOST_TOKENS:
            found.append([])
            tokens = 0
        found[-1].append(row)
        tokens += length
    return [np.array(rows) for rows in found]


def pack(batch: Batch, bucket: Bucket, first_place: int) -> IntArray:
    """All that a batch is, in one array, so that one copy takes it to the device; `unpack` finds the parts."""
    lengths, tokens, room = batch.lengths, batch.tokens, bucket.tokens
    ends = np.cumsum(lengths)
    whole = np.zeros(sum(bucket.sizes), np.int32)
    ids, places, kinds, sequence, starts, work = np.split(whole, np.cumsum(bucket.sizes)[:-1])
    ids[:tokens] = batch.values["input_ids"]
    places[:tokens] = np.arange(tokens) - np.repeat(ends - lengths, lengths) + first_place
    if "token_type_ids" in batch.values:
        kinds[:tokens] = batch.values["token_type_ids"]
    sequence[:tokens] = np.repeat(np.arange(len(batch)), lengths)
    sequence[tokens:room] = -1
    starts[1 : len(batch) + 1] = ends
    starts[len(batch) + 1 :] = tokens
    found = tiles(lengths, TILE)
    work[: found.size] = found.ravel()
    return whole


def unpack(whole: Any, bucket: Bucket) -> Packed:
    ids, places, kinds, sequence, starts, work = whole.split(bucket.sizes)
    return Packed(ids, places, kinds, sequence, starts, work.view(-1, 3))
