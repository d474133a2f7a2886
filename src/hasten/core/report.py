"""Measurements of a build or a verification, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from hasten.core.errors import PlanError
from hasten.core.plan import Plan
from hasten.core.system.hardware import Machine
from hasten.core.tensors import Shape

# Vectors that differ only in the order of additions differ by up to this.
_ROUNDING_LOSS = 1e-6


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Metric:
    """The quality of answers, judged by labels. Higher is better."""

    name: str
    value: float
    rows: int
    # Other common metrics of the task; the gate uses `value` alone.
    other_metrics: dict[str, float] = field(default_factory=dict)

    def named(self, name: str) -> Metric:
        """Return the metric with another of its values as the main one, by a name such as 'macro F1' or 'macro-f1'."""
        values = {self.name: self.value, **self.other_metrics}
        full_name = find_metric(name, list(values))
        return replace(self, name=full_name, value=values.pop(full_name), other_metrics=values)

    def of(self, name: str) -> float:
        """Return the value of this name."""
        return self.value if name == self.name else self.other_metrics[name]


def find_metric(name: str, known: Sequence[str]) -> str:
    """Return the known metric that a name, or an unambiguous part of it, refers to."""
    letters = _letters(name)
    exact = [metric for metric in known if _letters(metric) == letters]
    matches = exact or [metric for metric in known if letters and letters in _letters(metric)]
    if len(matches) != 1:
        problem = f"'{name}' may be {' or '.join(matches)}" if matches else f"there is no metric '{name}' here"
        raise PlanError(problem, hint=f"--metric takes one of: {', '.join(known)}")
    return matches[0]


def _letters(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


@dataclass(frozen=True, slots=True)
class Agreement:
    """The similarity of two sets of outputs. The gate bounds `value`; the other fields explain it."""

    measure: str
    value: float
    rows: int
    max_error: float
    relative_error: float
    # The largest value of the reference: an error of 1e-3 on values of 100 is small.
    scale: float
    is_finite: bool = True
    flips: int | None = None
    cosine_mean: float | None = None
    cosine_min: float | None = None
    rank_correlation: float | None = None
    top_k_overlap: float | None = None
    worst: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AtBatch:
    """The accuracy of a variant at one batch size."""

    size: int
    agreement: float
    flips: int | None = None
    drop: float | None = None
    # Fewer than all if these proved the agreement; None in reports of earlier versions.
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision of the accuracy gate about a variant, and the numbers behind it."""

    variant: str
    passed: bool
    reason: str
    agreement: Agreement
    metric: Metric | None = None
    reference_metric: Metric | None = None
    # The confidence interval of the drop in points, from paired bootstrap samples of reference and variant.
    drop_interval: Interval | None = None
    # Each batch size that was judged, if answers depend on the batch; the numbers above are the worst.
    by_batch: tuple[AtBatch, ...] = ()
    # Caveats for the user.
    notes: tuple[str, ...] = ()

    @property
    def drop(self) -> float | None:
        """Return the points of the metric lost against the reference."""
        if self.metric is None or self.reference_metric is None:
            return None
        return 100 * (self.reference_metric.value - self.metric.value)

    @property
    def loss(self) -> float:
        """Return the loss of accuracy: in points of the metric if it is known, else in agreement.

        A metric above that of the reference is chance and counts as no loss.
        """
        return max(0.0, self.drop) if self.drop is not None else 1.0 - self.agreement.value


