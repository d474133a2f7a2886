"""A batch as the device takes it: one array of everything, in a bucket of a size that was seen before."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from hasten.core.tensors import Batch, IntArray
from hasten.kernels.attention import tiles
from hasten.kernels.encoder import TILE, Packed

if TYPE_CHECKING:
    from collections.abc import Sequence

# Tokens that run at once, and of those the ones that are picked; more are run one part after the other.
MOST_TOKENS = 16384
MOST_PICKED = 256
_SMALLEST = 16


@dataclass(frozen=True, slots=True)
class Bucket:
    """Room for so many tokens, in so many sequences, some of them picked: those whose answers alone are asked for."""

    tokens: int
    sequences: int
    picked: int = 0

    @classmethod
    def of(cls, lengths: Sequence[int] | IntArray, picked: int | None = None) -> Bucket:
        sequences = 1 << (len(lengths) - 1).bit_length()
        room = 0 if picked is None else 1 << max(0, picked - 1).bit_length()
        return cls(round_up(max(_SMALLEST, int(np.sum(lengths)))), sequences, room)

    @property
    def sizes(self) -> list[int]:
        """Of the parts of the array: words, places, kinds, sequences of the tokens; starts; tiles; picked tokens."""
        return [self.tokens] * 4 + [self.sequences + 1, 3 * (self.tokens // TILE + self.sequences), self.picked]


def round_up(tokens: int) -> int:
    """To a sixteenth of the next power of two, at most an eighth more than there are; few, to the power itself."""
    power = 1 << (tokens - 1).bit_length()
    step = power if tokens <= 128 else power // 16
    return -(-tokens // step) * step


def parts(lengths: IntArray, picked: IntArray | None = None) -> list[IntArray]:
    """Rows in their order, as many at a time as may run at once; `picked` counts each one's picked tokens."""
    found: list[list[int]] = [[]]
    tokens = chosen = 0
    counts = [0] * len(lengths) if picked is None else picked.tolist()
    for row, (length, count) in enumerate(zip(lengths.tolist(), counts, strict=True)):
        if found[-1] and (tokens + length > MOST_TOKENS or chosen + count > MOST_PICKED):
            found.append([])
            tokens = chosen = 0
        found[-1].append(row)
        tokens += length
        chosen += count
    return [np.array(rows) for rows in found]


def places_of(batch: Batch, first_place: int) -> IntArray:
    """Of each token in its sequence. RoBERTa, which counts from behind its padding, gives a padding token none."""
    places = np.arange(first_place, first_place + batch.tokens)
    is_padding = batch.values["input_ids"] == first_place - 1
    has_padding = bool(first_place) and bool(is_padding.any())
    if len(batch) == 1 and not has_padding:
        return places
    starts = np.repeat(np.cumsum(batch.lengths) - batch.lengths, batch.lengths)
    if not has_padding:
        return places - starts
    counts = np.concatenate(([0], np.cumsum(~is_padding)))
    return np.where(is_padding, 0, counts[1:] - counts[starts]) + first_place - 1


def pack(whole: IntArray, batch: Batch, bucket: Bucket, places: IntArray, picked: IntArray | None = None) -> None:
    """All that a batch is into one array, which one copy takes to the device; `unpack` finds the parts.

    Of what stood there before, words, places and kinds may stay where nobody looks.
    """
    lengths, tokens, count = batch.lengths, batch.tokens, len(batch)
    ids, where, kinds, sequence, starts, work, chosen = (whole[part] for part in _slices(bucket))
    ids[:tokens] = batch.values["input_ids"]
    where[:tokens] = places
    kinds[:tokens] = batch.values.get("token_type_ids", 0)
    sequence[:tokens] = np.repeat(np.arange(count), lengths) if count > 1 else 0
    sequence[tokens:] = -1
    starts[0] = 0
    starts[1 : count + 1] = np.cumsum(lengths)
    starts[count + 1 :] = tokens
    found = tiles(lengths, TILE)
    work[: found.size] = found.ravel()
    work[found.size :] = 0
    if picked is not None:
        chosen[: len(picked)] = picked
        chosen[len(picked) :] = 0


@lru_cache(maxsize=1024)
def _slices(bucket: Bucket) -> tuple[slice, ...]:
    ends = [0, *accumulate(bucket.sizes)]
    return tuple(slice(begin, end) for begin, end in pairwise(ends))


def unpack(whole: Any, bucket: Bucket) -> Packed:
    ids, places, kinds, sequence, starts, work, _ = whole.split(bucket.sizes)
    return Packed(ids, places, kinds, sequence, starts, work.view(-1, 3))


def picked_of(whole: Any, bucket: Bucket) -> Any:
    return whole[-bucket.picked :]
