"""Test the KV cache: growing, copying rows, and locations for IO binding."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from hasten.backends.onnxruntime.cuda_kv_cache import CudaKVCache
from hasten.backends.onnxruntime.kv_cache import CROSS, PAST, KVCache, sequential_copies


@dataclass
class Entry:
    name: str
    shape: tuple[int | str, ...]
    type: str = "tensor(float)"


INPUTS = [Entry("input_ids", ("rows", "tokens")), Entry("past.0.key", ("rows", 2, "capacity", 4))]


def value(number: int, length: int) -> dict[str, np.ndarray]:
    return {"past.0.key": np.full((1, 2, length, 4), number, np.float32)}


def content(cache: KVCache, row: int) -> set[float]:
    """Return the distinct values in a row, read through its address."""
    (location,) = cache.locations(row, 1)
    count = int(np.prod(location.shape))
    memory = (ctypes.c_float * count).from_address(location.address)
    return set(np.array(memory).reshape(location.shape)[0, :, : cache.lengths[row]].ravel().tolist())


@pytest.fixture(params=[KVCache, partial(CudaKVCache, device="cpu")], ids=["host", "device"])
def cache(request: pytest.FixtureRequest) -> KVCache:
    cache: KVCache = request.param(PAST, INPUTS, rows=4, limit=1000)
    cache.grow(10, 0)
    for row in range(3):
        cache.put(row, value(row + 1, 5 + row), 5 + row)
    return cache


def test_kv_cache_holds_only_inputs_with_its_prefix() -> None:
    assert KVCache(PAST, INPUTS, 4, 100).is_used
    assert not KVCache(CROSS, INPUTS, 4, 100).is_used


def test_capacity_doubles_up_to_limit_and_keeps_content(cache: KVCache) -> None:
    assert cache.capacity == 256
    cache.grow(257, 3)
    assert cache.capacity == 512
    cache.grow(900, 3)
    assert cache.capacity == 1000
    assert [content(cache, row) for row in range(3)] == [{1.0}, {2.0}, {3.0}]


def test_new_capacity_is_zero_filled(cache: KVCache) -> None:
    cache.grow(257, 0)
    cache.lengths[:] = 512
    assert content(cache, 2) == {0.0}


def test_copy_exchanges_rows(cache: KVCache) -> None:
    cache.copy({0: 2, 2: 0})
    assert [content(cache, row) for row in range(3)] == [{3.0}, {2.0}, {1.0}]
    assert cache.lengths[:3].tolist() == [7, 6, 5]


def test_copy_of_row_that_is_also_overwritten(cache: KVCache) -> None:
    cache.copy({0: 1, 1: 2, 3: 1})
    assert [content(cache, row) for row in range(4)] == [{2.0}, {3.0}, {3.0}, {2.0}]
    assert cache.lengths[:4].tolist() == [6, 7, 7, 6]


def test_consecutive_rows_share_location(cache: KVCache) -> None:
    (both,), (second,) = cache.locations(0, 2), cache.locations(1, 1)
    assert both.shape == (2, 2, 256, 4)
    assert second.address - both.address == 4 * 2 * 256 * 4


def test_sequential_copies_equal_simultaneous_copies() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        targets = random.permutation(6)[: random.integers(1, 7)]
        rows = {int(target): int(random.integers(6)) for target in targets}
        rows_after = [*"abcdef", ""]
        for target, source in sequential_copies(rows, spare=6):
            rows_after[target] = rows_after[source]
        assert rows_after[:6] == ["abcdef"[rows.get(row, row)] for row in range(6)]


def test_fp16_cache_is_stored_in_fp16() -> None:
    inputs = [Entry("past.0.key", ("rows", 2, "capacity", 4), "tensor(float16)")]
    cache = CudaKVCache(PAST, inputs, 2, 100, device="cpu")
    cache.grow(1, 0)
    cache.put(0, {"past.0.key": np.full((1, 2, 3, 4), 7, np.float16)}, 3)
    cache.copy({1: 0})
    (first,), (second,) = cache.locations(0, 1), cache.locations(1, 1)
    assert first.dtype is np.float16
    assert second.address - first.address == 2 * 100 * 4 * 2
    assert cache.lengths[:2].tolist() == [3, 3]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_forked_process_has_a_cache_of_its_own() -> None:
    code = (
        "import os, numpy as np\n"
        "from hasten.backends.onnxruntime.kv_cache import _lazy_zeros\n"
        "buffer = _lazy_zeros((2, 3), np.float32)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    buffer[:] = 1\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert not buffer.any()\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_memory_of_ended_sequences_stays_committed() -> None:
    cache = KVCache(PAST, INPUTS, rows=2, limit=1000)
    cache.grow(10, 0)
    cache.put(0, value(1, 100), 100)
    cache.reset(0)
    cache.put(0, value(1, 10), 10)
    assert cache.committed_bytes == 100 * cache.token_bytes
    cache.grow(257, 1)
    assert cache.committed_bytes == 10 * cache.token_bytes
    cache.release()
    assert cache.committed_bytes == 0


def test_cache_that_no_memory_can_hold_is_an_error() -> None:
    inputs = [Entry("past.0.key", ("rows", 2**30, "capacity", 2**30))]
    with pytest.raises(MemoryError, match="for the KV cache"):
        KVCache(PAST, inputs, rows=2, limit=1000).grow(10, 0)
