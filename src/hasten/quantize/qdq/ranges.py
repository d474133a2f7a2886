"""Choose clipping ranges from histograms of activations, by maximum, percentile, entropy or mean squared error."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from hasten.core.errors import InputError, PlanError, StageError
from hasten.core.variant import Precision
from hasten.quantize.qdq.quantizer import LIMITS, fake_quantize

# When the range grows, it doubles and bins merge in pairs: at worst half of them are in use.
_BINS = 4096
# The levels of half a symmetric int8 range, with which entropy compares.
_LEVELS = 128
# The number of clipping thresholds that entropy and mean squared error try.
_THRESHOLDS = 128
_PERCENTILE = 99.99
# Below, most values would be clipped; a fraction passed by mistake (0.9999) is far below.
_MIN_PERCENTILE = 50
# torch counts in fp32, in which a bin cannot exceed this count.
_MAX_COUNT = 2**24


class RangeMethod(StrEnum):
    """The ways to choose a clipping range."""

    MAX = "max"
    PERCENTILE = "percentile"
    ENTROPY = "entropy"
    MSE = "mse"


class Histogram:
    """A histogram of absolute values, filled batch by batch."""

    def __init__(self, name: str = "a tensor") -> None:
        self.name = name
        self.largest = 0.0
        self.top = 0.0
        self.counts = torch.zeros(_BINS, dtype=torch.float64)

    def update(self, values: Tensor) -> None:
        """Count the values of one batch."""
        magnitudes = values.abs().flatten().float()
        if not magnitudes.numel():
            return
        largest = float(magnitudes.max())
        if largest != largest or largest == float("inf"):
            raise StageError(
                f"calibration failed: a value at {self.name} is not finite",
                hint="check the batch and the weights",
            )
        self.largest = max(self.largest, largest)
        if self.top == 0.0:
            self.top = largest
        while largest > self.top > 0.0:
            self.top *= 2
            merged = self.counts.view(-1, 2).sum(dim=1)
            self.counts = torch.cat([merged, torch.zeros(_BINS // 2, dtype=torch.float64)])
        if self.top == 0.0:
            self.counts[0] += magnitudes.numel()  # only zeros so far
        else:
            for part in magnitudes.split(_MAX_COUNT):
                self.counts += torch.histc(part, _BINS, 0.0, self.top).cpu()


def check_method(method: str, value: float | None, precision: Precision) -> None:
    """Raise for an unknown method, a wrong percentile, or a method that does not support the precision."""
    if method not in list(RangeMethod):
        raise PlanError(f"unknown calibration method '{method}'", hint=f"one of {', '.join(RangeMethod)}")
    if value is not None and method != RangeMethod.PERCENTILE:
        raise PlanError(f"'{method}' does not take a number", hint="only percentile does, as in 99.99")
    if value is not None and not isinstance(value, int | float):
        raise PlanError(f"{value!r} is not a percentile: it is not a number", hint=f"as in {_PERCENTILE}")
    if value is not None and not _MIN_PERCENTILE < value <= 100:
        is_fraction = _MIN_PERCENTILE < 100 * value <= 100
        percent_hint = f"percentiles go up to 100: pass {100 * value:.10g}, not {value}"
        hint = percent_hint if is_fraction else f"more than {_MIN_PERCENTILE} and at most 100, as in {_PERCENTILE}"
        raise PlanError(f"{value} is not a valid percentile", hint=hint)
    if method == RangeMethod.ENTROPY and precision is not Precision.INT8:
        raise PlanError(f"entropy does not support {precision}: it needs evenly spaced levels", hint="use mse")


def find_range(histogram: Histogram, method: str, value: float | None, precision: Precision) -> float:
    """Return the magnitude at which a tensor is clipped."""
    if not histogram.counts.sum():
        raise InputError("there are no rows to calibrate on")
    if method == RangeMethod.MAX or histogram.largest == 0.0:
        return histogram.largest
    if method == RangeMethod.PERCENTILE:
        return _percentile(histogram, _PERCENTILE if value is None else value)
    return _entropy(histogram) if method == RangeMethod.ENTROPY else _mse(histogram, precision)


def _percentile(histogram: Histogram, percentile: float) -> float:
    reached = torch.cumsum(histogram.counts, 0) / histogram.counts.sum()
    last = int(torch.searchsorted(reached, torch.tensor(percentile / 100, dtype=torch.float64)))
    return min((last + 1) * histogram.top / _BINS, histogram.largest)


def _mse(histogram: Histogram, precision: Precision) -> float:
    """Return the threshold with the smallest squared error of rounding and clipping, summed over all values."""
    used = histogram.counts > 0
    centers = (torch.arange(_BINS, dtype=torch.float64) + 0.5) * (histogram.top / _BINS)
    centers, counts = centers[used].float(), histogram.counts[used]
    best, smallest = histogram.largest, float("inf")
    for step in range(1, _THRESHOLDS + 1):
        amax = histogram.largest * step / _THRESHOLDS
        error = fake_quantize(centers, torch.tensor(amax / LIMITS[precision]), precision) - centers
        total = float((counts * error.double().square()).sum())
        if total < smallest:
            best, smallest = amax, total
    return best


def _entropy(histogram: Histogram) -> float:
    """Return the threshold whose 128 levels have the smallest Kullback-Leibler divergence from the histogram."""
    last = int(histogram.counts.nonzero().max()) + 1
    best, smallest = histogram.largest, float("inf")
    for bins in range(_LEVELS, last + 1, max(1, (last - _LEVELS) // _THRESHOLDS)):
        clipped = histogram.counts[:bins].clone()
        is_filled = clipped > 0
        clipped[-1] += histogram.counts[bins:].sum()
        level = torch.arange(bins) * _LEVELS // bins
        # The count of a level is spread evenly over its bins that are not empty.
        sums = torch.zeros(_LEVELS, dtype=torch.float64).index_add_(0, level, histogram.counts[:bins])
        filled = torch.zeros(_LEVELS, dtype=torch.float64).index_add_(0, level, is_filled.double())
        spread = torch.where(is_filled, (sums / filled.clamp_min(1))[level], 0.0)
        reference, candidate = clipped / clipped.sum(), spread / spread.sum().clamp_min(1)
        both = (reference > 0) & (candidate > 0)
        # Bins that the levels leave out altogether count with a trace of probability.
        missing = reference[(reference > 0) & (candidate == 0)]
        divergence = (reference[both] * (reference[both] / candidate[both]).log()).sum()
        divergence += (missing * (missing / 1e-9).log()).sum()
        if float(divergence) < smallest:
            best, smallest = bins * histogram.top / _BINS, float(divergence)
    return min(best, histogram.largest)
