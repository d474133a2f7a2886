"""Classify texts with labels that come with the request, like transformers' pipeline of the same name.

Each label becomes a sentence, the hypothesis, and an entailment model scores whether it follows from the text.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from string import Formatter
from typing import TypedDict

import numpy as np

from hasten.core.errors import InputError
from hasten.core.report import Agreement, Metric
from hasten.core.tensors import BATCH, Batch, FloatArray, Outputs
from hasten.core.text.input_checks import check_text, list_items, parse_single_texts
from hasten.core.text.tokenizer import Tokenizer
from hasten.metrics.agreement import compare, find_non_finite
from hasten.metrics.labels import accuracy, macro_f1
from hasten.metrics.statistics import row_cosines, softmax, spearman
from hasten.tasks import Encoded, Row, Task, TaskSpec, narrow_rows, read_options
from hasten.tasks._labels import find_label, read_labels, require_label

LOGITS = "logits"
_METRICS = ("accuracy", "macro F1")
_HINT = 'candidate_labels=["…", "…"], for all texts or in each item'
# The labels of the built-in sample: topics, sentiments, genres and languages, of different numbers and similarity.
_SAMPLE_LABELS = (
    ("sports", "politics", "science"),
    ("positive", "negative"),
    ("a product review", "a news report", "a message to a friend", "source code"),
    ("English", "Spanish", "Chinese"),
    ("urgent", "not urgent"),
    ("travel", "cooking", "finance", "health"),
)

logger = logging.getLogger("hasten")


class Answer(TypedDict):
    """The labels of a text, best first, with their scores."""

    sequence: str
    labels: list[str]
    scores: list[float]


@dataclass(frozen=True, slots=True)
class Question:
    """A text, and its own candidate labels if it has any."""

    text: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _RawOptions:
    candidate_labels: str | tuple[str, ...] | None = None
    hypothesis_template: str = "This example is {}."
    multi_label: bool = False


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a request, with the model's defaults."""

    labels: tuple[str, ...]
    template: str
    is_multi: bool
    yes: int
    no: int


@dataclass(frozen=True, slots=True)
class Questions(Encoded):
    """Rows in the order of the items and their labels."""

    texts: tuple[str, ...]
    labels: tuple[tuple[str, ...], ...]


