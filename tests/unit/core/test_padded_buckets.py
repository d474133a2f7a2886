"""Bucket selection, padding and unpadding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.core.errors import StageError
from hasten.core.gpu.padded_buckets import bucket_of
from hasten.core.tensors import BATCH, MASKS, SEQUENCE, Batch, DType, Shape, Signature, TensorSpec, pad, unpad

SIGNATURE = Signature(
    inputs=(
        TensorSpec("input_ids", DType.INT64, (BATCH, SEQUENCE), pad=7),
        TensorSpec("attention_mask", DType.INT32, (BATCH, SEQUENCE)),
    ),
    outputs=(
        TensorSpec("tokens", DType.FLOAT32, (BATCH, SEQUENCE, 2)),
        TensorSpec("rows", DType.FLOAT32, (BATCH, 2)),
        TensorSpec("masks", DType.FLOAT32, (MASKS, 2)),
    ),
    max_length=500,
)


def batch_of(lengths: list[int]) -> Batch:
    return Batch({"input_ids": np.arange(100, 100 + sum(lengths), dtype=np.int32)}, np.array(lengths, np.int32))


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([1], Shape(1, 16)),
        ([16], Shape(1, 16)),
        ([17, 3], Shape(2, 32)),
        ([128] * 8, Shape(8, 128)),
        ([129] * 5, Shape(6, 144)),
        ([257], Shape(1, 288)),
        ([384] * 16, Shape(16, 384)),
        ([256] * 17, Shape(24, 256)),
        ([499], Shape(1, 500)),
    ],
)
def test_smallest_fitting_bucket_is_chosen(lengths: list[int], expected: Shape) -> None:
    assert bucket_of(batch_of(lengths), SIGNATURE) == expected


@given(st.lists(st.integers(1, 500), min_size=1, max_size=70))
def test_bucket_holds_every_batch_with_bounded_padding(lengths: list[int]) -> None:
    bucket = bucket_of(batch_of(lengths), SIGNATURE)
    assert len(lengths) <= bucket.batch < 1.5 * len(lengths) + 1
    assert max(lengths) <= bucket.sequence <= min(500, max(lengths) + max(15, max(lengths) / 8))


def test_bucket_count_is_bounded() -> None:
    buckets = {bucket_of(batch_of([length] * rows), SIGNATURE) for length in range(1, 501) for rows in (1, 7, 32, 64)}
    assert len({bucket.sequence for bucket in buckets}) == 24
    rows = {bucket_of(batch_of([1] * count), SIGNATURE).batch for count in range(1, 65)}
    assert sorted(rows) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]


def test_length_is_not_rounded_when_padding_is_visible() -> None:
    assert bucket_of(batch_of([19, 19]), replace(SIGNATURE, ignores_padding=False)) == Shape(2, 19)


def test_too_long_row_is_rejected() -> None:
    with pytest.raises(StageError, match="a row has 501 tokens, and the model takes 500"):
        bucket_of(batch_of([3, 501]), SIGNATURE)


@pytest.mark.parametrize("pads_left", [False, True])
def test_padding_and_unpadding_round_trip(pads_left: bool) -> None:
    signature = replace(SIGNATURE, pads_left=pads_left)
    batch, bucket = batch_of([3, 20, 1]), Shape(4, 32)
    feeds = pad(batch, signature, bucket)
    ids, mask = feeds["input_ids"], feeds["attention_mask"]
    assert (ids.shape, ids.dtype) == ((4, 32), np.int64)
    assert mask.dtype == np.int32
    # Every row has a token: attention over none would give NaN.
    assert mask.sum(axis=1).tolist() == [3, 20, 1, 1]
    assert mask[0, -1 if pads_left else 0] == 1
    assert (ids[mask == 0] == 7).all()
    assert (ids[3] == 7).all()
    outputs = {
        "tokens": np.stack([ids, ids], axis=-1).astype(np.float32),
        "rows": np.arange(8, dtype=np.float32).reshape(4, 2),
        "masks": np.ones((5, 2), np.float32),
    }
    unpadded = unpad(outputs, batch, signature, bucket)
    assert unpadded["tokens"][:, 1].tolist() == batch.values["input_ids"].tolist()
    assert unpadded["rows"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert len(unpadded["masks"]) == 5


def test_bucket_of_single_tokens_has_rows_of_padding() -> None:
    feeds = pad(batch_of([1] * 5), SIGNATURE, Shape(6, 1))
    assert feeds["input_ids"].ravel().tolist() == [100, 101, 102, 103, 104, 7]
    assert feeds["attention_mask"].shape == (6, 1)
