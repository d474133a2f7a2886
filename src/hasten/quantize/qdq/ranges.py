"""Where to cut a tensor's values off: histograms that grow with what they see, and four ways to read them."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from hasten.core.errors import InputError, PlanError, StageError
from hasten.core.variant import Precision
from hasten.quantize.qdq.quantizer import LIMITS, rounded

# A range that grows doubles and merges bins two by two: at worst half of them are in use.
_BINS = 4096
# Half a symmetric range of int8: what entropy compares with.
_LEVELS = 128
# How many places to cut off are tried by entropy and by mean squared error.
_PLACES = 128
_PERCENTILE = 99.99
# Below, most values would be cut off; a fraction, which is easily taken for a percentile, is far below.
_LEAST_PERCENTILE = 50
# torch counts in fp32, in which a bin that has reached this many stays there.
_COUNTED_AT_ONCE = 2**24


class Method(StrEnum):
    MAX = "max"
    PERCENTILE = "percentile"
    ENTROPY = "entropy"
    MSE = "mse"


class Histogram:
    """Absolute values, counted as they stream by."""

    def __init__(self, name: str = "a tensor") -> None:
        self.name = name
        self.largest = 0.0
        self.top = 0.0
        self.counts = torch.zeros(_BINS, dtype=torch.float64)

    def see(self, values: Tensor) -> None:
        sizes = values.abs().flatten().float()
        if not sizes.numel():
            return
        largest = float(sizes.max())
        if largest != largest or largest == float("inf"):
            raise StageError(
                f"calibration met a value that is not finite at {self.name}",
                hint="look at the batch and at the weights",
            )
        self.largest = max(self.largest, largest)
        if self.top == 0.0:
            self.top = largest
        while largest > self.top > 0.0:
            self.top *= 2
            merged = self.counts.view(-1, 2).sum(dim=1)
            self.counts = torch.cat([merged, torch.zeros(_BINS // 2, dtype=torch.float64)])
        if self.top == 0.0:
            self.counts[0] += sizes.numel()  # nothing but zeros so far
        else:
            for part in sizes.split(_COUNTED_AT_ONCE):
                self.counts += torch.histc(part, _BINS, 0.0, self.top).cpu()

    @property
    def centers(self) -> Tensor:
        return (torch.arange(_BINS, dtype=torch.float64) + 0.5) * (self.top / _BINS)


def check_method(method: str, value: float | None, precision: Precision) -> None:
    if method not in list(Method):
        raise PlanError(f"nobody calibrates by '{method}'", hint=f"one of {', '.join(Method)}")
    if value is not None and method != Method.PERCENTILE:
        raise PlanError(f"'{method}' takes no number", hint="percentile does, as in 99.99")
    if value is not None and not isinstance(value, int | float):
        raise PlanError(f"{value!r} is no percentile: it is not a number", hint=f"as in {_PERCENTILE}")
    if value is not None and not _LEAST_PERCENTILE < value <= 100:
        is_fraction = _LEAST_PERCENTILE < 100 * value <= 100
        meant = f"they are of 100: {100 * value:.10g}, not {value}"
        hint = meant if is_fraction else f"more than {_LEAST_PERCENTILE} and at most 100, as in {_PERCENTILE}"
        raise PlanError(f"{value} is no percentile to cut off at", hint=hint)
    if method == Method.ENTROPY and precision is not Precision.INT8:
        raise PlanError(f"entropy compares with evenly spaced levels, which {precision} has not", hint="mse does not")


def find_range(seen: Histogram, method: str, value: float | None, precision: Precision) -> float:
    if not seen.counts.sum():
        raise InputError("there are no rows to calibrate on")
    if method == Method.MAX or seen.largest == 0.0:
        return seen.largest
    if method == Method.PERCENTILE:
        return _percentile(seen, _PERCENTILE if value is None else value)
    return _entropy(seen) if method == Method.ENTROPY else _mse(seen, precision)


def _percentile(seen: Histogram, percentile: float) -> float:
    reached = torch.cumsum(seen.counts, 0) / seen.counts.sum()
    place = int(torch.searchsorted(reached, torch.tensor(percentile / 100, dtype=torch.float64)))
    return min((place + 1) * seen.top / _BINS, seen.largest)


def _mse(seen: Histogram, precision: Precision) -> float:
    """Where the squared error of rounding and cutting off, summed over all values, is smallest."""
    used = seen.counts > 0
    centers, counts = seen.centers[used].float(), seen.counts[used]
    best, least = seen.largest, float("inf")
    for step in range(1, _PLACES + 1):
        amax = seen.largest * step / _PLACES
        error = rounded(centers, torch.tensor(amax / LIMITS[precision]), precision) - centers
        total = float((counts * error.double().square()).sum())
        if total < least:
            best, least = amax, total
    return best


def _entropy(seen: Histogram) -> float:
    """Where the distribution that is left in 128 levels says most about the one that was seen (Kullback-Leibler)."""
    last = int(seen.counts.nonzero().max()) + 1
    best, least = seen.largest, float("inf")
    for places in range(_LEVELS, last + 1, max(1, (last - _LEVELS) // _PLACES)):
        kept = seen.counts[:places].clone()
        seen_there = kept > 0
        kept[-1] += seen.counts[places:].sum()
        level = torch.arange(places) * _LEVELS // places
        # What a level holds, spread evenly over those of its bins that are not empty.
        sums = torch.zeros(_LEVELS, dtype=torch.float64).index_add_(0, level, seen.counts[:places])
        filled = torch.zeros(_LEVELS, dtype=torch.float64).index_add_(0, level, seen_there.double())
        spread = torch.where(seen_there, (sums / filled.clamp_min(1))[level], 0.0)
        reference, candidate = kept / kept.sum(), spread / spread.sum().clamp_min(1)
        both = (reference > 0) & (candidate > 0)
        # What was seen and is left out altogether is counted as if it had a trace of probability.
        missing = reference[(reference > 0) & (candidate == 0)]
        divergence = (reference[both] * (reference[both] / candidate[both]).log()).sum()
        divergence += (missing * (missing / 1e-9).log()).sum()
        if float(divergence) < least:
            best, least = places * seen.top / _BINS, float(divergence)
    return min(best, seen.largest)
