"""Reject clearly inaccurate variants on a few rows, before the accuracy gate judges them on all.

A sequential test: rows run in blocks, and a variant is rejected as soon as the mean agreement of its blocks lies
several standard errors below the bound. Variants that it does not reject are judged on all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
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
_BLOCKS, _BLOCK_ITEMS = 12, 8
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

    def __init__(self, rows: Sequence[Row], expected: Expectation, gate: Gate) -> None:
        self._rows, self._expected, self._gate = rows, expected, gate
        self._blocks: list[_Block] = []

    def reject(self, predictor: Predictor, variant: str) -> Verdict | None:
        """Return the verdict on a variant that is clearly inaccurate, None for any other."""
        task = predictor.task
        self._blocks = self._blocks or self._make_blocks(predictor)
        agreements: list[Agreement] = []
        for block in self._blocks:
            outputs = predictor.outputs(block.encoded, groups=batch_in_order(len(block.encoded.batch), _BLOCK_ITEMS))
            agreements.append(task.agree(outputs, block.reference, block.encoded, predictor.spec))
            if (reason := self._reason(predictor, agreements)) is not None:
                items = sum(each.encoded.items for each in self._blocks[: len(agreements)])
                reason += f" in the first {items} of {len(self._rows)} rows"
                return Verdict(variant, passed=False, reason=reason, agreement=_merge(agreements))
        return None

    def _make_blocks(self, predictor: Predictor) -> list[_Block]:
        count = max(1, min(_BLOCKS, len(self._rows) // _BLOCK_ITEMS))
        starts = [block * len(self._rows) // count for block in range(count)]
        bounds = [(start, min(start + _BLOCK_ITEMS, len(self._rows))) for start in starts]
        signature = predictor.session.spec.signature
        return [
            _Block(predictor.encode(list(self._rows[start:end])), self._expected.between(start, end, signature))
            for start, end in bounds
        ]

    def _reason(self, predictor: Predictor, agreements: Sequence[Agreement]) -> str | None:
        last, reference_precision = agreements[-1], self._expected.precision
        if not last.is_finite:
            return NOT_FINITE
        precision = predictor.session.spec.precision
        if (precision if reference_precision == Precision.FP32 else reference_precision) == Precision.FP32:
            allowed = FP32_TOLERANCE * max(1.0, last.scale)
            return f"largest error {last.max_error:.1e} > {allowed:.1e} for fp32" if last.max_error > allowed else None
        # A drop of the metric shows on many rows only.
        if self._gate.max_drop is not None or len(agreements) < min(_MIN_BLOCKS, len(self._blocks)):
            return None
        bound = predictor.task.min_agreement if self._gate.min_agreement is None else self._gate.min_agreement
        values = np.array([agreement.value for agreement in agreements])
        error = float(values.std(ddof=1)) / np.sqrt(len(values)) if len(values) > 1 else np.inf
        if values.mean() + _STANDARD_ERRORS * error >= bound:
            return None
        return f"{last.measure} {values.mean():.4f} < {bound:g}"


def _merge(agreements: Sequence[Agreement]) -> Agreement:
    return replace(
        agreements[-1],
        value=float(np.mean([agreement.value for agreement in agreements])),
        rows=sum(agreement.rows for agreement in agreements),
        max_error=max(agreement.max_error for agreement in agreements),
    )
