"""The gate for models that write: along the original's own answers, does a variant choose the same words?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from hasten.backends import Decoder
from hasten.core.errors import PlanError
from hasten.core.generation import TEXT_GENERATION
from hasten.core.plan import Gate
from hasten.core.progress import Progress, step
from hasten.core.report import Agreement, Metric, Verdict, find_metric
from hasten.core.tensors import FloatArray, IntArray
from hasten.core.variant import Precision
from hasten.measure.fault import NOT_FINITE
from hasten.measure.verify import FP32_TOLERANCE

LIKELIHOOD, PERPLEXITY = "likelihood per token", "perplexity"
# Of the words that the original chooses after its own. SmolLM2's eight-bit weights keep more, its four-bit ones fewer.
MIN_AGREEMENT = 0.9
_INSTEAD = "--min-agreement SHARE bounds the words that are chosen otherwise"


@dataclass(frozen=True, slots=True)
class Answered:
    """What the original wrote after a prompt, taking the likeliest word each time, and its logits for the first ones.

    For all of them while it is built; a bundle keeps few.
    """

    prompt: IntArray
    tokens: IntArray
    logits: FloatArray


@dataclass(frozen=True, slots=True)
class Read:
    """A text to find likely: its first token, and those after it."""

    prompt: IntArray
    tokens: IntArray

    @classmethod
    def of(cls, text: IntArray) -> Read:
        return cls(text[:1], text[1:])


Followed = TypeVar("Followed", Answered, Read)


@dataclass(frozen=True, slots=True)
class Sample:
    answers: tuple[Answered, ...]
    texts: tuple[Read, ...]
    # How likely the original finds the texts; None where nobody knows.
    metric: Metric | None = None


def judge_decoder(
    decoder: Decoder, variant: str, precision: Precision, sample: Sample, gate: Gate, progress: Progress
) -> Verdict:
    """In fp32 each word must be the same; with weights of fewer bits, the share that the gate asks for."""
    with step(progress, f"verify {variant}", total=len(sample.answers) + len(sample.texts)):
        found = agreement(decoder, sample.answers, progress)
        metric = None
        if found.is_finite and sample.texts:
            metric = likelihood(_read(decoder, sample.texts, progress))
    passed, reason = _judge(found, metric, sample.metric, precision, gate)
    return Verdict(variant, passed, reason, found, metric, sample.metric)


def log_likelihoods(logits: FloatArray, tokens: IntArray) -> FloatArray:
    """Of each token by the logits before it."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    chosen = np.take_along_axis(wide, np.asarray(tokens, np.int64)[:, None], axis=-1)[:, 0]
    found: FloatArray = chosen - np.log(np.exp(wide).sum(axis=-1))
    return found


def agreement(decoder: Decoder, answers: Sequence[Answered], progress: Progress) -> Agreement:
    """Along the original's own answers: how many of its words are the likeliest here too."""
    same = total = 0
    squares = reference = largest = scale = 0.0
    flipped: list[int] = []
    is_finite = True
    for place, (answer, logits) in enumerate(_follow(decoder, answers)):
        progress.advance()
        difference = logits[: len(answer.logits)] - answer.logits
        is_finite &= bool(np.isfinite(logits).all())
        equal = logits.argmax(axis=-1) == answer.tokens
        same, total = same + int(equal.sum()), total + len(equal)
        flipped += [] if equal.all() else [place]
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


def _read(decoder: Decoder, texts: Sequence[Read], progress: Progress) -> Iterator[FloatArray]:
    for text, logits in _follow(decoder, texts):
        progress.advance()
        yield log_likelihoods(logits, text.tokens)


def _follow(decoder: Decoder, rows: Sequence[Followed]) -> Iterator[tuple[Followed, FloatArray]]:
    """The logits for each token of a row, the ones before it given; as many rows together as there are slots."""
    for start in range(0, len(rows), decoder.slots):
        group = rows[start : start + decoder.slots]
        found = [[decoder.begin(slot, row.prompt)] for slot, row in enumerate(group)]
        for place in range(max(len(row.tokens) for row in group) - 1):
            slots = [slot for slot, row in enumerate(group) if place < len(row.tokens) - 1]
            logits = decoder.step(slots, np.array([group[slot].tokens[place] for slot in slots], np.int32))
            for slot, own in zip(slots, logits, strict=True):
                found[slot].append(own)
        for slot in range(len(group)):
            decoder.end(slot)
        yield from zip(group, map(np.stack, found), strict=True)


def likelihood(rows: Iterable[FloatArray]) -> Metric | None:
    """Of log-likelihoods, a row a text. Higher is better: the inverse of the perplexity, which people know it by."""
    found = list(rows)
    if not found:
        return None
    mean = float(np.concatenate(found).mean())
    return Metric(LIKELIHOOD, float(np.exp(mean)), len(found), {PERPLEXITY: float(np.exp(-mean))})


def perplexity(metric: Metric) -> str:
    return f"{PERPLEXITY} {metric.also[PERPLEXITY]:.3f}"


def check_gate(gate: Gate, task: str) -> None:
    """Refuse what cannot be judged by, before anything is read."""
    if (option := gate.needing_labels) is not None and task != TEXT_GENERATION:
        raise PlanError(f"{option} goes by how likely texts are, and {task} reads none by itself", hint=_INSTEAD)
    if gate.metric is not None and find_metric(gate.metric, (LIKELIHOOD, PERPLEXITY)) == PERPLEXITY:
        raise PlanError(
            f"--max-drop goes by the {LIKELIHOOD}: {PERPLEXITY}, its inverse, grows", hint="without --metric"
        )


def _judge(
    agreement: Agreement, metric: Metric | None, reference: Metric | None, precision: Precision, gate: Gate
) -> tuple[bool, str]:
    if not agreement.is_finite:
        return False, NOT_FINITE
    told = f"{agreement.measure} {agreement.value:.4f}"
    if precision is Precision.FP32:
        if agreement.flips:
            return False, f"{told}: in fp32 each must be"
        allowed = FP32_TOLERANCE * max(1.0, agreement.scale)
        passed = agreement.max_error <= allowed
        return passed, f"largest error {agreement.max_error:.1e} {'≤' if passed else '>'} {allowed:.1e} for fp32"
    if gate.max_drop is not None and metric is not None and reference is not None:
        drop = 100 * (reference.value - metric.value)
        if drop > gate.max_drop:
            return False, f"{metric.name} drop {drop:.2f} points > {gate.max_drop:g}"
    least = MIN_AGREEMENT if gate.min_agreement is None else gate.min_agreement
    passed = agreement.value >= least
    likely = "" if metric is None else f", {perplexity(metric)}"
    return passed, f"{told} {'≥' if passed else '<'} {least:g}{likely}"
