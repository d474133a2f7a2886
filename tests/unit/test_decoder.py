"""Caches of rows in progress: grown, moved, and handed out as pointers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from hasten.backends.onnxruntime.caches import CROSS, PAST, Caches
from hasten.backends.onnxruntime.device_caches import DeviceCaches, in_turn


@dataclass
class Entry:
    name: str
    shape: tuple[int | str, ...]
    type: str = "tensor(float)"


INPUTS = [Entry("input_ids", ("rows", "tokens")), Entry("past.0.key", ("rows", 2, "capacity", 4))]


def value(number: int, length: int) -> dict[str, np.ndarray]:
    return {"past.0.key": np.full((1, 2, length, 4), number, np.float32)}


def held(caches: Caches, row: int) -> set[float]:
    """What a row holds, by way of its address."""
    (place,) = caches.places(row, 1)
    import ctypes

    count = int(np.prod(place.shape))
    memory = (ctypes.c_float * count).from_address(place.address)
    return set(np.array(memory).reshape(place.shape)[0, :, : caches.lengths[row]].ravel().tolist())


@pytest.fixture(params=[Caches, partial(DeviceCaches, device="cpu")], ids=["processor", "device"])
def caches(request: pytest.FixtureRequest) -> Caches:
    made: Caches = request.param(PAST, INPUTS, rows=4, limit=1000)
    made.grow(10, 0)
    for row in range(3):
        made.put(row, value(row + 1, 5 + row), 5 + row)
    return made


def test_only_inputs_of_that_name_are_kept() -> None:
    assert Caches(PAST, INPUTS, 4, 100).is_used
    assert not Caches(CROSS, INPUTS, 4, 100).is_used


def test_room_doubles_up_to_the_limit_and_keeps_what_is_there(caches: Caches) -> None:
    assert caches.capacity == 256
    caches.grow(257, 3)
    assert caches.capacity == 512
    caches.grow(900, 3)
    assert caches.capacity == 1000
    assert [held(caches, row) for row in range(3)] == [{1.0}, {2.0}, {3.0}]


def test_new_room_is_all_zeros(caches: Caches) -> None:
    caches.grow(257, 0)
    caches.lengths[:] = 512
    assert held(caches, 2) == {0.0}


def test_rows_exchanged_are_what_the_others_were(caches: Caches) -> None:
    caches.copy({0: 2, 2: 0})
    assert [held(caches, row) for row in range(3)] == [{3.0}, {2.0}, {1.0}]
    assert caches.lengths[:3].tolist() == [7, 6, 5]


def test_one_row_copied_twice_and_overwritten(caches: Caches) -> None:
    caches.copy({0: 1, 1: 2, 3: 1})
    assert [held(caches, row) for row in range(4)] == [{2.0}, {3.0}, {3.0}, {2.0}]
    assert caches.lengths.tolist() == [6, 7, 7, 6]


def test_rows_side_by_side_are_one_place(caches: Caches) -> None:
    (both,), (second,) = caches.places(0, 2), caches.places(1, 1)
    assert both.shape == (2, 2, 256, 4)
    assert second.address - both.address == 4 * 2 * 256 * 4


def test_copies_one_after_another_come_to_the_same_as_all_at_once() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        targets = random.permutation(6)[: random.integers(1, 7)]
        rows = {int(target): int(random.integers(6)) for target in targets}
        held = [*"abcdef", ""]
        for target, source in in_turn(rows, spare=6):
            held[target] = held[source]
        assert held[:6] == ["abcdef"[rows.get(row, row)] for row in range(6)]


def test_halves_are_held_as_halves() -> None:
    inputs = [Entry("past.0.key", ("rows", 2, "capacity", 4), "tensor(float16)")]
    made = DeviceCaches(PAST, inputs, 2, 100, device="cpu")
    made.grow(1, 0)
    made.put(0, {"past.0.key": np.full((1, 2, 3, 4), 7, np.float16)}, 3)
    made.copy({1: 0})
    (first,), (second,) = made.places(0, 1), made.places(1, 1)
    assert first.kind is np.float16
    assert second.address - first.address == 2 * 100 * 4 * 2
    assert made.lengths.tolist() == [3, 3]
