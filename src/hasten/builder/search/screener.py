"""Time a variant briefly and judge it on a few rows, to tell whether judging it on all rows can pay."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from hasten.backends import BACKENDS, Artifact, RunOptions, Session
from hasten.core.plan import Plan
from hasten.core.report import Agreement, Verdict
from hasten.core.tensors import Batch, Signature, tile_rows
from hasten.measure.encoder_gate import Expectation
from hasten.measure.screening import BLOCK_ITEMS, Screening
from hasten.predictor import Predictor
from hasten.tasks import Row

# A variant is timed briefly when it is screened: in up to five pairs of runs, and in two if they take this long.
_MIN_PAIRS, _MAX_PAIRS, _PAIRS_S = 2, 5, 1.5
# Time for the threads of the other session to stop spinning.
_SETTLE_S = 0.01


@dataclass
class Screener:
    """Compares variants with the first one in speed, and with the reference on a few rows."""

    plan: Plan
    signature: Signature
    rows: Sequence[Row]
    expected: Expectation
    # The first variant, which the others are timed with. It is opened for each of them: its weights would otherwise be
    # in memory while others are made.
    _first: Artifact | None = None
    # Its session once its files are removed.
    _held: Session | None = None
    _screenings: dict[int, Screening] = field(default_factory=dict)

    def relative_time(self, session: Session, artifact: Artifact) -> float:
        """Return the time of a variant relative to that of the first one, in alternating runs at the optimal shape."""
        if self._first is None:
            self._first = artifact
            return 1.0
        shape = self.plan.shapes.optimal
        lengths = np.full(shape.batch, min(shape.sequence, self.signature.max_length))
        batch = tile_rows(self.expected.encoded.batch, lengths, self.signature.mask_id)
        with ExitStack() as stack:
            sessions = (session, self._held or stack.enter_context(self._open_first()))
            for each in sessions:
                each.run(batch)
            ratios: list[float] = []
            begin = time.perf_counter()
            while len(ratios) < _MIN_PAIRS or (len(ratios) < _MAX_PAIRS and time.perf_counter() - begin < _PAIRS_S):
                seconds, first_s = (_run_s(each, batch) for each in sessions)
                ratios.append(seconds / first_s)
        return float(np.median(ratios))

    def reject(self, predictor: Predictor, variant: str) -> tuple[Verdict | None, float]:
        """Return the verdict on a variant that a few rows show to be inaccurate, or None, and the seconds per row."""
        screening = self._screening()
        begin = time.perf_counter()
        rejection = screening.reject(predictor, variant)
        return rejection, (time.perf_counter() - begin) / max(1, screening.rows_run)

    def sample(self, predictor: Predictor) -> Callable[[int], Agreement | None]:
        """Return a function of the batch size: the agreement of a variant that clearly passes on some of the rows."""
        return lambda size: self._screening(size).clear_agreement(predictor)

    def hold(self, artifact: Artifact) -> None:
        """Keep the first variant in memory if these are its files, since they will be removed."""
        if artifact is self._first and self._held is None:
            self._held = self._open_first()

    def close(self) -> None:
        """Free the first variant."""
        if self._held is not None:
            self._held.close()
        self._first = self._held = None

    def _open_first(self) -> Session:
        assert self._first is not None
        return BACKENDS.get(self._first.variant.backend).open(self._first, RunOptions(self.plan.threads))

    def _screening(self, block_items: int = BLOCK_ITEMS) -> Screening:
        if block_items not in self._screenings:
            self._screenings[block_items] = Screening(self.rows, self.expected, self.plan.gate, block_items)
        return self._screenings[block_items]


def _run_s(session: Session, batch: Batch) -> float:
    time.sleep(_SETTLE_S)
    begin = time.perf_counter()
    session.run(batch)
    return time.perf_counter() - begin
