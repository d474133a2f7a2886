"""Decide clear cases on a few rows, before or instead of the accuracy gate, which judges variants on all.

A sequential test: rows run in blocks, and it ends as soon as the mean agreement of the blocks lies several standard
errors below the bound, or above it. A variant that is clearly below is rejected. One that is clearly above is judged on
all rows all the same, but at one batch size only if its answers depend on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hasten.core.batching import batch_in_order
from hasten.core.plan import Gate
from hasten.core.report import Agreement, Verdict
from hasten.core.tensors import Outputs
from hasten.core.variant import Precision
from hasten.measure.encoder_gate import FP32_TOLERANCE, Expectation
from hasten.measure.non_finite import NOT_FINITE
from hasten.predictor import Predictor
from hasten.tasks import Encoded, Row

# Up to 96 items, in batches of a common size.
_MAX_BLOCKS, BLOCK_ITEMS = 12, 8
_MIN_BLOCKS = 4
# A variant exactly on the bound is rejected in 1.4 % of all cases after four blocks, in 0.1 % after twelve, and in at
# most 4 % by all nine tests together (Student's t, if the means of blocks are independent and normal).
_STANDARD_ERRORS = 4.0


@dataclass(frozen=True, slots=True)
class _Block:
    encoded: Encoded
    reference: Outputs


class Screening:
    """A sequential test on evenly spaced blocks of the rows that the gate judges."""

    def __init__(self, rows: Sequence[Row], expected: Expectation, gate: Gate, block_items: int = BLOCK_ITEMS) -> None:
        self._rows, self._expected, self._gate, self._block_items = rows, expected, gate, block_items
        self._blocks: list[_Block] = []
        # Rows that ran in the last test.
        self.rows_run = 0

    def reject(self, predictor: Predictor, variant: str) -> Verdict | None:
        """Return the verdict on a variant that is clearly inaccurate, None for any other."""
        agreements: list[Agreement] = []
        for agreement in self._agreements(predictor):
            agreements.append(agreement)
            if (reason := self._reason(predictor, agreements)) is not None:
                reason += f" in the first {self._items(agreements)} of {len(self._rows)} rows"
                return Verdict(variant, passed=False, reason=reason, agreement=_merge(agreements))
            # Errors in fp32 are defects, which show at once; what has none is judged on all rows later.
            if self._is_fp32(predictor) or self._is_clearly_above(predictor, agreements):
                break
        return None

    def clear_agreement(self, predictor: Predictor) -> Agreement | None:
        """Return the mean agreement of a variant that clearly passes, None if only all rows can tell.

        Only for agreements that vary from row to row: that no label flips in a few blocks proves little.
        """
        agreements: list[Agreement] = []
        for agreement in self._agreements(predictor):
            agreements.append(agreement)
            if agreement.flips is not None or self._reason(predictor, agreements) is not None:
                return None
            if self._is_clearly_above(predictor, agreements):
                return _merge(agreements)
            # The rest would cost as much as all rows.
            if 2 * len(agreements) >= len(self._blocks):
                return None
        return None

    def _agreements(self, predictor: Predictor) -> Iterator[Agreement]:
        self._blocks, self.rows_run = self._blocks or self._make_blocks(predictor), 0
        for block in self._blocks:
            self.rows_run += block.encoded.items
            groups = batch_in_order(len(block.encoded.batch), self._block_items)
            outputs = predictor.outputs(block.encoded, groups=groups)
            yield predictor.task.agree(outputs, block.reference, block.encoded, predictor.spec)

    def _items(self, agreements: Sequence[Agreement]) -> int:
        return sum(block.encoded.items for block in self._blocks[: len(agreements)])

    def _make_blocks(self, predictor: Predictor) -> list[_Block]:
        count = max(1, min(_MAX_BLOCKS, len(self._rows) // self._block_items))
        starts = [block * len(self._rows) // count for block in range(count)]
        bounds = [(start, min(start + self._block_items, len(self._rows))) for start in starts]
        signature = predictor.session.spec.signature
        return [
            _Block(predictor.encode(list(self._rows[start:end])), self._expected.between(start, end, signature))
            for start, end in bounds
        ]

    def _is_fp32(self, predictor: Predictor) -> bool:
        precision, reference = predictor.session.spec.precision, self._expected.precision
        return (precision if reference == Precision.FP32 else reference) == Precision.FP32

    def _reason(self, predictor: Predictor, agreements: Sequence[Agreement]) -> str | None:
        """Return why a variant is clearly inaccurate."""
        last = agreements[-1]
        if not last.is_finite:
            return NOT_FINITE
        if self._is_fp32(predictor):
            allowed = FP32_TOLERANCE * max(1.0, last.scale)
            return f"largest error {last.max_error:.1e} > {allowed:.1e} for fp32" if last.max_error > allowed else None
        # A drop of the metric shows on many rows only.
        if self._gate.max_drop is not None or self._standard_errors(predictor, agreements) >= -_STANDARD_ERRORS:
            return None
        return f"{last.measure} {_mean(agreements):.4f} < {self._bound(predictor):g}"

    def _is_clearly_above(self, predictor: Predictor, agreements: Sequence[Agreement]) -> bool:
        return self._gate.max_drop is None and self._standard_errors(predictor, agreements) >= _STANDARD_ERRORS

    def _standard_errors(self, predictor: Predictor, agreements: Sequence[Agreement]) -> float:
        """Return how many standard errors the mean agreement lies above the bound; 0 while it cannot be told."""
        if len(agreements) < max(2, min(_MIN_BLOCKS, len(self._blocks))):
            return 0.0
        values = [agreement.value for agreement in agreements]
        error = float(np.std(values, ddof=1)) / np.sqrt(len(values))
        distance = _mean(agreements) - self._bound(predictor)
        return float(distance / error) if error > 0 else float(np.inf * np.sign(distance)) if distance else 0.0

    def _bound(self, predictor: Predictor) -> float:
        return predictor.task.min_agreement if self._gate.min_agreement is None else self._gate.min_agreement


def _mean(agreements: Sequence[Agreement]) -> float:
    return float(np.mean([agreement.value for agreement in agreements]))


def _merge(agreements: Sequence[Agreement]) -> Agreement:
    return replace(
        agreements[-1],
        value=_mean(agreements),
        rows=sum(agreement.rows for agreement in agreements),
        max_error=max(agreement.max_error for agreement in agreements),
    )
