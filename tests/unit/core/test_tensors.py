from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.core.tensors import (
    ATTENTION_MASK,
    BATCH,
    MASKS,
    SEQUENCE,
    Batch,
    DType,
    Shape,
    Signature,
    TensorSpec,
    check_counts,
    divide,
    gather,
    pad,
    real_positions,
    tile_rows,
    unpad,
)

RAGGED = [[5, 6, 7], [8], [9, 10]]
UNIFORM = [[5, 6], [7, 8], [9, 10]]
# Neither pad value is zero and no two dtypes are equal, so that a mix-up shows.
IDS = TensorSpec("input_ids", DType.INT64, (BATCH, SEQUENCE), pad=3)
TYPES = TensorSpec("token_type_ids", DType.INT32, (BATCH, SEQUENCE), pad=1)
MASK = TensorSpec(ATTENTION_MASK, DType.FLOAT16, (BATCH, SEQUENCE))
PER_ROW = TensorSpec("logits", DType.FLOAT32, (BATCH, 2))
PER_TOKEN = TensorSpec("hidden", DType.FLOAT32, (BATCH, SEQUENCE, 2))

PER_MASK = TensorSpec("scores", DType.FLOAT32, (MASKS, 2))
MASK_ID = 4

rows_of_ids = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9), min_size=1, max_size=9)


def signature(*, pads_left: bool = False) -> Signature:
    return Signature((IDS, TYPES, MASK), (PER_ROW, PER_TOKEN), max_length=16, pads_left=pads_left)


def batch_of(rows: list[list[int]]) -> Batch:
    return Batch.from_rows({"input_ids": rows, "token_type_ids": [[value % 2 for value in row] for row in rows]})


def rows_of(batch: Batch, name: str = "input_ids") -> list[list[int]]:
    return [row.tolist() for row in np.split(batch.values[name], np.cumsum(batch.lengths)[:-1])]


def test_shape_has_a_name_and_a_token_count() -> None:
    assert str(Shape(8, 128)) == "8×128"
    assert Shape(8, 128).tokens == 1024


@given(rows_of_ids)
def test_batch_keeps_its_rows(rows: list[list[int]]) -> None:
    batch = batch_of(rows)
    assert len(batch) == len(rows)
    assert batch.tokens == sum(map(len, rows))
    assert rows_of(batch) == rows


def test_batch_may_hold_no_rows() -> None:
    batch = Batch.from_rows({"input_ids": []})
    assert (len(batch), batch.tokens) == (0, 0)


@given(rows_of_ids, st.data())
def test_take_returns_any_rows_in_any_order(rows: list[list[int]], data: st.DataObject) -> None:
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=12))
    taken = batch_of(rows).take(np.asarray(picked))
    assert rows_of(taken) == [rows[index] for index in picked]
    assert rows_of(taken, "token_type_ids") == [[value % 2 for value in rows[index]] for index in picked]


def test_take_of_no_rows_returns_an_empty_batch() -> None:
    taken = batch_of(RAGGED).take(np.zeros(0, np.int64))
    assert (len(taken), taken.tokens) == (0, 0)
    assert set(taken.values) == {"input_ids", "token_type_ids"}


@pytest.mark.parametrize(
    ("rows", "pads_left", "ids", "mask"),
    [
        (RAGGED, False, [[5, 6, 7], [8, 3, 3], [9, 10, 3]], [[1, 1, 1], [1, 0, 0], [1, 1, 0]]),
        (RAGGED, True, [[5, 6, 7], [3, 3, 8], [3, 9, 10]], [[1, 1, 1], [0, 0, 1], [0, 1, 1]]),
        (UNIFORM, False, UNIFORM, [[1, 1]] * 3),
        (UNIFORM, True, UNIFORM, [[1, 1]] * 3),
    ],
)
def test_padding_is_on_the_side_of_the_signature(
    rows: list[list[int]], pads_left: bool, ids: list[list[int]], mask: list[list[int]]
) -> None:
    feeds = pad(batch_of(rows), signature(pads_left=pads_left))
    assert feeds["input_ids"].tolist() == ids
    assert feeds[ATTENTION_MASK].tolist() == mask


