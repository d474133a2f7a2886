"""NumPy arrays in JSON responses."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hasten.server.http.exchange import Response

pytest.importorskip("orjson", reason="serving needs hasten[serve]")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_are_read_back_exactly(dtype: type[np.floating]) -> None:
    values = np.random.default_rng(0).standard_normal((64, 33)).astype(dtype)
    values[0, :4] = [0.0, -0.0, np.finfo(dtype).tiny, np.finfo(dtype).max]
    for array in (values, values[:, ::2], values.T, values[:0]):
        read = np.array(json.loads(Response.json({"data": [array]}).body)["data"][0], dtype).reshape(array.shape)
        assert np.array_equal(read, array)
        assert np.array_equal(np.signbit(read), np.signbit(array))


def test_float32_is_written_in_its_own_digits() -> None:
    assert Response.json(np.array([0.1, 1e-9], np.float32)).body == b"[0.1,1e-9]"


def test_non_finite_numbers_are_null_and_scalars_and_integers_are_numbers() -> None:
    assert Response.json(np.array([np.nan, np.inf, 1.5], np.float32)).body == b"[null,null,1.5]"
    assert Response.json([np.float32(0.5), np.arange(2), np.bool_(1)]).body == b"[0.5,[0,1],true]"
