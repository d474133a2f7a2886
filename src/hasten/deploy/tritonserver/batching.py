"""Derive tritonserver's dynamic batching from the bundle's benchmark."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.core.report import Report, Timing
from hasten.deploy.tritonserver.pbtxt import Message

# A request that is not joined by others waits for this share of its own latency.
_WAITING_SHARE = 0.1
# The delay of a variant without timings, and the maximum delay: longer ones are noticeable.
_UNMEASURED_US, _MAX_DELAY_US = 500, 5000


@dataclass(frozen=True, slots=True)
class Batching:
    """The maximum number of rows of a batch, the batch sizes worth waiting for, and the maximum delay."""

    max_rows: int
    preferred: tuple[int, ...]
    delay_us: int

    def to_message(self) -> Message:
        """Return the dynamic batching as a message of the configuration."""
        return {"preferred_batch_size": self.preferred, "max_queue_delay_microseconds": self.delay_us}


def derive_batching(report: Report, variant: str, max_delay_us: int | None = None) -> Batching:
    """Prefer the plan's optimal and maximum batch sizes, except those that lower the throughput."""
    shapes = report.plan.shapes
    measured = [timing for timing in report.bench.timings if timing.variant == variant]
    sizes = sorted({shapes.batch.opt, shapes.batch.max} - {1})
    preferred = tuple(size for size in sizes if _raises_throughput(size, measured))
    delay_us = max_delay_us
    if delay_us is None:
        fastest_us = min((1e3 * timing.p50_ms for timing in measured), default=_UNMEASURED_US / _WAITING_SHARE)
        delay_us = min(_MAX_DELAY_US, round(_WAITING_SHARE * fastest_us)) if preferred else 0
    return Batching(shapes.batch.max, preferred, delay_us)


def _raises_throughput(size: int, measured: list[Timing]) -> bool:
    """Return whether the throughput is higher than with single rows at any length; assume so without timings."""
    batched = {timing.shape.sequence: timing.rows_per_s for timing in measured if timing.shape.batch == size}
    single = {timing.shape.sequence: timing.rows_per_s for timing in measured if timing.shape.batch == 1}
    both = batched.keys() & single.keys()
    return not both or any(batched[length] > single[length] for length in both)