@given(rows_of_ids, st.booleans())
def test_every_feed_has_its_dtype_and_its_own_pad_value(rows: list[list[int]], pads_left: bool) -> None:
    batch = batch_of(rows)
    feeds = pad(batch, signature(pads_left=pads_left))
    real = feeds[ATTENTION_MASK] == 1
    assert real.sum(axis=1).tolist() == [len(row) for row in rows]
    for spec in (IDS, TYPES):
        feed = feeds[spec.name]
        assert feed.dtype == spec.dtype.value
        assert feed.shape == (len(rows), max(map(len, rows)))
        assert np.array_equal(feed[real], batch.values[spec.name])
        assert (feed[~real] == spec.pad).all()
    assert feeds[ATTENTION_MASK].dtype == "float16"


def test_padding_returns_only_the_inputs_of_the_signature() -> None:
    feeds = pad(batch_of(RAGGED), Signature((IDS,), (PER_ROW,), max_length=16))
    assert list(feeds) == ["input_ids"]


def test_padding_of_no_rows_returns_empty_feeds() -> None:
    feeds = pad(batch_of([]), signature())
    assert {feed.shape for feed in feeds.values()} == {(0, 0)}


@given(rows_of_ids, st.booleans())
def test_unpad_reverts_pad(rows: list[list[int]], pads_left: bool) -> None:
    batch, padded_signature = batch_of(rows), signature(pads_left=pads_left)
    padded = pad(batch, padded_signature)["input_ids"].astype(np.float64)
    per_row = np.arange(2.0 * len(rows)).reshape(-1, 2)
    outputs = unpad({"logits": per_row, "hidden": np.stack([padded, -padded], axis=-1)}, batch, padded_signature)
    assert outputs["hidden"].shape == (batch.tokens, 2)
    assert np.array_equal(outputs["hidden"][:, 0], batch.values["input_ids"])
    assert np.array_equal(outputs["hidden"][:, 1], -outputs["hidden"][:, 0])
    assert np.array_equal(outputs["logits"], per_row)


def test_real_positions_marks_tokens_on_either_side() -> None:
    lengths = np.array([2, 0, 3])
    assert real_positions(lengths, 3).tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert real_positions(lengths, 3, pads_left=True).tolist() == [[False, True, True], [False] * 3, [True] * 3]


@given(rows_of_ids, st.data())
def test_gather_restores_the_order_of_any_grouping(rows: list[list[int]], data: st.DataObject) -> None:
    order = np.asarray(data.draw(st.permutations(range(len(rows)))))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(rows) - 1)))) if len(rows) > 1 else [])
    batch = batch_of(rows)

    def run(part: Batch) -> dict[str, np.ndarray]:
        sums = np.array([[sum(row), len(row)] for row in rows_of(part)], np.float64)
        return {"logits": sums, "hidden": np.stack([part.values["input_ids"]] * 2, axis=1).astype(np.float32)}

    parts = [(group, run(batch.take(group))) for group in np.split(order, cuts)]
    whole = run(batch)
    gathered = gather(iter(parts), batch, signature())
    assert set(gathered) == set(whole)
    for name, value in whole.items():
        assert gathered[name].dtype == value.dtype
        assert np.array_equal(gathered[name], value)


rows_with_masks = st.lists(st.lists(st.sampled_from([MASK_ID, 5, 6]), min_size=1, max_size=6), min_size=1, max_size=9)


def at_masks(batch: Batch) -> dict[str, np.ndarray]:
    """Return an output per mask: its index in its row, and the length of the row."""
    values = [(index, len(row)) for row in rows_of(batch) for index, value in enumerate(row) if value == MASK_ID]
    return {"scores": np.array(values, np.float32).reshape(-1, 2)}


def test_counts_per_row_token_and_mask() -> None:
    masked = Signature((IDS,), (PER_ROW, PER_TOKEN, PER_MASK), max_length=16, mask_id=MASK_ID)
    batch = batch_of([[MASK_ID, 5, MASK_ID], [5], [6, MASK_ID]])
    assert [masked.counts(spec, batch).tolist() for spec in masked.outputs] == [[1, 1, 1], [3, 1, 2], [2, 0, 1]]
    assert masked.counts(PER_MASK, batch_of([[5], [6]])).tolist() == [0, 0]
    assert [masked.count(spec, batch) for spec in masked.outputs] == [3, 6, 3]


