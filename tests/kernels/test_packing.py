"""What the host writes for the device, against plain loops."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from hasten.core.tensors import Batch
from hasten.kernels import packing
from hasten.kernels.packing import Bucket, pack, parts, places_of, unpack

FIRST = 2


def batch_of(lengths: list[int], random: np.random.Generator) -> Batch:
    tokens = sum(lengths)
    values = {name: random.integers(FIRST, 9, tokens, dtype=np.int32) for name in ("input_ids", "token_type_ids")}
    return Batch(values, np.array(lengths, np.int32))


@pytest.mark.parametrize("first", [0, FIRST])
@pytest.mark.parametrize(
    ("lengths", "rows"), [([1], 16), ([17], 64), ([64], 64), ([129], 64), ([3, 40, 9], 16), ([1, 200, 64, 65, 2], 64)]
)
def test_every_part(lengths: list[int], rows: int, first: int) -> None:
    random = np.random.default_rng(0)
    batch = batch_of(lengths, random)
    bucket = Bucket.of(sum(lengths), len(lengths))
    # What batches before left there must not be seen.
    whole = random.integers(-5, 5, sum(bucket.sizes), dtype=np.int32)
    pack(whole, batch, bucket, first)
    found = unpack(torch.from_numpy(whole), bucket)
    starts = [sum(lengths[:row]) for row in range(len(lengths) + 1)]
    tokens, room = starts[-1], bucket.sequences - len(lengths)
    assert found.ids[:tokens].tolist() == batch.values["input_ids"].tolist()
    assert found.kinds[:tokens].tolist() == batch.values["token_type_ids"].tolist()
    assert found.places[:tokens].tolist() == [first + place for length in lengths for place in range(length)]
    owners = [row for row, length in enumerate(lengths) for _ in range(length)]
    assert found.sequence.tolist() == owners + [-1] * (bucket.tokens - tokens)
    assert found.starts.tolist() == starts + [tokens] * room
    tiles = [[own, begin, end] for begin, end in pairwise(starts) for own in range(begin, end, rows)]
    assert found.tiles.tolist() == tiles + [[0, 0, 0]] * (len(found.tiles) - len(tiles))


def test_one_sequence_after_another_of_the_same_size() -> None:
    """What is kept of the first must not be in the second's."""
    random = np.random.default_rng(0)
    bucket = Bucket.of(30, 1)
    kept = np.zeros(sum(bucket.sizes), np.int32)
    for lengths in ([30], [20], [30]):
        batch, fresh = batch_of(lengths, random), np.zeros_like(kept)
        pack(kept, batch, bucket)
        pack(fresh, batch, bucket)
        (own,) = lengths
        ours, theirs = (unpack(torch.from_numpy(array), bucket) for array in (kept, fresh))
        assert ours.ids[:own].tolist() == theirs.ids[:own].tolist() == batch.values["input_ids"].tolist()
        assert kept[bucket.tokens * 3 :].tolist() == fresh[bucket.tokens * 3 :].tolist()


def test_a_padding_token_has_no_place_of_its_own() -> None:
    padding = FIRST - 1
    values = {"input_ids": np.array([5, padding, 7, padding, 6, 5], np.int32)}
    batch = Batch(values, np.array([3, 3], np.int32))
    places = places_of(batch, FIRST)
    assert places is not None
    assert places.tolist() == [2, padding, 3, padding, 2, 3]
    assert places_of(batch, 0) is None
    whole = np.zeros(sum((bucket := Bucket.of(6, 2)).sizes), np.int32)
    pack(whole, batch, bucket, FIRST, places)
    assert unpack(torch.from_numpy(whole), bucket).places[:6].tolist() == places.tolist()


def test_parts_hold_every_row_once_and_hardly_leave_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MOST_PICKED", 9)
    random = np.random.default_rng(0)
    for count in (1, 2, 50, 700):
        lengths = random.integers(1, 65, count, dtype=np.int32)
        picked = random.integers(0, 4, count)
        for chosen in (None, picked):
            found = parts(lengths, 1000, chosen)
            assert sorted(np.concatenate(found).tolist()) == list(range(count))
            assert all(lengths[rows].sum() <= 1000 for rows in found)
            assert chosen is None or all(chosen[rows].sum() <= 9 for rows in found)
        # Rows in their order would leave half a row free in every part, and need one more of 24.
        assert len(parts(lengths, 1000)) == -(-lengths.sum() // 1000)


def test_a_row_that_is_larger_than_a_part_goes_alone() -> None:
    assert [rows.tolist() for rows in parts(np.array([3, 12, 5], np.int32), 8)] == [[1], [2, 0]]
