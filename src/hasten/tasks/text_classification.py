"""Which label fits a text, or a pair of texts: answers like transformers' pipeline of the same name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TypeAlias, TypedDict

import msgspec
import numpy as np

from hasten.core.errors import InputError
from hasten.core.registry import did_you_mean
from hasten.core.report import Agreement, Metric
from hasten.core.scores import CORRELATIONS, accuracy, correlated, macro_f1, micro_f1
from hasten.core.statistics import concordance, relative_error, row_cosines, spearman
from hasten.core.tensors import BATCH, FloatArray, Outputs
from hasten.core.tokenizer import Tokenizer
from hasten.tasks import Encoded, Row, TaskSpec, check_spread, is_number, not_finite, parse_texts, read_options

LOGITS = "logits"
MULTI_LABEL = "multi_label_classification"
REGRESSION = "regression"
_SAMPLE_PAIRS = 40


class Scoring(StrEnum):
    NONE = "none"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


class Label(TypedDict):
    label: str
    score: float


Answer: TypeAlias = Label | list[Label]
Text: TypeAlias = str | tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Given:
    # Left out, the answer is the one best label; given, even as 1, it is a list: the pipeline's own rule.
    top_k: int | msgspec.UnsetType | None = msgspec.UNSET
    function_to_apply: Scoring | None = None


@dataclass(frozen=True, slots=True)
class Options:
    labels: tuple[str, ...]
    scoring: Scoring
    top_k: int | None
    is_single: bool


class TextClassification:
    name = "text-classification"
    auto_class = "AutoModelForSequenceClassification"
    heads = ("ForSequenceClassification",)
    fields = ("text",)
    columns = ("text", "text_pair", "label", "score")
    takes_pairs = True
    is_detected = True
    outputs = (LOGITS,)
    axes = (BATCH,)
    min_agreement = 0.995

    def parse(self, payload: object) -> list[Text]:
        return parse_texts(payload)

    def options(self, spec: TaskSpec, given: Mapping[str, object]) -> Options:
        asked = read_options(_Given, given, any_case="function_to_apply")
        is_single = isinstance(asked.top_k, msgspec.UnsetType)
        top_k = 1 if isinstance(asked.top_k, msgspec.UnsetType) else asked.top_k
        if top_k is not None and top_k < 1:
            raise InputError(f"top_k is {top_k}; it must be at least 1, or null for all labels")
        return Options(spec.labels, asked.function_to_apply or _default_scoring(spec), top_k, is_single)

    def encode(self, items: Sequence[Text], tokenizer: Tokenizer, options: Options) -> Encoded:
        tokens = tokenizer.encode(items)
        return Encoded(tokens.batch, np.arange(len(items)), len(items), tokens.truncated, tokens.encodings)

    def decode(self, outputs: Outputs, encoded: Encoded, options: Options) -> list[Answer]:
        scores = apply_scoring(outputs[LOGITS], options.scoring)
        if options.is_single:
            best = scores.argmax(axis=1)
            return [
                Label(label=options.labels[label], score=float(row[label]))
                for row, label in zip(scores, best, strict=True)
            ]
        # Stable, so that equal scores keep the labels' own order, as the pipeline's sort does.
        order = np.argsort(-scores, axis=1, kind="stable")[:, : options.top_k]
        return [
            [Label(label=options.labels[label], score=float(row[label])) for label in places]
            for row, places in zip(scores, order, strict=True)
        ]

    def present(self, payload: object, answers: list[Answer], options: Options) -> object:
        if isinstance(payload, list | tuple):
            return answers
        # The pipeline wraps the one answer to a bare string, and only then.
        return answers if isinstance(payload, str) and options.is_single else answers[0]

    def sample(self, texts: Sequence[str], spec: TaskSpec) -> list[Row]:
        """Pairs beside single texts: a model that compares two is judged on what it is for."""
        short = [text for text in texts if len(text) < 300]
        pairs = pairwise(short[: _SAMPLE_PAIRS + 1])
        return [*({"text": text} for text in texts), *({"text": a, "text_pair": b} for a, b in pairs)]

    def gold(self, rows: Sequence[Row], spec: TaskSpec) -> list[object] | None:
        key = "score" if _is_regression(spec) else "label"
        if not any(key in row for row in rows):
            return None
        return [_gold(row.get(key), spec, place) for place, row in enumerate(rows, 1)]

    def metrics(self, gold: Sequence[object], spec: TaskSpec) -> tuple[str, ...]:
        if _is_regression(spec):
            check_spread(gold)
            return CORRELATIONS[::-1]
        return ("micro F1", "macro F1") if spec.problem == MULTI_LABEL else ("accuracy", "macro F1", "micro F1")

    def marks(self, outputs: Outputs, encoded: Encoded, gold: Sequence[object], spec: TaskSpec) -> FloatArray:
        """What is right and what was answered: two numbers, or two times a column for each label."""
        logits = outputs[LOGITS]
        if _is_regression(spec):
            answers: FloatArray = logits[:, :1].astype(np.float64)
        elif spec.problem == MULTI_LABEL:
            answers = (logits > 0).astype(np.float64)
        else:
            answers = logits.argmax(axis=1, keepdims=True).astype(np.float64)
        return np.hstack([np.asarray(gold, np.float64).reshape(len(gold), -1), answers])

    def metric(self, marks: FloatArray, spec: TaskSpec) -> Metric:
        if _is_regression(spec):
            return correlated(marks).named(CORRELATIONS[1])
        if spec.problem == MULTI_LABEL:
            wanted, found = np.hsplit(marks, 2)
            return Metric("micro F1", micro_f1(wanted, found), len(marks), {"macro F1": macro_f1(wanted, found)})
        wanted, found = marks.astype(np.int64).T
        also = {"macro F1": macro_f1(wanted, found), "micro F1": micro_f1(wanted, found)}
        return Metric("accuracy", accuracy(wanted, found), len(marks), also)

    def agree(self, outputs: Outputs, reference: Outputs, encoded: Encoded, spec: TaskSpec) -> Agreement:
        ours, theirs = outputs[LOGITS].astype(np.float64), reference[LOGITS].astype(np.float64)
        if not np.isfinite(ours).all():
            return not_finite("same label", ours, theirs, encoded)
        error = np.abs(ours - theirs).max(axis=1)
        if _is_regression(spec):
            measure, flips = "concordance", None
            value = min(concordance(ours[:, i], theirs[:, i]) for i in range(ours.shape[1]))
        else:
            measure = "same label"
            flipped = (
                ((ours > 0) != (theirs > 0)).any(axis=1)
                if spec.problem == MULTI_LABEL
                else ours.argmax(axis=1) != theirs.argmax(axis=1)
            )
            flips = int(flipped.sum())
            value = 1.0 - flips / len(flipped)
            error = error + flipped * 1e6  # a flip is worse than any error that flips nothing
        cosines = row_cosines(ours, theirs)
        return Agreement(
            measure=measure,
            value=value,
            rows=len(ours),
            max_error=float(np.abs(ours - theirs).max()),
            relative_error=relative_error(ours, theirs),
            scale=float(np.abs(theirs).max()),
            flips=flips,
            cosine_mean=float(cosines.mean()),
            cosine_min=float(cosines.min()),
            rank_correlation=float(np.mean([spearman(ours[:, i], theirs[:, i]) for i in range(ours.shape[1])])),
            top_k_overlap=_top_overlap(ours, theirs),
            worst=tuple(int(row) for row in np.argsort(-error)[:3]),
        )


def _default_scoring(spec: TaskSpec) -> Scoring:
    if spec.problem == REGRESSION:
        return Scoring.NONE
    if spec.problem == MULTI_LABEL or len(spec.labels) == 1:
        return Scoring.SIGMOID
    return Scoring.SOFTMAX


def _is_regression(spec: TaskSpec) -> bool:
    return spec.problem == REGRESSION or len(spec.labels) == 1


def apply_scoring(logits: FloatArray, scoring: Scoring) -> FloatArray:
    logits = logits.astype(np.float32)
    if scoring is Scoring.NONE:
        return logits
    if scoring is Scoring.SIGMOID:
        powers = np.exp(-np.abs(logits))  # never above one, so that no logit overflows
        sigmoid: FloatArray = np.where(logits >= 0, 1.0, powers) / (1.0 + powers)
        return sigmoid
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    softmax: FloatArray = powers / powers.sum(axis=1, keepdims=True)
    return softmax


def _top_overlap(ours: FloatArray, theirs: FloatArray) -> float | None:
    """Share of the five best labels that are the same; says nothing where there are only a few."""
    if ours.shape[1] <= 5:
        return None
    best_ours, best_theirs = np.argsort(-ours, axis=1)[:, :5], np.argsort(-theirs, axis=1)[:, :5]
    shared = [len(set(a) & set(b)) for a, b in zip(best_ours.tolist(), best_theirs.tolist(), strict=True)]
    return float(np.mean(shared) / 5)


def _gold(value: object, spec: TaskSpec, place: int) -> object:
    if _is_regression(spec):
        if is_number(value):
            return float(value)
        raise InputError(f'row {place} has no number in "score": {value!r:.60}')
    if spec.problem == MULTI_LABEL:
        names = value if isinstance(value, list) else [value]
        present = {_label_index(name, spec, place) for name in names}
        return [index in present for index in range(len(spec.labels))]
    return _label_index(value, spec, place)


def _label_index(value: object, spec: TaskSpec, place: int) -> int:
    if isinstance(value, str) and value in spec.labels:
        return spec.labels.index(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(spec.labels):
        return value
    if value is None:
        raise InputError(f'row {place} has no "label", though other rows have one')
    shown = ", ".join(spec.labels[:8]) + (", …" if len(spec.labels) > 8 else "")
    raise InputError(
        f"row {place} has the label {value!r:.60}, which the model does not know"
        f"{did_you_mean(str(value), spec.labels)}",
        hint=f"its labels: {shown}",
    )


TASK = TextClassification()