# With fewer rounds, not even their range is a 95 % interval of the median.
INTERVAL_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of one variant at one shape. Percentiles are present only with enough samples."""

    variant: str
    shape: Shape
    samples: int
    # The baseline's median divided by the speed-up: both come from pairs of rounds, since the machine's speed drifts.
    p50_ms: float
    p90_ms: float
    p99_ms: float | None
    rows_per_s: float
    speedup: Interval
    # The median of each round; speed-ups are ratios of these, since noise lasts for several runs.
    round_medians_ms: tuple[float, ...]
    # The smaller batch that was timed, if the times are extrapolated from it by rows.
    timed_shape: Shape | None = None

    def relative_to(self, baseline_ms: float) -> Timing:
        """Return the timing scaled so that its p50 follows from the speed-up over the baseline."""
        p50_ms = baseline_ms / self.speedup.value
        scale = p50_ms / self.p50_ms
        return replace(
            self,
            p50_ms=p50_ms,
            p90_ms=scale * self.p90_ms,
            p99_ms=None if self.p99_ms is None else scale * self.p99_ms,
            rows_per_s=self.shape.batch * 1e3 / p50_ms,
        )

    def extrapolated(self, shape: Shape) -> Timing:
        """Return the timing scaled to a shape with more rows."""
        scale = shape.batch / self.shape.batch
        return replace(
            self,
            shape=shape,
            p50_ms=scale * self.p50_ms,
            p90_ms=scale * self.p90_ms,
            p99_ms=None,
            round_medians_ms=tuple(scale * value for value in self.round_medians_ms),
            timed_shape=self.shape,
        )

    @property
    def has_interval(self) -> bool:
        """Return whether there are enough rounds."""
        return len(self.round_medians_ms) >= INTERVAL_ROUNDS

    @property
    def is_significant(self) -> bool:
        """Return whether the interval of the speed-up excludes 1."""
        return self.has_interval and not self.speedup.low <= 1.0 <= self.speedup.high


@dataclass(frozen=True, slots=True)
class Footprint:
    """Load time, memory and size of a variant, measured in its own process."""

    variant: str
    load_ms: float
    peak_memory_bytes: int
    size_bytes: int
    # None for variants that do not run on a GPU.
    gpu_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Bench:
    """The result of a benchmark."""

    baseline: str
    timings: tuple[Timing, ...]
    footprints: tuple[Footprint, ...]
    # The share of the CPUs that other processes used meanwhile; None if it is unknown.
    other_cpu_share: float | None = None

    def at(self, shape: Shape) -> dict[str, Timing]:
        """Return the timings at a shape by variant."""
        return {timing.variant: timing for timing in self.timings if timing.shape == shape}


class Status(StrEnum):
    """The outcome for one variant."""

    CHOSEN = "chosen"
    ELIGIBLE = "eligible"
    BASELINE = "baseline"
    INACCURATE = "inaccurate"
    FAILED = "failed"
    UNAVAILABLE = "unavailable"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A variant that was considered, and why it was chosen or not."""

    variant: str
    status: Status
    reason: str
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a build."""

    name: str
    seconds: float
    notes: tuple[str, ...] = ()
    # The peak memory of the process from its start to the end of the stage; None in reports of earlier versions.
    peak_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Unfused:
    """An operator that a pass fuses in other models and left unchanged in this one."""

    pattern: str
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Pass:
    """One graph pass: the number of operators of each type before and after it."""

    name: str
    operators_before: dict[str, int]
    operators_after: dict[str, int]
    # The variants that were built from its output.
    variants: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unfused: tuple[Unfused, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """The report of a build, stored as report.json."""

    plan: Plan
    created: str
    machine: Machine
    stages: tuple[Stage, ...]
    candidates: tuple[Candidate, ...]
    bench: Bench
    chosen: str
    passes: tuple[Pass, ...] = ()
    # The Pareto front of speed and accuracy, the fastest first.
    pareto_front: tuple[str, ...] = ()
    # Caveats about the data it was judged on.
    notes: tuple[str, ...] = ()

    @property
    def lossless(self) -> str | None:
        """Return the fastest variant without any loss of accuracy, if there is one."""
        losses = {entry.variant: entry.verdict.loss for entry in self.candidates if entry.verdict is not None}
        return next((name for name in self.pareto_front if losses[name] <= _ROUNDING_LOSS), None)