class ZeroShotClassification(Task[Question, Answer, Options]):
    """Scores of candidate labels by entailment."""

    name = "zero-shot-classification"
    auto_class = "AutoModelForSequenceClassification"
    heads = ("ForSequenceClassification",)
    fields = ("text", "candidate_labels")
    columns = ("text", "sequence", "candidate_labels", "label")
    takes_pairs = True
    is_detected = False
    outputs = (LOGITS,)
    axes = (BATCH,)
    # If no label fits, two that fit equally badly may swap.
    min_agreement = 0.99

    def parse(self, payload: object) -> list[Question]:
        """Return the questions of texts or {"text": …, "candidate_labels": […]}; "sequence" is an alias of "text"."""
        entries = list_items(payload)
        renamed = [_with_text(entry, position) for position, entry in enumerate(entries, 1)]
        questions = []
        for position, (text, entry) in enumerate(zip(parse_single_texts(renamed, self.name), entries, strict=True), 1):
            labels = entry.get("candidate_labels") if isinstance(entry, Mapping) else None
            questions.append(Question(text, _read_labels(labels, f" of item {position}")))
        return questions

    def options(self, spec: TaskSpec, values: Mapping[str, object]) -> Options:
        raw = read_options(_RawOptions, values)
        yes, no = _yes_and_no(spec.labels)
        if raw.multi_label and yes == no:
            raise InputError("multi_label compares entailment with contradiction, but this model has one output")
        labels, template = _read_labels(raw.candidate_labels), _checked_template(raw.hypothesis_template)
        return Options(labels, template, raw.multi_label, yes, no)

    def encode(self, items: Sequence[Question], tokenizer: Tokenizer, options: Options) -> Questions:
        """Return one row per text and label. Hypotheses are not truncated; texts and hypotheses are tokenized once."""
        labels = tuple(item.labels or options.labels for item in items)
        for position, item_labels in enumerate(labels, 1):
            if not item_labels:
                raise InputError(f"item {position} has no candidate labels", hint=_HINT)
            if len(item_labels) == 1 and options.yes == options.no:
                raise InputError(
                    f"item {position} has one candidate label, but a model with one output needs at least two"
                )
        distinct = list(dict.fromkeys(label for item_labels in labels for label in item_labels))
        hypotheses = dict(
            zip(distinct, tokenizer.encode_whole([options.template.format(label) for label in distinct]), strict=True)
        )
        room = tokenizer.spec.max_length - tokenizer.special_tokens(is_pair=True)
        for label, hypothesis in hypotheses.items():
            if len(hypothesis) >= room:
                raise InputError(
                    f"the candidate label {label!r:.60} has {len(hypothesis)} tokens, which leaves no room for a text"
                    f" within the model's limit of {tokenizer.spec.max_length}"
                )
        texts = tokenizer.encode_whole([item.text for item in items])
        parts = [
            tokenizer.join_each(text, [hypotheses[label] for label in item_labels])
            for text, item_labels in zip(texts, labels, strict=True)
        ]
        counts = [len(item_labels) for item_labels in labels]
        starts = np.cumsum([0, *counts])
        return Questions(
            batch=Batch.concatenate([part.batch for part in parts]),
            item_of_row=np.repeat(np.arange(len(items)), counts),
            items=len(items),
            truncated=tuple(
                int(start) + row for start, part in zip(starts, parts, strict=False) for row in part.truncated
            ),
            encodings=(),
            texts=tuple(item.text for item in items),
            labels=labels,
        )

    def decode(self, outputs: Outputs, encoded: Encoded, options: Options) -> list[Answer]:
        """Return scores that add up to one over the labels or, with multi_label, entailment against contradiction."""
        questions = narrow_rows(encoded, Questions)
        answers = []
        for text, labels, logits in zip(
            questions.texts, questions.labels, questions.split(outputs[LOGITS].astype(np.float32)), strict=True
        ):
            if options.is_multi or len(labels) == 1:
                scores = softmax(logits[:, [options.no, options.yes]])[:, 1]
            else:
                scores = softmax(logits[:, options.yes])
            order = scores.argsort()[::-1]  # equal scores are in the pipeline's order
            answers.append(
                Answer(sequence=text, labels=[labels[index] for index in order], scores=scores[order].tolist())
            )
        return answers

    def sample(self, texts: Sequence[str], spec: TaskSpec) -> list[Row]:
        """Return every second text, since each makes a row per label."""
        return [
            {"text": text, "candidate_labels": list(_SAMPLE_LABELS[index % len(_SAMPLE_LABELS)])}
            for index, text in enumerate(texts[::2])
        ]

    def gold(self, rows: Sequence[Row], spec: TaskSpec) -> list[object] | None:
        return read_labels(rows, "label", _gold)

    def metrics(self, gold: Sequence[object], spec: TaskSpec) -> tuple[str, ...]:
        return _METRICS

    def item_scores(self, outputs: Outputs, encoded: Encoded, gold: Sequence[object], spec: TaskSpec) -> FloatArray:
        """Return the indices of the expected and the best label; equal names have equal indices across items."""
        questions, (yes, _) = narrow_rows(encoded, Questions), _yes_and_no(spec.labels)
        predicted = [
            labels[logits[:, yes].argmax()]
            for labels, logits in zip(questions.labels, questions.split(outputs[LOGITS]), strict=True)
        ]
        indices = {label: index for index, label in enumerate(dict.fromkeys([*gold, *predicted]))}
        return np.array(
            [[indices[label] for label in labels] for labels in zip(gold, predicted, strict=True)], np.float64
        )

    def metric(self, item_scores: FloatArray, spec: TaskSpec) -> Metric:
        expected, predicted = item_scores.astype(np.int64).T
        return Metric(
            _METRICS[0], accuracy(expected, predicted), len(item_scores), {_METRICS[1]: macro_f1(expected, predicted)}
        )

    def agree(self, outputs: Outputs, reference: Outputs, encoded: Encoded, spec: TaskSpec) -> Agreement:
        """Compare the best label of each item."""
        ours, theirs = outputs[LOGITS].astype(np.float64), reference[LOGITS].astype(np.float64)
        owners = encoded.item_of_row
        if (non_finite := find_non_finite("same best label", ours, theirs, owners)) is not None:
            return non_finite
        questions, (yes, no) = narrow_rows(encoded, Questions), _yes_and_no(spec.labels)
        pairs = list(zip(questions.labels, questions.split(ours), questions.split(theirs), strict=True))
        flipped = np.array([_verdict(a, labels, yes, no) != _verdict(b, labels, yes, no) for labels, a, b in pairs])
        correlations = [spearman(a[:, yes], b[:, yes]) for _, a, b in pairs if len(a) > 1]
        return compare(
            "same best label",
            ours,
            theirs,
            owners,
            value=1.0 - float(flipped.mean()),
            flipped=flipped[owners],
            flips=int(flipped.sum()),
            cosines=row_cosines(ours, theirs),
            rank_correlation=float(np.mean(correlations)) if correlations else None,
        )


