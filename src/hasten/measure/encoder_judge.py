"""Judge the variants of an encoder against stored outputs or, on the user's rows, against the outputs of its graph."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from hasten.backends import Artifact, RunOptions
from hasten.bundle import Bundle
from hasten.core.errors import PlanError
from hasten.core.plan import Gate
from hasten.core.progress import SilentProgress
from hasten.core.report import Verdict
from hasten.generation.generator import Generator
from hasten.measure.encoder_gate import GRAPH, Expectation, batch_sizes, expect, verify
from hasten.measure.evaluation_rows import check_rows
from hasten.measure.non_finite import with_non_finite_hint
from hasten.measure.verify_bundle import Judge, Verification, to_candidate
from hasten.predictor import Predictor, open_session
from hasten.tasks import TASKS, Row

logger = logging.getLogger("hasten")

# Enough to see that instructions or a library compute otherwise; if these rows do not pass, all rows decide.
_QUICK_CHECK_ROWS = 64


class EncoderJudge(Judge):
    """Judges encoder variants; on the user's rows by the graph, which must reproduce the stored outputs first."""

    def __init__(self, verification: Verification) -> None:
        bundle, rows = verification.bundle, verification.rows
        gate, progress = verification.gate, verification.progress
        spec, option = bundle.manifest.task, verification.user_gate.needing_labels
        if rows is not None:
            # Before anything runs: reject rows that cannot be parsed and labels that cannot be judged by.
            for note in check_rows(TASKS.get(spec.name), spec, rows, gate, option):
                logger.warning("%s", note)
        bundle.check()
        self._verification, self._tokenizer, stored = verification, bundle.tokenizer(), bundle.reference()
        with open_session(bundle.graph(), verification.options) as session:
            graph = Predictor(spec, self._tokenizer, session)
            expected = expect(graph, stored.rows, progress, stored.outputs, gate.metric)
            self.preliminary = [to_candidate(verify(graph, GRAPH, expected, gate, progress))]
            if rows is not None:
                expected = expect(graph, rows, progress, metric=gate.metric)
        if option is not None and expected.metric is None:
            raise PlanError(f"{option} needs labels, and these rows have none", hint="pass --data with labelled rows")
        self._expected = expected

    def __call__(self, artifact: Artifact) -> Verdict:
        verification = self._verification
        with open_session(artifact, verification.options) as session:
            predictor = Predictor(verification.bundle.manifest.task, self._tokenizer, session)
            return _judge(verification, artifact, predictor, self._expected)

    @staticmethod
    def judged_rows(bundle: Bundle, rows: Sequence[Row] | None) -> Sequence[Row]:
        return rows or bundle.reference().rows

    @staticmethod
    def judge_opened(opened: Predictor | Generator, artifact: Artifact, bundle: Bundle, options: RunOptions) -> Verdict:
        """Judge the agreement on a few rows; if it does not suffice, judge all rows as `hasten verify` does."""
        assert isinstance(opened, Predictor)
        manifest, stored = bundle.manifest, bundle.reference()
        expected = expect(opened, stored.rows, SilentProgress(), stored.outputs, manifest.gate.metric)
        expected = replace(expected, precision=manifest.graph_precision)
        first = Expectation(
            opened.encode(list(stored.rows[:_QUICK_CHECK_ROWS])),
            expected.first(_QUICK_CHECK_ROWS, manifest.signature),
            precision=manifest.graph_precision,
        )
        gate = Gate(manifest.gate.min_agreement)
        verdict = verify(opened, artifact.variant.name, first, gate, SilentProgress())
        if verdict.passed:
            return verdict
        verification = Verification(bundle, manifest.gate, options, SilentProgress())
        return _judge(verification, artifact, opened, expected)


def _judge(verification: Verification, artifact: Artifact, predictor: Predictor, expected: Expectation) -> Verdict:
    name, bundle = artifact.variant.name, verification.bundle
    sizes = batch_sizes(bundle, name)
    verdict = verify(predictor, name, expected, verification.gate, verification.progress, sizes)
    return with_non_finite_hint(verdict, artifact, expected.encoded.batch, verification.options)
