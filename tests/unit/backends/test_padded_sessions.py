"""Test `PaddedSession`: rows that must not be padded run with rows of the same length."""

from __future__ import annotations

import numpy as np
import pytest

from hasten.backends import PaddedSession
from hasten.core.tensors import BATCH, SEQUENCE, Batch, DType, Layout, Outputs, SessionSpec, Signature, TensorSpec


class DoublingSession(PaddedSession):
    """Returns each token's id times two and records the lengths of each batch."""

    def __init__(self, *, ignores_padding: bool) -> None:
        inputs = (TensorSpec("input_ids", DType.INT32, (BATCH, SEQUENCE)),)
        outputs = (TensorSpec("doubled", DType.FLOAT32, (BATCH, SEQUENCE)),)
        signature = Signature(inputs, outputs, max_length=9, ignores_padding=ignores_padding)
        self.spec = SessionSpec(signature, Layout.PADDED, "cpu", "fp32")
        self.batches: list[list[int]] = []

    def run_padded(self, batch: Batch) -> Outputs:
        self.batches.append(batch.lengths.tolist())
        return {"doubled": batch.values["input_ids"] * np.float32(2)}


@pytest.mark.parametrize(("ignores_padding", "batches"), [(True, [[3, 1, 3, 2, 1]]), (False, [[1, 1], [2], [3, 3]])])
def test_padded_session_returns_rows_in_order(ignores_padding: bool, batches: list[list[int]]) -> None:
    session = DoublingSession(ignores_padding=ignores_padding)
    batch = Batch({"input_ids": np.arange(10, dtype=np.int32)}, np.array([3, 1, 3, 2, 1], np.int32))
    np.testing.assert_array_equal(session.run(batch)["doubled"], np.arange(10) * 2)
    assert session.batches == batches
