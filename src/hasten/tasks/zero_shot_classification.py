"""Which of the labels that come with a text fits it: answers like transformers' pipeline of the same name.

A label becomes a sentence, the hypothesis, and a model of entailment says whether it follows from the text.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from string import Formatter
from typing import TypedDict

import numpy as np

from hasten.core.errors import InputError
from hasten.core.registry import did_you_mean
from hasten.core.report import Agreement, Metric
from hasten.core.scores import accuracy, macro_f1
from hasten.core.statistics import relative_error, row_cosines, spearman
from hasten.core.tensors import BATCH, Batch, FloatArray, Outputs
from hasten.core.tokenizer import Tokenizer
from hasten.tasks import Encoded, Row, TaskSpec, checked_text, not_finite, parse_texts, read_options

LOGITS = "logits"
_METRICS = ("accuracy", "macro F1")
_HINT = 'candidate_labels=["…", "…"], for all texts or in each item'
# What the built-in sample is asked: topics, moods, kinds and languages, few and many, near and far from each other.
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
    sequence: str
    labels: list[str]
    scores: list[float]


@dataclass(frozen=True, slots=True)
class Question:
    """A text, and the labels it is asked about where it brings its own."""

    text: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Given:
    candidate_labels: str | tuple[str, ...] | None = None
    hypothesis_template: str = "This example is {}."
    multi_label: bool = False


@dataclass(frozen=True, slots=True)
class Options:
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

    def split(self, rows: FloatArray) -> list[FloatArray]:
        """What belongs to each item."""
        return np.split(rows, np.cumsum([len(labels) for labels in self.labels])[:-1])


class ZeroShotClassification:
    name = "zero-shot-classification"
    auto_class = "AutoModelForSequenceClassification"
    heads = ("ForSequenceClassification",)
    fields = ("text", "candidate_labels")
    columns = ("text", "sequence", "candidate_labels", "label")
    takes_pairs = True
    is_detected = False
    outputs = (LOGITS,)
    axes = (BATCH,)
    # Where no label fits, two that fit equally badly may change places.
    min_agreement = 0.99

    def parse(self, payload: object) -> list[Question]:
        """Texts, or {"text": …, "candidate_labels": […]}; a text may be called "sequence", as the answers do."""
        entries = payload if isinstance(payload, list | tuple) else [payload]
        texts = parse_texts([_with_text(entry, place) for place, entry in enumerate(entries, 1)])
        questions = []
        for place, (text, entry) in enumerate(zip(texts, entries, strict=True), 1):
            if not isinstance(text, str):
                raise InputError(f'item {place} has a "text_pair", and {self.name} takes one text at a time')
            own = entry.get("candidate_labels") if isinstance(entry, Mapping) else None
            questions.append(Question(text, _read_labels(own, f" of item {place}")))
        return questions

    def options(self, spec: TaskSpec, given: Mapping[str, object]) -> Options:
        asked = read_options(_Given, given)
        yes, no = _yes_and_no(spec.labels)
        if asked.multi_label and yes == no:
            raise InputError("multi_label weighs entailment against contradiction, and this model has one output")
        labels, template = _read_labels(asked.candidate_labels), _checked_template(asked.hypothesis_template)
        return Options(labels, template, asked.multi_label, yes, no)

    def encode(self, items: Sequence[Question], tokenizer: Tokenizer, options: Options) -> Questions:
        """One row a text and label; neither texts nor hypotheses are tokenized twice, and hypotheses are never cut."""
        labels = tuple(item.labels or options.labels for item in items)
        for place, own in enumerate(labels, 1):
            if not own:
                raise InputError(f"item {place} has no candidate labels", hint=_HINT)
            if len(own) == 1 and options.yes == options.no:
                raise InputError(f"item {place} has one candidate label, and a model with one output can only compare")
        distinct = list(dict.fromkeys(label for own in labels for label in own))
        hypotheses = dict(
            zip(distinct, tokenizer.encode_whole([options.template.format(label) for label in distinct]), strict=True)
        )
        room = tokenizer.spec.max_length - tokenizer.special_tokens(is_pair=True)
        for label, hypothesis in hypotheses.items():
            if len(hypothesis) >= room:
                raise InputError(
                    f"the candidate label {label!r:.60} makes {len(hypothesis)} tokens, which leaves no room for a text"
                    f" in the model's {tokenizer.spec.max_length}"
                )
        texts = tokenizer.encode_whole([item.text for item in items])
        parts = [
            tokenizer.join_each(text, [hypotheses[label] for label in own])
            for text, own in zip(texts, labels, strict=True)
        ]
        counts = [len(own) for own in labels]
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
        """Scores that add up to one over the labels or, where each stands alone, yes against no."""
        questions = _questions(encoded)
        answers = []
        for text, labels, logits in zip(
            questions.texts, questions.labels, questions.split(outputs[LOGITS].astype(np.float32)), strict=True
        ):
            if options.is_multi or len(labels) == 1:
                scores = _softmax(logits[:, [options.no, options.yes]])[:, 1]
            else:
                scores = _softmax(logits[:, options.yes])
            order = scores.argsort()[::-1]  # equal scores in the pipeline's own order
            answers.append(
                Answer(sequence=text, labels=[labels[place] for place in order], scores=scores[order].tolist())
            )
        return answers

    def present(self, payload: object, answers: list[Answer], options: Options) -> object:
        return answers if isinstance(payload, list | tuple) else answers[0]

    def sample(self, texts: Sequence[str], spec: TaskSpec) -> list[Row]:
        """Every second text, since each takes as many rows as it has labels."""
        return [
            {"text": text, "candidate_labels": list(_SAMPLE_LABELS[place % len(_SAMPLE_LABELS)])}
            for place, text in enumerate(texts[::2])
        ]

    def gold(self, rows: Sequence[Row], spec: TaskSpec) -> list[object] | None:
        if not any("label" in row for row in rows):
            return None
        return [_gold(row, place) for place, row in enumerate(rows, 1)]

    def metrics(self, gold: Sequence[object], spec: TaskSpec) -> tuple[str, ...]:
        return _METRICS

    def marks(self, outputs: Outputs, encoded: Encoded, gold: Sequence[object], spec: TaskSpec) -> FloatArray:
        """The right label and the best one, as numbers: labels go by their names, whichever item asks for them."""
        questions, (yes, _) = _questions(encoded), _yes_and_no(spec.labels)
        found = [
            labels[logits[:, yes].argmax()]
            for labels, logits in zip(questions.labels, questions.split(outputs[LOGITS]), strict=True)
        ]
        numbers = {label: number for number, label in enumerate(dict.fromkeys([*gold, *found]))}
        return np.array([[numbers[label] for label in labels] for labels in zip(gold, found, strict=True)], np.float64)

    def metric(self, marks: FloatArray, spec: TaskSpec) -> Metric:
        wanted, found = marks.astype(np.int64).T
        return Metric(_METRICS[0], accuracy(wanted, found), len(marks), {_METRICS[1]: macro_f1(wanted, found)})

    def agree(self, outputs: Outputs, reference: Outputs, encoded: Encoded, spec: TaskSpec) -> Agreement:
        """By the best label of each item."""
        ours, theirs = outputs[LOGITS].astype(np.float64), reference[LOGITS].astype(np.float64)
        broken = ~np.isfinite(ours).all(axis=1)
        if broken.any():
            agreement = not_finite("same best label", ours, theirs, encoded)
            return replace(agreement, worst=tuple(dict.fromkeys(encoded.item_of_row[broken].tolist()))[:3])
        questions, (yes, no) = _questions(encoded), _yes_and_no(spec.labels)
        pairs = list(zip(questions.labels, questions.split(ours), questions.split(theirs), strict=True))
        flipped = np.array([_verdict(a, labels, yes, no) != _verdict(b, labels, yes, no) for labels, a, b in pairs])
        error = np.array([np.abs(a - b).max() for _, a, b in pairs])
        correlations = [spearman(a[:, yes], b[:, yes]) for _, a, b in pairs if len(a) > 1]
        cosines = row_cosines(ours, theirs)
        return Agreement(
            measure="same best label",
            value=1.0 - float(flipped.mean()),
            rows=len(ours),
            max_error=float(error.max()),
            relative_error=relative_error(ours, theirs),
            scale=float(np.abs(theirs).max()),
            flips=int(flipped.sum()),
            cosine_mean=float(cosines.mean()),
            cosine_min=float(cosines.min()),
            rank_correlation=float(np.mean(correlations)) if correlations else None,
            # A flip is worse than any error that flips nothing.
            worst=tuple(int(item) for item in np.argsort(-np.where(flipped, error + 1e6, error), kind="stable")[:3]),
        )


@cache
def _yes_and_no(labels: tuple[str, ...]) -> tuple[int, int]:
    """The outputs for entailment and contradiction, found as the pipeline does. Cached: a guess is said once."""
    for index, label in enumerate(labels):
        if label.lower().startswith("entail"):
            return index, 0 if index else len(labels) - 1
    logger.warning(
        "none of the model's labels (%s) starts with 'entail': the last is taken for it, as transformers does",
        ", ".join(labels[:8]),
    )
    return len(labels) - 1, 0


def _with_text(entry: object, place: int) -> object:
    if not isinstance(entry, Mapping) or entry.get("sequence") is None:
        return entry
    if entry.get("text") is not None:
        raise InputError(f'item {place} has both "text" and "sequence"', hint="give one of them")
    return {**entry, "text": entry["sequence"]}


def _read_labels(given: object, where: str = "") -> tuple[str, ...]:
    """A list, or one string with commas between; nothing where nothing is given."""
    if given is None:
        return ()
    if isinstance(given, str):
        given = [label.strip() for label in given.split(",") if label.strip()]
    if not isinstance(given, list | tuple):
        raise InputError(f"candidate_labels{where} is {type(given).__name__}, not a list of strings", hint=_HINT)
    if not given:
        raise InputError(f"candidate_labels{where} is empty", hint=_HINT)
    return tuple(checked_text(label, f"candidate label {number}{where}") for number, label in enumerate(given, 1))


def _checked_template(template: str) -> str:
    """Only the plain field: any other reaches into Python's objects, or asks for a gigabyte of spaces."""
    checked_text(template, "hypothesis_template")
    try:
        fields = [field for field in Formatter().parse(template) if field[1] is not None]
    except ValueError:
        fields = []
    names = [name for _, name, _, _ in fields]
    is_plain = not any(format_spec or conversion for _, _, format_spec, conversion in fields)
    if not is_plain or (names != [""] and set(names) != {"0"}):
        raise InputError(
            f"hypothesis_template {template!r:.60} has no one place for the label", hint='as in "This example is {}."'
        )
    return template


def _questions(encoded: Encoded) -> Questions:
    if not isinstance(encoded, Questions):
        raise TypeError("outputs are read with what this task's own encode gave: which label a row is for stands there")
    return encoded


def _softmax(logits: FloatArray) -> FloatArray:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    softmax: FloatArray = powers / powers.sum(axis=-1, keepdims=True)
    return softmax


def _verdict(logits: FloatArray, labels: Sequence[str], yes: int, no: int) -> object:
    """The best label by name, since a label may be there twice; of one label, whether it fits."""
    return labels[int(logits[:, yes].argmax())] if len(labels) > 1 else bool(logits[0, yes] > logits[0, no])


def _gold(row: Row, place: int) -> str:
    labels, label = _read_labels(row.get("candidate_labels"), f" of item {place}"), row.get("label")
    if label is None:
        raise InputError(f'row {place} has no "label", though other rows have one')
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(labels):
        return labels[label]
    if not isinstance(label, str) or label not in labels:
        raise InputError(
            f"row {place} has the label {label!r:.60}, which is none of its candidate labels"
            f"{did_you_mean(str(label), labels)}"
        )
    return label


TASK = ZeroShotClassification()