@given(rows_with_masks, st.data())
def test_gather_restores_the_order_of_masks(rows: list[list[int]], data: st.DataObject) -> None:
    order = np.asarray(data.draw(st.permutations(range(len(rows)))))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(rows) - 1)))) if len(rows) > 1 else [])
    masked = Signature((IDS,), (PER_MASK,), max_length=16, mask_id=MASK_ID)
    batch = batch_of(rows)
    parts = [(group, at_masks(batch.take(group))) for group in np.split(order, cuts)]
    assert np.array_equal(gather(iter(parts), batch, masked)["scores"], at_masks(batch)["scores"])


def test_unpad_keeps_outputs_per_mask() -> None:
    batch = batch_of([[MASK_ID, 5, MASK_ID], [MASK_ID]])
    outputs = at_masks(batch)
    masked = Signature((IDS,), (PER_MASK,), max_length=16, mask_id=MASK_ID)
    assert np.array_equal(unpad(outputs, batch, masked)["scores"], outputs["scores"])


def test_tiled_rows_have_the_requested_lengths_and_tokens() -> None:
    batch = tile_rows(batch_of(RAGGED), np.array([4, 1, 3]))
    assert rows_of(batch) == [[5, 6, 7, 8], [9], [10, 5, 6]]
    assert rows_of(batch, "token_type_ids") == [[1, 0, 1, 0], [1], [0, 1, 0]]
    assert batch.lengths.dtype == np.int32


def test_tiled_rows_of_a_text_have_a_mask() -> None:
    batch = tile_rows(batch_of(RAGGED), np.array([1, 2, 3, 4, 5]), mask_id=99)
    assert [[index for index, value in enumerate(row) if value == 99] for row in rows_of(batch)] == [
        [],
        [],
        [1],
        [2],
        [2],
    ]
    assert 99 not in batch.values["token_type_ids"]


@pytest.mark.parametrize("extra", [-1, 1])
@pytest.mark.parametrize(("output", "entries"), [("logits", 2), ("hidden", 3)])
def test_wrong_number_of_output_entries_is_an_error(output: str, entries: int, extra: int) -> None:
    batch = batch_of([[5, 6], [7]])
    outputs = {"logits": np.zeros((2, 4)), "hidden": np.zeros((3, 4))}
    check_counts(outputs, batch, signature())
    outputs[output] = np.zeros((entries + extra, 4))
    with pytest.raises(ValueError, match=f"'{output}' has {entries + extra} entries instead of {entries}"):
        check_counts(outputs, batch, signature())


def test_divide_splits_outputs_by_batch() -> None:
    parts = [batch_of(rows) for rows in ([[5, MASK_ID, 7], [8]], [[MASK_ID, MASK_ID]], [[9]])]
    masked = Signature((IDS, TYPES, MASK), (PER_ROW, PER_TOKEN, PER_MASK), max_length=16, mask_id=MASK_ID)
    counts = {"logits": [2, 1, 1], "hidden": [4, 2, 1], "scores": [1, 2, 0]}
    outputs = {name: np.arange(2.0 * sum(sizes)).reshape(-1, 2) for name, sizes in counts.items()}
    divided = divide(outputs, parts, masked)
    assert {name: [len(part[name]) for part in divided] for name in counts} == counts
    for name, whole in outputs.items():
        assert (np.concatenate([part[name] for part in divided]) == whole).all()


def test_unpad_keeps_rows_that_a_wrong_graph_adds() -> None:
    """The loader of a graph recognizes by them that its outputs have wrong axes."""
    signature = Signature((IDS,), (TensorSpec("logits", DType.FLOAT32, (BATCH, 2)),), max_length=64)
    batch = Batch.from_rows({"input_ids": [[1, 2, 3], [4]]})
    wrong = {"logits": np.zeros((6, 2), np.float32)}
    assert unpad(wrong, batch, signature)["logits"].shape == (6, 2)
    assert unpad(wrong, batch, signature, Shape(4, 4))["logits"].shape == (2, 2)
