from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from hasten.core.report import Timing
from hasten.core.tensors import Shape
from hasten.metrics.statistics import (
    Interval,
    median_ratio,
    paired_drop,
    pearson,
    ranks,
    relative_error,
    row_cosines,
    spearman,
)

# Small integers make ties; the fractions between them do not.
values = st.lists(
    st.one_of(st.integers(-4, 4).map(float), st.floats(-1e3, 1e3, width=32)), min_size=3, max_size=30
).map(np.asarray)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    a = draw(values)
    b = draw(st.lists(st.integers(-4, 4).map(float), min_size=len(a), max_size=len(a)).map(np.asarray))
    assume(np.ptp(a) > 1e-3)
    assume(np.ptp(b) > 0)
    return a, b


@given(values)
def test_ranks_equal_scipy(data: np.ndarray) -> None:
    assert np.array_equal(ranks(data), stats.rankdata(data))


@given(pairs())
def test_correlations_equal_scipy(data: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = data
    assert pearson(a, b) == pytest.approx(stats.pearsonr(a, b).statistic, abs=1e-9)
    assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-9)


def test_spearman_ranks_single_precision_too() -> None:
    a = np.array([0.1, 0.3, 0.2], np.float32)
    assert spearman(a, np.array([1, 3, 2])) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([2.0, 2.0, 2.0], [2.0, 2.0, 2.0], 1.0),
        ([2.0, 2.0, 2.0], [3.0, 3.0, 3.0], 0.0),
        ([2.0, 2.0, 2.0], [1.0, 2.0, 3.0], 0.0),
        ([5.0], [5.0], 1.0),
    ],
)
def test_constants_correlate_only_with_themselves(a: list[float], b: list[float], expected: float) -> None:
    assert pearson(np.array(a), np.array(b)) == expected


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 1.0),
        ([1.0, 2.0], [3.0, 6.0], 1.0),
        ([1.0, 2.0], [-1.0, -2.0], -1.0),
        ([1.0, 0.0], [0.0, 5.0], 0.0),
        ([0.0, 0.0], [0.0, 0.0], 1.0),
        ([0.0, 0.0], [1.0, 0.0], 0.0),
        ([1.0, 0.0], [0.0, 0.0], 0.0),
        ([1e-30, 0.0], [1e-30, 0.0], 1.0),
        ([1e30, 0.0], [1e30, 0.0], 1.0),
    ],
)
def test_row_cosines_of_single_rows(a: list[float], b: list[float], expected: float) -> None:
    result = row_cosines(np.array([a], np.float32), np.array([b], np.float32))
    assert result == pytest.approx([expected])


