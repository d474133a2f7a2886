"""Classify texts or pairs of texts, like transformers' pipeline of the same name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TypeAlias, TypedDict

import msgspec
import numpy as np

from hasten.core.errors import InputError
from hasten.core.report import Agreement, Metric
from hasten.core.tensors import BATCH, FloatArray, Outputs
from hasten.core.text.input_checks import check_min, parse_texts
from hasten.core.text.tokenizer import Tokenizer
from hasten.metrics.agreement import compare, find_non_finite
from hasten.metrics.labels import CORRELATIONS, accuracy, correlation, macro_f1, micro_f1
from hasten.metrics.statistics import concordance, mean_spearman, row_cosines, softmax, top_k_overlap
from hasten.tasks import Encoded, Row, Task, TaskSpec, read_options
from hasten.tasks._labels import check_spread, find_label, is_number, read_labels, require_label

LOGITS = "logits"
MULTI_LABEL = "multi_label_classification"
REGRESSION = "regression"
_SAMPLE_PAIRS = 40
# The number of best labels that are compared, if there are more.
_TOP_K = 5


class Scoring(StrEnum):
    """The function that turns logits into scores."""

    NONE = "none"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


class Label(TypedDict):
    """A label and its score."""

    label: str
    score: float


Answer: TypeAlias = Label | list[Label]
Text: TypeAlias = str | tuple[str, str]


@dataclass(frozen=True, slots=True)
class _RawOptions:
    # Without it the answer is the best label; with it, even if it is 1, a list: the pipeline's rule.
    top_k: int | msgspec.UnsetType | None = msgspec.UNSET
    function_to_apply: Scoring | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a request, with the model's defaults."""

    labels: tuple[str, ...]
    scoring: Scoring
    top_k: int | None
    is_single: bool