@cache
def _yes_and_no(labels: tuple[str, ...]) -> tuple[int, int]:
    """Return the outputs for entailment and contradiction by the pipeline's rule. Cached, so that it warns once."""
    for index, label in enumerate(labels):
        if label.lower().startswith("entail"):
            return index, 0 if index else len(labels) - 1
    logger.warning(
        "none of the model's labels (%s) starts with 'entail': using the last one, as transformers does",
        ", ".join(labels[:8]),
    )
    return len(labels) - 1, 0


def _with_text(entry: object, position: int) -> object:
    if not isinstance(entry, Mapping) or entry.get("sequence") is None:
        return entry
    if entry.get("text") is not None:
        raise InputError(f'item {position} has both "text" and "sequence"', hint="pass only one of them")
    return {**entry, "text": entry["sequence"]}


def _read_labels(labels: object, where: str = "") -> tuple[str, ...]:
    """Return the labels of a list or a comma-separated string; none for None."""
    if labels is None:
        return ()
    if isinstance(labels, str):
        labels = [label.strip() for label in labels.split(",") if label.strip()]
    if not isinstance(labels, list | tuple):
        raise InputError(f"candidate_labels{where} is {type(labels).__name__}, not a list of strings", hint=_HINT)
    if not labels:
        raise InputError(f"candidate_labels{where} is empty", hint=_HINT)
    return tuple(check_text(label, f"candidate label {number}{where}") for number, label in enumerate(labels, 1))


def _checked_template(template: str) -> str:
    """Accept only plain placeholders: others can reach into Python objects or ask for a gigabyte of spaces."""
    check_text(template, "hypothesis_template")
    try:
        fields = [field for field in Formatter().parse(template) if field[1] is not None]
    except ValueError:
        fields = []
    names = [name for _, name, _, _ in fields]
    is_plain = not any(format_spec or conversion for _, _, format_spec, conversion in fields)
    if not is_plain or (names != [""] and set(names) != {"0"}):
        raise InputError(
            f"hypothesis_template {template!r:.60} must have one plain placeholder for the label",
            hint='as in "This example is {}."',
        )
    return template


def _verdict(logits: FloatArray, labels: Sequence[str], yes: int, no: int) -> object:
    """Return the best label by name, since a label may occur twice; for a single label, whether it fits."""
    return labels[int(logits[:, yes].argmax())] if len(labels) > 1 else bool(logits[0, yes] > logits[0, no])


def _gold(row: Row, position: int) -> str:
    labels = _read_labels(row.get("candidate_labels"), f" of item {position}")
    return labels[find_label(require_label(row, "label", position), labels, position, candidates="candidate labels")]


TASK = ZeroShotClassification()