def test_each_row_has_its_own_cosine() -> None:
    a = np.array([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    b = np.array([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    assert row_cosines(a, b) == pytest.approx([1.0, 1.0, np.sqrt(0.5)])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_row_has_no_cosine_and_affects_no_other(bad: float) -> None:
    result = row_cosines(np.array([[bad, 1.0], [1.0, 0.0]]), np.array([[1.0, 1.0], [1.0, 0.0]]))
    assert np.isnan(result[0])
    assert result[1] == 1.0


def test_relative_error_of_known_vectors() -> None:
    assert relative_error(np.array([3.0, 4.0]), np.array([3.0, 4.0])) == 0
    assert relative_error(np.array([0.0, 5.0]), np.array([0.0, 4.0])) == pytest.approx(0.25)
    assert np.isfinite(relative_error(np.array([1.0]), np.array([0.0])))


def rounds(ratio: float, seed: int, *, count: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Return times of two contenders that share a machine whose speed drifts threefold, each with its own noise."""
    random = np.random.default_rng(seed)
    drift = np.exp(np.cumsum(random.normal(0, 0.2, count)))
    return drift * random.lognormal(0, 0.05, count), drift / ratio * random.lognormal(0, 0.05, count)


def timing(baseline: np.ndarray, contender: np.ndarray) -> Timing:
    return Timing(
        variant="onnxruntime-fp32",
        shape=Shape(1, 16),
        samples=len(contender),
        p50_ms=1.0,
        p90_ms=1.0,
        p99_ms=None,
        rows_per_s=1000.0,
        speedup=median_ratio(baseline, contender),
        round_medians_ms=tuple(contender.tolist()),
    )


SEEDS = range(200)


@pytest.mark.parametrize("ratio", [0.5, 3.0])
def test_interval_covers_the_true_ratio(ratio: float) -> None:
    intervals = [median_ratio(*rounds(ratio, seed)) for seed in SEEDS]
    held = [interval.low <= ratio <= interval.high for interval in intervals]
    # A bootstrapped median of 40 rounds covers slightly less than the nominal 95 %.
    assert np.mean(held) >= 0.9
    for interval in intervals:
        assert interval.low <= interval.value <= interval.high
        assert interval.high - interval.low < 0.2 * ratio


@pytest.mark.parametrize("count", [2, 3, 5, 40])
def test_equal_contenders_do_not_differ_significantly(count: int) -> None:
    result = [timing(*rounds(1.0, seed, count=count)).is_significant for seed in SEEDS]
    assert np.mean(result) <= 0.1


def test_clear_difference_is_significant_either_way() -> None:
    assert timing(*rounds(1.2, 0)).is_significant
    assert timing(*rounds(0.8, 0)).is_significant


def test_same_rounds_give_the_same_interval() -> None:
    assert median_ratio(*rounds(1.2, 0)) == median_ratio(*rounds(1.2, 0))


@pytest.mark.parametrize(("baseline", "expected"), [([2.0], (2, 2, 2)), ([2.0, 4.0], (3, 2, 4))])
def test_too_few_rounds_give_their_range(baseline: list[float], expected: tuple[float, float, float]) -> None:
    assert median_ratio(np.array(baseline), np.ones(len(baseline))) == Interval(*expected)


def test_p50_follows_from_the_speedup_over_the_baseline() -> None:
    """On a machine whose speed drifts, the medians of two contenders would contradict the speed-up of the pairs."""
    baseline = np.array([100.0, 300.0, 100.0])
    slower = timing(baseline, np.array([125.0, 375.0, 125.0])).relative_to(100.0)
    assert (slower.p50_ms, slower.speedup.value) == (125.0, 0.8)
    assert slower.rows_per_s == pytest.approx(8.0)
    stopped_early = timing(baseline[1:2], np.array([200.0])).relative_to(100.0)
    assert (stopped_early.p50_ms, stopped_early.speedup.value) == (pytest.approx(66.7, abs=0.1), 1.5)


# --- drops


def mean_score(item_scores: np.ndarray) -> float:
    return float(item_scores.mean())


def flipped(rows: int, lost: int, won: int) -> tuple[np.ndarray, np.ndarray]:
    """Return correct answers of a reference and of a variant that differs in a few rows, some for the better."""
    reference = (np.arange(rows) % 10 > 0).astype(np.float64)[:, None]
    variant = reference.copy()
    variant[np.flatnonzero(reference)[:lost]] = 0.0
    variant[np.flatnonzero(reference == 0)[:won]] = 1.0
    return reference, variant


@pytest.mark.parametrize(("rows", "lost", "won"), [(872, 3, 2), (872, 30, 10), (100, 5, 0)])
def test_interval_of_a_drop_equals_scipy(rows: int, lost: int, won: int) -> None:
    reference, variant = flipped(rows, lost, won)
    theirs = stats.bootstrap(
        (reference[:, 0], variant[:, 0]),
        lambda a, b, axis: 100 * (a.mean(axis) - b.mean(axis)),
        paired=True,
        method="percentile",
        n_resamples=4000,
        rng=1,
    ).confidence_interval
    ours = paired_drop(mean_score, reference, variant)
    assert ours.value == pytest.approx(100 * (lost - won) / rows)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.15 * (theirs.high - theirs.low))
    assert paired_drop(mean_score, reference, variant) == ours


def test_paired_interval_is_narrower_than_unpaired() -> None:
    """Unpaired, 872 rows give an accuracy within two points; paired, only the rows that differ count."""
    ours = paired_drop(mean_score, *flipped(872, 2, 1))
    assert ours.high - ours.low < 1.0


def test_equal_answers_have_no_interval() -> None:
    reference, _ = flipped(50, 0, 0)
    assert paired_drop(mean_score, reference, reference.copy()) == Interval(0.0, 0.0, 0.0)


def test_drop_of_a_correlation_has_an_interval() -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 6, 300).astype(np.float64)
    close, far = (labels + random.normal(size=300) * noise for noise in (0.5, 1.5))
    ours = paired_drop(
        lambda item_scores: spearman(*item_scores.T), *(np.stack([scores, labels], 1) for scores in (close, far))
    )
    assert ours.value == pytest.approx(100 * (spearman(close, labels) - spearman(far, labels)))
    assert 0 < ours.low < ours.value < ours.high