class TextClassification(Task[Text, Answer, Options]):
    """One label per text, several (multi-label), or a number (regression)."""

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

    def options(self, spec: TaskSpec, values: Mapping[str, object]) -> Options:
        raw = read_options(_RawOptions, values, any_case="function_to_apply")
        is_single = isinstance(raw.top_k, msgspec.UnsetType)
        top_k = 1 if isinstance(raw.top_k, msgspec.UnsetType) else raw.top_k
        check_min("top_k", top_k, alternative=", or null for all labels")
        return Options(spec.labels, raw.function_to_apply or _default_scoring(spec), top_k, is_single)

    def encode(self, items: Sequence[Text], tokenizer: Tokenizer, options: Options) -> Encoded:
        return Encoded.of(tokenizer.encode(items))

    def decode(self, outputs: Outputs, encoded: Encoded, options: Options) -> list[Answer]:
        scores = apply_scoring(outputs[LOGITS], options.scoring)
        if options.is_single:
            best = scores.argmax(axis=1)
            highest = np.take_along_axis(scores, best[:, None], axis=1)[:, 0]
            return [
                Label(label=options.labels[label], score=score)
                for label, score in zip(best.tolist(), highest.tolist(), strict=True)
            ]
        # A stable sort keeps the order of labels with equal scores, as the pipeline's does.
        order = np.argsort(-scores, axis=1, kind="stable")[:, : options.top_k]
        highest = np.take_along_axis(scores, order, axis=1)
        return [
            [Label(label=options.labels[label], score=score) for label, score in zip(*row, strict=True)]
            for row in zip(order.tolist(), highest.tolist(), strict=True)
        ]

    def present(self, payload: object, answers: list[Answer], options: Options) -> object:
        if isinstance(payload, list | tuple):
            return answers
        # The pipeline wraps the answer in a list only for a bare string.
        return answers if isinstance(payload, str) and options.is_single else answers[0]

    def sample(self, texts: Sequence[str], spec: TaskSpec) -> list[Row]:
        """Return single texts and pairs, so that a model for pairs is verified on pairs too."""
        short = [text for text in texts if len(text) < 300]
        pairs = pairwise(short[: _SAMPLE_PAIRS + 1])
        return [*({"text": text} for text in texts), *({"text": a, "text_pair": b} for a, b in pairs)]

    def gold(self, rows: Sequence[Row], spec: TaskSpec) -> list[object] | None:
        key = "score" if _is_regression(spec) else "label"
        return read_labels(rows, key, lambda row, position: _gold(row, spec, position))

    def metrics(self, gold: Sequence[object], spec: TaskSpec) -> tuple[str, ...]:
        if _is_regression(spec):
            check_spread(gold)
            return CORRELATIONS[::-1]
        return ("micro F1", "macro F1") if spec.problem == MULTI_LABEL else ("accuracy", "macro F1", "micro F1")

    def item_scores(self, outputs: Outputs, encoded: Encoded, gold: Sequence[object], spec: TaskSpec) -> FloatArray:
        """Return expected and predicted labels: one column each, or one column per label each."""
        logits = outputs[LOGITS]
        if _is_regression(spec):
            answers: FloatArray = logits[:, :1].astype(np.float64)
        elif spec.problem == MULTI_LABEL:
            answers = (logits > 0).astype(np.float64)
        else:
            answers = logits.argmax(axis=1, keepdims=True).astype(np.float64)
        return np.hstack([np.asarray(gold, np.float64).reshape(len(gold), -1), answers])

    def metric(self, item_scores: FloatArray, spec: TaskSpec) -> Metric:
        if _is_regression(spec):
            return correlation(item_scores).named(CORRELATIONS[1])
        if spec.problem == MULTI_LABEL:
            expected, predicted = np.hsplit(item_scores, 2)
            return Metric(
                "micro F1", micro_f1(expected, predicted), len(item_scores), {"macro F1": macro_f1(expected, predicted)}
            )
        expected, predicted = item_scores.astype(np.int64).T
        also = {"macro F1": macro_f1(expected, predicted), "micro F1": micro_f1(expected, predicted)}
        return Metric("accuracy", accuracy(expected, predicted), len(item_scores), also)

    def agree(self, outputs: Outputs, reference: Outputs, encoded: Encoded, spec: TaskSpec) -> Agreement:
        ours, theirs = outputs[LOGITS].astype(np.float64), reference[LOGITS].astype(np.float64)
        owners = encoded.item_of_row
        if (non_finite := find_non_finite("same label", ours, theirs, owners)) is not None:
            return non_finite
        if _is_regression(spec):
            measure, flipped = "concordance", None
            value = min(concordance(our, their) for our, their in zip(ours.T, theirs.T, strict=True))
        else:
            measure = "same label"
            flipped = (
                ((ours > 0) != (theirs > 0)).any(axis=1)
                if spec.problem == MULTI_LABEL
                else ours.argmax(axis=1) != theirs.argmax(axis=1)
            )
            value = 1.0 - float(flipped.mean())
        return compare(
            measure,
            ours,
            theirs,
            owners,
            value=value,
            flipped=flipped,
            flips=None if flipped is None else int(flipped.sum()),
            cosines=row_cosines(ours, theirs),
            rank_correlation=mean_spearman(ours, theirs),
            top_k_overlap=top_k_overlap(ours, theirs, _TOP_K) if ours.shape[1] > _TOP_K else None,
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
    """Return the scores of logits, in fp32."""
    logits = logits.astype(np.float32)
    if scoring is Scoring.NONE:
        return logits
    if scoring is Scoring.SIGMOID:
        powers = np.exp(-np.abs(logits))  # at most 1, so that no logit overflows
        sigmoid: FloatArray = np.where(logits >= 0, 1.0, powers) / (1.0 + powers)
        return sigmoid
    return softmax(logits)


def _gold(row: Row, spec: TaskSpec, position: int) -> object:
    if _is_regression(spec):
        if is_number(value := row.get("score")):
            return float(value)
        raise InputError(f'row {position} has no number in "score": {value!r:.60}')
    label = require_label(row, "label", position)
    if spec.problem == MULTI_LABEL:
        names = label if isinstance(label, list) else [label]
        present = {find_label(name, spec.labels, position) for name in names}
        return [index in present for index in range(len(spec.labels))]
    return find_label(label, spec.labels, position)


TASK = TextClassification()
