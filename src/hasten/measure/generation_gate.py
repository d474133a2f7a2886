"""The accuracy gate of text generation: a variant must choose the same tokens along the reference answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from hasten.backends import Decoder
from hasten.core.errors import PlanError
from hasten.core.generation_types import TEXT_GENERATION
from hasten.core.plan import Gate
from hasten.core.progress import Progress, step
from hasten.core.report import Agreement, Metric, Verdict, find_metric
from hasten.core.tensors import FloatArray, IntArray
from hasten.core.variant import Precision
from hasten.measure.encoder_gate import judge

LIKELIHOOD, PERPLEXITY = "likelihood per token", "perplexity"
# The default share of reference tokens that a variant must choose too. SmolLM2 keeps more with 8-bit weights, and fewer
# with 4-bit ones.
MIN_AGREEMENT = 0.9


@dataclass(frozen=True, slots=True)
class GreedyReference:
    """The tokens that the reference model generated greedily after a prompt, and its logits for the first of them.

    During a build there are logits for all tokens; a bundle stores few.
    """

    prompt: IntArray
    tokens: IntArray
    logits: FloatArray


@dataclass(frozen=True, slots=True)
class ScoredText:
    """A text to score by its likelihood: its first token is the prompt of the others."""

    prompt: IntArray
    tokens: IntArray

    @classmethod
    def of(cls, text: IntArray) -> ScoredText:
        """Split the tokens of a text."""
        return cls(text[:1], text[1:])


Forced = TypeVar("Forced", GreedyReference, ScoredText)


@dataclass(frozen=True, slots=True)
class GenerationReference:
    """The answers of the reference model, and texts with the likelihood it assigns to them."""

    answers: tuple[GreedyReference, ...]
    texts: tuple[ScoredText, ...]
    # The likelihood of the texts under the reference model, if it is known.
    metric: Metric | None = None


def judge_decoder(
    decoder: Decoder, variant: str, precision: Precision, reference: GenerationReference, gate: Gate, progress: Progress
) -> Verdict:
    """Judge a variant: in fp32 every token must be the same, in lower precision the share that the gate requires."""
    with step(progress, f"verify {variant}", total=len(reference.answers) + len(reference.texts)):
        agreed = measure_agreement(decoder, reference.answers, progress)
        metric = None
        if agreed.is_finite and reference.texts:
            metric = likelihood(_score(decoder, reference.texts, progress))
    passed, reason = judge(agreed, metric, reference.metric, precision, gate, MIN_AGREEMENT, is_strict=True)
    if metric is not None and precision is not Precision.FP32:
        reason += f", {perplexity(metric)}"
    return Verdict(variant, passed, reason, agreed, metric, reference.metric)


def log_likelihoods(logits: FloatArray, tokens: IntArray) -> FloatArray:
    """Return the log-likelihood of each token under the logits before it."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    chosen = np.take_along_axis(shifted, np.asarray(tokens, np.int64)[:, None], axis=-1)[:, 0]
    result: FloatArray = chosen - np.log(np.exp(shifted).sum(axis=-1))
    return result


def measure_agreement(decoder: Decoder, answers: Sequence[GreedyReference], progress: Progress) -> Agreement:
    """Measure how many tokens of the reference answers this decoder would choose too, given the ones before."""
    same = total = 0
    squares = reference = largest = scale = 0.0
    flipped: list[int] = []
    is_finite = True
    for index, (answer, logits) in enumerate(_teacher_forced_logits(decoder, answers)):
        progress.advance()
        difference = logits[: len(answer.logits)] - answer.logits
        is_finite &= bool(np.isfinite(logits).all())
        equal = logits.argmax(axis=-1) == answer.tokens
        same, total = same + int(equal.sum()), total + len(equal)
        flipped += [] if equal.all() else [index]
        squares += float((difference.astype(np.float64) ** 2).sum())
        reference += float((answer.logits.astype(np.float64) ** 2).sum())
        largest = max(largest, float(np.abs(difference).max()))
        scale = max(scale, float(np.abs(answer.logits).max()))
    return Agreement(
        measure="same next token",
        value=same / max(1, total) if is_finite else 0.0,
        rows=total,
        max_error=largest,
        relative_error=float(np.sqrt(squares / max(reference, 1e-12))),
        scale=scale,
        is_finite=is_finite,
        flips=total - same,
        worst=tuple(flipped[:3]),
    )


def _score(decoder: Decoder, texts: Sequence[ScoredText], progress: Progress) -> Iterator[FloatArray]:
    for text, logits in _teacher_forced_logits(decoder, texts):
        progress.advance()
        yield log_likelihoods(logits, text.tokens)


def _teacher_forced_logits(decoder: Decoder, rows: Sequence[Forced]) -> Iterator[tuple[Forced, FloatArray]]:
    """Yield each row with the logits of its tokens, given the ones before; as many rows at once as there are slots."""
    for start in range(0, len(rows), decoder.slots):
        group = rows[start : start + decoder.slots]
        logits = [[decoder.prefill(slot, row.prompt)] for slot, row in enumerate(group)]
        for position in range(max(len(row.tokens) for row in group) - 1):
            slots = [slot for slot, row in enumerate(group) if position < len(row.tokens) - 1]
            ids = np.array([group[slot].tokens[position] for slot in slots], np.int32)
            for slot, next_logits in zip(slots, decoder.decode(slots, ids), strict=True):
                logits[slot].append(next_logits)
        for slot in range(len(group)):
            decoder.free(slot)
        yield from zip(group, map(np.stack, logits), strict=True)


def likelihood(rows: Iterable[FloatArray]) -> Metric | None:
    """Return the mean likelihood per token of log-likelihoods, one row per text, or None without texts.

    Higher is better, as for every metric: it is the inverse of the perplexity.
    """
    texts = list(rows)
    if not texts:
        return None
    mean = float(np.concatenate(texts).mean())
    return Metric(LIKELIHOOD, float(np.exp(mean)), len(texts), {PERPLEXITY: float(np.exp(-mean))})


def perplexity(metric: Metric) -> str:
    """Format the perplexity of a likelihood."""
    return f"{PERPLEXITY} {metric.other_metrics[PERPLEXITY]:.3f}"


def check_gate(gate: Gate, task: str) -> None:
    """Raise PlanError if the gate cannot be applied to the task, before anything is loaded."""
    if (option := gate.needing_labels) is not None and task != TEXT_GENERATION:
        raise PlanError(
            f"{option} bounds the likelihood of texts, which {task} does not measure",
            hint="use --min-agreement SHARE, which bounds the tokens that differ",
        )
    if gate.metric is not None and find_metric(gate.metric, (LIKELIHOOD, PERPLEXITY)) == PERPLEXITY:
        raise PlanError(
            f"--max-drop bounds the {LIKELIHOOD}, and {PERPLEXITY}, its inverse, grows", hint="leave out --metric"
        )
