"""Packed buffers contain what plain loops compute."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from hasten.core.tensors import Batch
from hasten.kernels import packing
from hasten.kernels.cuda.packed_buckets import Bucket
from hasten.kernels.packing import pack, row_positions, split_rows, unpack

OFFSET = 2


def batch_of(lengths: list[int], random: np.random.Generator) -> Batch:
    tokens = sum(lengths)
    values = {name: random.integers(OFFSET, 9, tokens, dtype=np.int32) for name in ("input_ids", "token_type_ids")}
    return Batch(values, np.array(lengths, np.int32))


@pytest.mark.parametrize("offset", [0, OFFSET])
@pytest.mark.parametrize(
    ("lengths", "rows"), [([1], 16), ([17], 64), ([64], 64), ([129], 64), ([3, 40, 9], 16), ([1, 200, 64, 65, 2], 64)]
)
def test_pack_writes_every_segment(lengths: list[int], rows: int, offset: int) -> None:
    random = np.random.default_rng(0)
    batch = batch_of(lengths, random)
    bucket = Bucket.of(sum(lengths), len(lengths))
    # Stale values of earlier batches must not be visible.
    buffer = random.integers(-5, 5, sum(bucket.segment_sizes), dtype=np.int32)
    pack(buffer, batch, bucket, offset)
    unpacked = unpack(torch.from_numpy(buffer), bucket)
    starts = [sum(lengths[:row]) for row in range(len(lengths) + 1)]
    tokens, unused = starts[-1], bucket.sequences - len(lengths)
    assert unpacked.ids[:tokens].tolist() == batch.values["input_ids"].tolist()
    assert unpacked.token_types[:tokens].tolist() == batch.values["token_type_ids"].tolist()
    assert unpacked.positions[:tokens].tolist() == [offset + index for length in lengths for index in range(length)]
    owners = [row for row, length in enumerate(lengths) for _ in range(length)]
    assert unpacked.sequence.tolist() == owners + [-1] * (bucket.tokens - tokens)
    assert unpacked.starts.tolist() == starts + [tokens] * unused
    tiles = [[first, begin, end] for begin, end in pairwise(starts) for first in range(begin, end, rows)]
    assert unpacked.tiles.tolist() == tiles + [[0, 0, 0]] * (len(unpacked.tiles) - len(tiles))


def test_cached_single_sequence_is_not_modified() -> None:
    """Values cached for the first sequence must not leak into the second."""
    random = np.random.default_rng(0)
    bucket = Bucket.of(30, 1)
    reused = np.zeros(sum(bucket.segment_sizes), np.int32)
    for lengths in ([30], [20], [30]):
        batch, fresh = batch_of(lengths, random), np.zeros_like(reused)
        pack(reused, batch, bucket)
        pack(fresh, batch, bucket)
        (length,) = lengths
        first, second = (unpack(torch.from_numpy(array), bucket) for array in (reused, fresh))
        assert first.ids[:length].tolist() == second.ids[:length].tolist() == batch.values["input_ids"].tolist()
        assert reused[bucket.tokens * 3 :].tolist() == fresh[bucket.tokens * 3 :].tolist()


def test_padding_token_is_not_counted_as_position() -> None:
    padding = OFFSET - 1
    values = {"input_ids": np.array([5, padding, 7, padding, 6, 5], np.int32)}
    batch = Batch(values, np.array([3, 3], np.int32))
    positions = row_positions(batch, OFFSET)
    assert positions is not None
    assert positions.tolist() == [2, padding, 3, padding, 2, 3]
    assert row_positions(batch, 0) is None
    buffer = np.zeros(sum((bucket := Bucket.of(6, 2)).segment_sizes), np.int32)
    pack(buffer, batch, bucket, OFFSET, positions)
    assert unpack(torch.from_numpy(buffer), bucket).positions[:6].tolist() == positions.tolist()


def test_split_rows_fills_parts_with_every_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MAX_PICKED", 9)
    random = np.random.default_rng(0)
    for count in (1, 2, 50, 700):
        lengths = random.integers(1, 65, count, dtype=np.int32)
        picked = random.integers(0, 4, count)
        for picks in (None, picked):
            parts = split_rows(lengths, 1000, picks)
            assert sorted(np.concatenate(parts).tolist()) == list(range(count))
            assert all(lengths[rows].sum() <= 1000 for rows in parts)
            assert picks is None or all(picks[rows].sum() <= 9 for rows in parts)
        # Rows in their original order would leave half a row free in every part, and need one part more of 24.
        assert len(split_rows(lengths, 1000)) == -(-lengths.sum() // 1000)


def test_row_larger_than_a_part_is_alone() -> None:
    assert [rows.tolist() for rows in split_rows(np.array([3, 12, 5], np.int32), 8)] == [[1], [2, 0]]
