"""What was measured: plain data, written once, read by people, programs and the next command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from hasten.core.errors import PlanError
from hasten.core.hardware import Machine
from hasten.core.plan import Plan
from hasten.core.statistics import Interval
from hasten.core.tensors import Shape

# By as much as this vectors differ that were added up in another order.
_NOTHING = 1e-6


@dataclass(frozen=True, slots=True)
class Metric:
    """How right the answers are, judged by labels. Higher is better."""

    name: str
    value: float
    rows: int
    # What else people know the task's answers by; the gate goes by `value` alone.
    also: dict[str, float] = field(default_factory=dict)

    def named(self, name: str) -> Metric:
        """The same with another of its values as the main one: 'macro F1', or 'macro-f1', or enough of it to tell."""
        values = {self.name: self.value, **self.also}
        found = find_metric(name, list(values))
        return replace(self, name=found, value=values.pop(found), also=values)

    def of(self, name: str) -> float:
        return self.value if name == self.name else self.also[name]


def find_metric(name: str, known: Sequence[str]) -> str:
    """The one metric that is meant."""
    asked = _letters(name)
    exact = [metric for metric in known if _letters(metric) == asked]
    found = exact or [metric for metric in known if asked and asked in _letters(metric)]
    if len(found) != 1:
        wrong = f"'{name}' may be {' or '.join(found)}" if found else f"there is no metric '{name}' here"
        raise PlanError(wrong, hint=f"--metric takes one of: {', '.join(known)}")
    return found[0]


def _letters(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


@dataclass(frozen=True, slots=True)
class Agreement:
    """How alike two sets of outputs are. `value` is what the gate bounds; the rest explains it."""

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
    """How a variant did with so many rows at a time."""

    size: int
    agreement: float
    flips: int | None = None
    drop: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a variant may be used, and the numbers that decided it."""

    variant: str
    passed: bool
    reason: str
    agreement: Agreement
    metric: Metric | None = None
    reference_metric: Metric | None = None
    # Of the drop, in points: how far it may be chance, the same rows drawn for the reference and for the variant.
    drop_interval: Interval | None = None
    # Where answers depend on what else is in a batch: each size that was judged; the numbers above are the worst.
    by_batch: tuple[AtBatch, ...] = ()
    # What a person should know before believing it.
    notes: tuple[str, ...] = ()

    @property
    def drop(self) -> float | None:
        """Points of the metric lost against the reference."""
        if self.metric is None or self.reference_metric is None:
            return None
        return 100 * (self.reference_metric.value - self.metric.value)

    @property
    def loss(self) -> float:
        """What was lost of the answers: in points of the metric where it is known, in agreement where not.

        A metric above the original's is chance, and no nearer to it than the same.
        """
        return max(0.0, self.drop) if self.drop is not None else 1.0 - self.agreement.value


@dataclass(frozen=True, slots=True)
class Timing:
    """One variant at one shape. Percentiles only where the samples carry them."""

    variant: str
    shape: Shape
    samples: int
    p50_ms: float
    p90_ms: float
    p99_ms: float | None
    sentences_per_s: float
    speedup: Interval
    # The median of each round: what ratios are taken of, since noise comes in stretches.
    round_medians_ms: tuple[float, ...]

    @property
    def has_interval(self) -> bool:
        """Below six rounds not even their whole span is a 95 % interval of the median."""
        return len(self.round_medians_ms) >= 6

    @property
    def is_significant(self) -> bool:
        return self.has_interval and not self.speedup.low <= 1.0 <= self.speedup.high


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a variant costs beside time, measured in a process of its own."""

    variant: str
    load_ms: float
    peak_memory_bytes: int
    size_bytes: int
    # Of a GPU; None for a variant that runs on none.
    gpu_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Bench:
    baseline: str
    timings: tuple[Timing, ...]
    footprints: tuple[Footprint, ...]
    # The part of the machine that other processes used meanwhile; None where it cannot be told.
    others_share: float | None = None

    def at(self, shape: Shape) -> dict[str, Timing]:
        return {timing.variant: timing for timing in self.timings if timing.shape == shape}


class Status(StrEnum):
    CHOSEN = "chosen"
    ELIGIBLE = "eligible"
    BASELINE = "baseline"
    INACCURATE = "inaccurate"
    FAILED = "failed"
    UNAVAILABLE = "unavailable"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One variant that was considered, and why it was chosen or not."""

    variant: str
    status: Status
    reason: str
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the work, as it went."""

    name: str
    seconds: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unfused:
    """An operator that a pass merges with its neighbours in other models, and left as it was in this one."""

    what: str
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Pass:
    """One rewriting of the graph: how many operators of each type there were before it and after it."""

    name: str
    operators_before: dict[str, int]
    operators_after: dict[str, int]
    # The variants that were made from what came out of it.
    variants: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    left: tuple[Unfused, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    plan: Plan
    created: str
    machine: Machine
    stages: tuple[Stage, ...]
    candidates: tuple[Candidate, ...]
    bench: Bench
    chosen: str
    passes: tuple[Pass, ...] = ()
    # The variants than which none is both faster and nearer to the original, the fastest first.
    front: tuple[str, ...] = ()
    # What a person should know about the data it was judged on.
    notes: tuple[str, ...] = ()

    @property
    def lossless(self) -> str | None:
        """The fastest variant that loses nothing, if one does."""
        losses = {one.variant: one.verdict.loss for one in self.candidates if one.verdict is not None}
        return next((name for name in self.front if losses[name] <= _NOTHING), None)
