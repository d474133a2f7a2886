"""How tritonserver puts requests together, from what the benchmark of the bundle has measured."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.core.report import Report, Timing
from hasten.deploy.tritonserver.pbtxt import Message

# A request that nobody joins waits this much longer than it would take alone.
_WAITING_SHARE = 0.1
# Where nothing was measured of a variant, and what no measurement can exceed: beyond it people notice.
_UNMEASURED_US, _MOST_US = 500, 5000


@dataclass(frozen=True, slots=True)
class Batching:
    """The most rows of one batch, the sizes worth waiting for, and how long to wait."""

    max_rows: int
    preferred: tuple[int, ...]
    delay_us: int

    def to_message(self) -> Message:
        return {"preferred_batch_size": self.preferred, "max_queue_delay_microseconds": self.delay_us}


def batching(report: Report, variant: str, max_delay_us: int | None = None) -> Batching:
    """Sizes are the plan's, most often and at most, but for one with which a sentence took longer than alone."""
    shapes = report.plan.shapes
    measured = [timing for timing in report.bench.timings if timing.variant == variant]
    sizes = sorted({shapes.batch.opt, shapes.batch.max} - {1})
    preferred = tuple(size for size in sizes if _pays(size, measured))
    delay_us = max_delay_us
    if delay_us is None:
        quickest_us = min((1e3 * timing.p50_ms for timing in measured), default=_UNMEASURED_US / _WAITING_SHARE)
        delay_us = min(_MOST_US, round(_WAITING_SHARE * quickest_us)) if preferred else 0
    return Batching(shapes.batch.max, preferred, delay_us)


def _pays(size: int, measured: list[Timing]) -> bool:
    """At any length that was measured both ways; where none was, it is taken to."""
    at_size = {timing.shape.sequence: timing.sentences_per_s for timing in measured if timing.shape.batch == size}
    alone = {timing.shape.sequence: timing.sentences_per_s for timing in measured if timing.shape.batch == 1}
    both = at_size.keys() & alone.keys()
    return not both or any(at_size[length] > alone[length] for length in both)
