"""A batch as the device takes it: one array of everything, in a bucket of a size that was seen before."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from hasten.core.tensors import Batch, IntArray
from hasten.kernels.attention import cut_for, tiles
from hasten.kernels.encoder import Packed

# Tokens that run at once, and of those the ones that are picked; more are run in parts, of the size that was fastest on
# an H200.
MOST_TOKENS = 16384
PART_TOKENS = 11264
MOST_PICKED = 256
_SMALLEST = 16


@dataclass(frozen=True, slots=True)
class Bucket:
    """Room for so many tokens, in so many sequences, some of them picked: those whose answers alone are asked for."""

    tokens: int
    sequences: int
    picked: int = 0

    @classmethod
    def of(cls, tokens: int, sequences: int, picked: int | None = None) -> Bucket:
        room = 0 if picked is None else 1 << max(0, picked - 1).bit_length()
        return cls(round_up(max(_SMALLEST, tokens)), 1 << (sequences - 1).bit_length(), room)

    @property
    def sizes(self) -> list[int]:
        """Of the parts of the array: words, places, kinds, sequences of the tokens; starts; tiles; picked tokens."""
        return [self.tokens] * 4 + [self.sequences + 1, 3 * (self.tokens // self.rows + self.sequences), self.picked]

    @property
    def rows(self) -> int:
        """Of a tile of attention."""
        return cut_for(self.tokens, self.sequences).rows


def round_up(tokens: int) -> int:
    """To a sixteenth of the next power of two, at most an eighth more than there are; few, to the power itself."""
    power = 1 << (tokens - 1).bit_length()
    step = power if tokens <= 128 else power // 16
    return -(-tokens // step) * step


def parts(lengths: IntArray, most: int, picked: IntArray | None = None) -> list[IntArray]:
    """Rows with at most so many tokens at a time, long ones first; `picked` counts each one's picked tokens.

    Those of a part are of nearly one length, and short ones fill what room is left.
    """
    order = np.argsort(-lengths, kind="stable")
    tokens = lengths[order].tolist()
    chosen = [0] * len(tokens) if picked is None else picked[order].tolist()
    found: list[IntArray] = []
    begin, end = 0, len(order)
    while begin < end:
        # One is taken in any case: there are sequences of as many tokens.
        room, free = most - tokens[begin], MOST_PICKED - chosen[begin]
        here = begin + 1
        while here < end and tokens[here] <= room and chosen[here] <= free:
            room, free, here = room - tokens[here], free - chosen[here], here + 1
        last = end
        while last > here and tokens[last - 1] <= room and chosen[last - 1] <= free:
            last -= 1
            room, free = room - tokens[last], free - chosen[last]
        found.append(np.concatenate((order[begin:here], order[last:end])))
        begin, end = here, last
    return found


def places_of(batch: Batch, first_place: int) -> IntArray | None:
    """Of each token in its sequence, where they are not simply counted: RoBERTa's padding token has none.

    It counts from behind the padding's place, and gives a padding token that very place.
    """
    if not first_place:
        return None
    is_padding = batch.values["input_ids"] == first_place - 1
    if not is_padding.any():
        return None
    starts = np.repeat(np.cumsum(batch.lengths) - batch.lengths, batch.lengths)
    counts = np.concatenate(([0], np.cumsum(~is_padding)))
    places: IntArray = np.where(is_padding, 0, counts[1:] - counts[starts]) + first_place - 1
    return places


def pack(
    whole: IntArray,
    batch: Batch,
    bucket: Bucket,
    first_place: int = 0,
    places: IntArray | None = None,
    picked: IntArray | None = None,
) -> None:
    """All that a batch is into one array, which one copy takes to the device; `unpack` finds the parts.

    Places are counted from the first one on in each sequence, unless they are given. Of what stood there before, words,
    places and kinds may stay where nobody looks. It is on the way of every batch, so calls of NumPy are counted here.
    """
    ids, where, kinds, sequence, starts, work, chosen = (whole[part] for part in _slices(bucket))
    if len(batch) == 1:
        tokens = int(batch.lengths[0])
        whole[bucket.tokens :] = _lone(bucket, tokens, first_place)
    else:
        ends = np.cumsum(batch.lengths, dtype=np.int32)
        tokens, count = int(ends[-1]), len(batch)
        firsts = ends - batch.lengths
        sequence[:tokens] = np.repeat(np.arange(count), batch.lengths)
        sequence[tokens:] = -1
        if places is None:
            counted = np.arange(first_place, first_place + tokens, dtype=np.int32)
            np.subtract(counted, np.repeat(firsts, batch.lengths), out=where[:tokens])
        starts[:count] = firsts
        starts[count:] = tokens
        found = tiles(batch.lengths, bucket.rows).ravel()
        work[: found.size] = found
        work[found.size :] = 0
    ids[:tokens] = batch.values["input_ids"]
    kinds[:tokens] = batch.values.get("token_type_ids", 0)
    if places is not None:
        where[:tokens] = places
    if picked is not None:
        chosen[: len(picked)] = picked
        chosen[len(picked) :] = 0


@lru_cache(maxsize=1024)
def _lone(bucket: Bucket, tokens: int, first_place: int) -> IntArray:
    """All but the words of one sequence: batches of one are the ones that wait for the host."""
    whole = np.zeros(sum(bucket.sizes), np.int32)
    _, where, _, sequence, starts, work, _ = (whole[part] for part in _slices(bucket))
    where[:tokens] = np.arange(first_place, first_place + tokens)
    sequence[tokens:] = -1
    starts[1:] = tokens
    found = tiles(np.array([tokens], np.int32), bucket.rows).ravel()
    work[: found.size] = found
    return whole[bucket.tokens :]


@lru_cache(maxsize=1024)
def _slices(bucket: Bucket) -> tuple[slice, ...]:
    ends = [0, *accumulate(bucket.sizes)]
    return tuple(slice(begin, end) for begin, end in pairwise(ends))


def unpack(whole: Any, bucket: Bucket) -> Packed:
    ids, places, kinds, sequence, starts, work, _ = whole.split(bucket.sizes)
    return Packed(ids, places, kinds, sequence, starts, work.view(-1, 3))


def picked_of(whole: Any, bucket: Bucket) -> Any:
    return whole[-bucket.picked :]
