"""Rank the variants that passed the accuracy gate and explain the choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hasten.backends import BACKENDS
from hasten.builder.search.search import SearchTrial
from hasten.bundle import VariantEntry
from hasten.core.report import Bench, Candidate, Status, Timing, Verdict
from hasten.core.tensors import Shape
from hasten.core.variant import Variant
from hasten.metrics.statistics import median_ratio


def rank(bench: Bench, shape: Shape, eligible: Sequence[Variant]) -> list[Variant]:
    """Return the eligible variants that a bundle can store, fastest first at this shape."""
    times = _times(bench, shape)
    stored = (variant for variant in eligible if BACKENDS.get(variant.backend).is_stored)
    return sorted(stored, key=lambda variant: times[variant.name])


def _times(bench: Bench, shape: Shape) -> dict[str, tuple[float, bool]]:
    """Return the time of each variant, and whether it was eliminated before the final round.

    A variant that was eliminated in an earlier round does not rank before a finalist: the two ran at different times.
    """
    timings = bench.at(shape)
    finalists = {timing.variant for timing in bench.timings if timing.shape != shape} - {bench.baseline}
    slowest = max((timings[name].p50_ms for name in finalists), default=0.0)
    return {
        name: (timing.p50_ms, False) if name in (*finalists, bench.baseline) else (max(timing.p50_ms, slowest), True)
        for name, timing in timings.items()
    }


def explain(
    ranking: Sequence[Variant], bench: Bench, shape: Shape, verdicts: Mapping[Variant, Verdict]
) -> list[Candidate]:
    """Return for each variant that passed the gate why it was chosen, or why not."""
    timings = bench.at(shape)
    winner = ranking[0]
    candidates = []
    for variant, verdict in verdicts.items():
        timing, status = timings[variant.name], Status.ELIGIBLE
        if variant == winner:
            status, speedup = Status.CHOSEN, timing.speedup.value
            reason = f"fastest eligible at {shape}: {timing.p50_ms:.2f} ms, {speedup:.2f}× {bench.baseline}"
        elif variant not in ranking:
            reason = "for comparison only: needs PyTorch"
        else:
            reason = f"takes {timing.p50_ms / timings[winner.name].p50_ms:.2f}× as long as {winner} at {shape}"
            if is_tie(timing, timings[winner.name]):
                reason += ": a tie, since the difference is not significant"
        candidates.append(Candidate(variant.name, status, reason, verdict))
    return candidates


def is_tie(timing: Timing, other: Timing) -> bool:
    """Return whether the interval of the ratio of two timings of the same rounds includes 1."""
    rounds = min(len(timing.round_medians_ms), len(other.round_medians_ms))
    if not (timing.has_interval and other.has_interval):
        return False
    ratio = median_ratio(np.array(timing.round_medians_ms[:rounds]), np.array(other.round_medians_ms[:rounds]))
    return ratio.low <= 1.0 <= ratio.high


def pareto_front(candidates: Sequence[Candidate], bench: Bench, shape: Shape) -> tuple[str, ...]:
    """Return the Pareto front of speed and accuracy, fastest first."""
    times = _times(bench, shape)
    judged = [(times[c.variant], c.verdict.loss, c.variant) for c in candidates if c.verdict and c.variant in times]
    front: list[str] = []
    min_loss = float("inf")
    for _, loss, variant in sorted(judged):
        if loss < min_loss:
            front.append(variant)
            min_loss = loss
    return tuple(front)


def variant_entry(trial: SearchTrial) -> VariantEntry:
    """Return the manifest's entry for a variant."""
    variant, verdict = trial.artifact.variant, trial.verdict
    return VariantEntry(
        name=variant.name,
        backend=variant.backend,
        precision=variant.precision,
        device=variant.device,
        requires=BACKENDS.get(variant.backend).requires,
        graphs=dict(trial.artifact.graphs),
        agreement=verdict.agreement,
        metric=verdict.metric,
        depends_on_batch=bool(verdict.by_batch),
    )
