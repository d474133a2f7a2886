"""Timings of shapes that are too slow for the budget, and ties."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hasten.builder.search.select import is_tie
from hasten.core.report import Interval, Timing
from hasten.core.tensors import Batch, Shape
from hasten.measure.bench import _affordable


def timed(shape: Shape, round_medians_ms: tuple[float, ...]) -> Timing:
    p50_ms = float(np.median(round_medians_ms))
    rows_per_s = shape.batch * 1e3 / p50_ms
    interval = Interval(2.0, 1.8, 2.2)
    return Timing("openvino-fp32", shape, 8, p50_ms, 2 * p50_ms, 3 * p50_ms, rows_per_s, interval, round_medians_ms)


class SlowWorker:
    """A worker that takes a fixed time per row."""

    def __init__(self, row_s: float) -> None:
        self._row_s = row_s

    def second_run_s(self, shape: Shape, batch: Batch) -> float:
        return shape.batch * self._row_s


def tiled(shape: Shape) -> Batch:
    ids = np.zeros(shape.tokens, np.int32)
    return Batch({"input_ids": ids}, np.full(shape.batch, shape.sequence, np.int32))


@pytest.mark.parametrize(
    ("budget_s", "rows"), [(1000.0, 32), (32 * 8 * 0.3, 32), (16 * 8 * 0.3, 16), (2.5, 1), (0.001, 1)]
)
def test_timed_batch_fits_into_the_budget(budget_s: float, rows: int) -> None:
    workers: list[Any] = [SlowWorker(0.1), SlowWorker(0.2)]
    # Two untimed and two timed runs of each worker; a little more, so that rounding errors do not count.
    assert _affordable(workers, Shape(32, 256), tiled, 1.001 * budget_s) == Shape(rows, 256)


def test_single_row_is_always_timed() -> None:
    workers: list[Any] = [SlowWorker(100.0)]
    assert _affordable(workers, Shape(1, 256), tiled, 1.0) == Shape(1, 256)


def test_extrapolated_timing_scales_with_rows_and_names_the_timed_shape() -> None:
    timing = timed(Shape(4, 256), (10.0, 11.0, 12.0)).extrapolated(Shape(32, 256))
    assert (timing.shape, timing.timed_shape) == (Shape(32, 256), Shape(4, 256))
    assert (timing.p50_ms, timing.p90_ms, timing.p99_ms) == (88.0, 176.0, None)
    assert timing.round_medians_ms == (80.0, 88.0, 96.0)
    # The same rows per second, and the same speed-up.
    assert timing.rows_per_s == pytest.approx(32 * 1e3 / timing.p50_ms)
    assert timing.speedup.value == 2.0


def test_timings_whose_ratio_may_be_one_are_a_tie() -> None:
    first = timed(Shape(8, 128), (10.0, 11.0, 10.0, 9.0, 10.0, 11.0))
    assert is_tie(timed(Shape(8, 128), (10.1, 10.9, 9.9, 9.1, 10.2, 10.8)), first)
    assert not is_tie(timed(Shape(8, 128), (12.0, 13.2, 12.1, 10.9, 12.0, 13.1)), first)
    # Too few rounds for an interval.
    assert not is_tie(timed(Shape(8, 128), (10.0, 11.0)), first)
