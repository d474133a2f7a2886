"""Judge the variants of a generative model along its stored answers, and by the likelihood of texts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from hasten.backends import Artifact, Decoder, RunOptions
from hasten.bundle import Bundle
from hasten.core.errors import PlanError
from hasten.core.generation_types import TEXT_GENERATION
from hasten.core.plan import Gate
from hasten.core.progress import SilentProgress
from hasten.core.report import Verdict
from hasten.core.variant import Precision
from hasten.generation.generator import SLOTS, Generator, open_decoder
from hasten.measure.generation_gate import GenerationReference, ScoredText, check_gate, judge_decoder, perplexity
from hasten.measure.generation_reference import encode_texts, prompts_of, stored_reference, texts_of
from hasten.measure.verify_bundle import Judge, Verification
from hasten.predictor import Predictor, probe
from hasten.tasks import Row

logger = logging.getLogger("hasten")


class GenerationJudge(Judge):
    """Judges decoder variants along the stored answers.

    For the user's texts, the fp32 variant provides the reference likelihood, after it reproduced the stored answers
    token for token.
    """

    def __init__(self, verification: Verification) -> None:
        bundle, option = verification.bundle, verification.user_gate.needing_labels
        check_gate(verification.user_gate, bundle.manifest.task.name)
        texts = _texts(bundle, verification.rows) if verification.rows is not None else None
        bundle.check()
        self._verification, self._reference = verification, stored_reference(bundle)
        self._fp32_verdict: Verdict | None = None
        if texts is not None:
            self._reference = replace(self._reference, texts=texts, metric=None)
            self._fp32_verdict = self._judge_fp32()
            if self._fp32_verdict is not None and self._fp32_verdict.passed:
                self._reference = replace(self._reference, metric=self._fp32_verdict.metric)
        if option is not None and self._reference.metric is None:
            if texts is None:
                raise PlanError(f"{option} needs texts to score, and this bundle stores none", hint="pass --data FILE")
            raise PlanError(
                f"{option} needs the reference likelihood of these texts, and no fp32 variant of this bundle reproduces"
                " the reference here",
                hint="build it with --keep all",
            )

    def __call__(self, artifact: Artifact) -> Verdict:
        if self._fp32_verdict is not None and self._fp32_verdict.variant == artifact.variant.name:
            return replace(self._fp32_verdict, reference_metric=self._reference.metric)
        return self._judge(artifact)

    @staticmethod
    def judged_rows(bundle: Bundle, rows: Sequence[Row] | None) -> Sequence[Row]:
        """Return the stored prompts, which the user's texts do not replace."""
        return prompts_of(stored_reference(bundle), bundle.tokenizer())

    @staticmethod
    def judge_opened(opened: Predictor | Generator, artifact: Artifact, bundle: Bundle, options: RunOptions) -> Verdict:
        """Judge all stored answers, which are few and decoded together, but score no texts."""
        assert isinstance(opened, Generator)
        verification = Verification(bundle, Gate(bundle.manifest.gate.min_agreement), options, SilentProgress())
        reference = replace(stored_reference(bundle), texts=())
        return _judge(verification, artifact, opened.decoder, reference)

    def _judge_fp32(self) -> Verdict | None:
        bundle = self._verification.bundle
        entries = (entry for entry in bundle.manifest.variants if entry.precision is Precision.FP32 and probe(entry).ok)
        entry = next(entries, None)
        return None if entry is None else self._judge(bundle.artifact(entry))

    def _judge(self, artifact: Artifact) -> Verdict:
        with closing(open_decoder(artifact, self._verification.options, SLOTS)) as decoder:
            return _judge(self._verification, artifact, decoder, self._reference)


def _judge(verification: Verification, artifact: Artifact, decoder: Decoder, reference: GenerationReference) -> Verdict:
    variant, gate, progress = artifact.variant, verification.gate, verification.progress
    verdict = judge_decoder(decoder, variant.name, variant.precision, reference, gate, progress)
    built = verification.bundle.entry(variant.name).metric if verification.rows is not None else None
    if built is None:
        return verdict
    return replace(verdict, notes=(f"{perplexity(built)} on the texts it was built with",))


def _texts(bundle: Bundle, rows: Sequence[Row]) -> tuple[ScoredText, ...]:
    task, tokenizer = bundle.manifest.task.name, bundle.tokenizer()
    if task != TEXT_GENERATION:
        raise PlanError(f"--data provides texts to score, which {task} does not support", hint="leave out --data")
    texts, truncated = encode_texts(texts_of(rows), tokenizer)
    if truncated:
        limit = tokenizer.spec.max_length
        logger.warning("%d of %d texts were truncated to the model's limit of %d tokens", truncated, len(rows), limit)
    return tuple(map(ScoredText.of, texts))
