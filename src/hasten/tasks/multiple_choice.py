"""Which of several choices goes best with a prompt: what transformers' models for multiple choice are trained for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypedDict

import msgspec
import numpy as np

from hasten.core.errors import InputError
from hasten.core.registry import did_you_mean
from hasten.core.report import Agreement, Metric
from hasten.core.statistics import relative_error, spearman
from hasten.core.tensors import BATCH, FloatArray, Outputs
from hasten.core.tokenizer import Tokenizer
from hasten.tasks import Encoded, Row, TaskSpec, checked_text, not_finite, read_options

LOGITS = "logits"
_HINT = 'as in {"prompt": "…", "choices": ["…", "…"]}'
_SAMPLE_ROWS = 130
_SAMPLE_CHARACTERS = 200


class Chosen(TypedDict):
    score: float
    index: int
    answer: str


Answer: TypeAlias = Chosen | list[Chosen]


@dataclass(frozen=True, slots=True)
class Question:
    prompt: str
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Options:
    # Left out, the answer is the one best choice; given, even as 1, it is a list, as in text-classification.
    top_k: int | msgspec.UnsetType | None = msgspec.UNSET


@dataclass(frozen=True, slots=True)
class Questions(Encoded):
    """One row a choice."""

    questions: tuple[Question, ...]


class MultipleChoice:
    name = "multiple-choice"
    auto_class = "AutoModelForMultipleChoice"
    heads = ("ForMultipleChoice",)
    fields = ("prompt", "choices")
    columns = ("prompt", "text", "choices", "label")
    takes_pairs = True
    is_detected = True
    outputs = (LOGITS,)
    axes = (BATCH,)
    min_agreement = 0.99

    def parse(self, payload: object) -> list[Question]:
        """{"prompt": …, "choices": […]}, or a list of those; "text" is another word for "prompt"."""
        if isinstance(payload, list | tuple) and not payload:
            raise InputError("nothing to choose: the list is empty", hint=_HINT)
        entries = payload if isinstance(payload, list | tuple) else [payload]
        return [_parse(entry, place) for place, entry in enumerate(entries, 1)]

    def options(self, spec: TaskSpec, given: Mapping[str, object]) -> Options:
        asked = read_options(Options, given)
        if isinstance(asked.top_k, int) and asked.top_k < 1:
            raise InputError(f"top_k is {asked.top_k}; it must be at least 1, or null for all choices")
        return asked

    def encode(self, items: Sequence[Question], tokenizer: Tokenizer, options: Options) -> Questions:
        """The prompt with each choice, too long a pair cut where it is longer: transformers' own recipe."""
        tokens = tokenizer.encode([(item.prompt, choice) for item in items for choice in item.choices])
        owners = np.repeat(np.arange(len(items)), [len(item.choices) for item in items])
        return Questions(tokens.batch, owners, len(items), tokens.truncated, tokens.encodings, tuple(items))

    def decode(self, outputs: Outputs, encoded: Encoded, options: Options) -> list[Answer]:
        if not isinstance(encoded, Questions):
            raise TypeError("what is decoded must come from this task's own encode: it knows the choices")
        answers: list[Answer] = []
        for question, logits in zip(encoded.questions, _by_item(outputs, encoded), strict=True):
            powers = np.exp(logits - logits.max())
            scores = powers / powers.sum()
            ranked = [
                Chosen(score=float(scores[index]), index=index, answer=question.choices[index])
                for index in np.argsort(-scores, kind="stable").tolist()
            ]
            answers.append(ranked[0] if isinstance(options.top_k, msgspec.UnsetType) else ranked[: options.top_k])
        return answers

    def present(self, payload: object, answers: list[Answer], options: Options) -> object:
        return answers if isinstance(payload, list | tuple) else answers[0]

    def sample(self, texts: Sequence[str], spec: TaskSpec) -> list[Row]:
        """Two to four short texts to choose from after another of any length."""
        short = [text for text in texts if len(text) < _SAMPLE_CHARACTERS]
        rows: list[Row] = []
        for place, prompt in enumerate(texts[:_SAMPLE_ROWS]):
            others = [short[(place + step) % len(short)] for step in range(5)]
            rows.append({"prompt": prompt, "choices": [text for text in others if text != prompt][: 2 + place % 3]})
        return rows

    def gold(self, rows: Sequence[Row], spec: TaskSpec) -> list[object] | None:
        if not any("label" in row for row in rows):
            return None
        return [_gold(row.get("label"), _parse(row, place), place) for place, row in enumerate(rows, 1)]

    def metrics(self, gold: Sequence[object], spec: TaskSpec) -> tuple[str, ...]:
        return ("accuracy",)

    def marks(self, outputs: Outputs, encoded: Encoded, gold: Sequence[object], spec: TaskSpec) -> FloatArray:
        """Whether the right choice is the best."""
        right = [int(logits.argmax()) == index for logits, index in zip(_by_item(outputs, encoded), gold, strict=True)]
        return np.array(right, np.float64)[:, None]

    def metric(self, marks: FloatArray, spec: TaskSpec) -> Metric:
        return Metric("accuracy", float(marks.mean()), len(marks))

    def agree(self, outputs: Outputs, reference: Outputs, encoded: Encoded, spec: TaskSpec) -> Agreement:
        ours, theirs = outputs[LOGITS].astype(np.float64), reference[LOGITS].astype(np.float64)
        if not np.isfinite(ours).all():
            agreement = not_finite("same choice", ours, theirs, encoded)
            broken = encoded.item_of_row[~np.isfinite(ours).all(axis=1)]
            return replace(agreement, worst=tuple(dict.fromkeys(broken.tolist()))[:3])
        pairs = list(zip(_by_item(outputs, encoded), _by_item(reference, encoded), strict=True))
        flipped = np.array([our.argmax() != their.argmax() for our, their in pairs])
        error = np.array([np.abs(our - their).max() for our, their in pairs], np.float64)
        flips = int(flipped.sum())
        return Agreement(
            measure="same choice",
            value=1.0 - flips / encoded.items,
            rows=encoded.items,
            max_error=float(error.max()),
            relative_error=relative_error(ours, theirs),
            scale=float(np.abs(theirs).max()),
            flips=flips,
            rank_correlation=spearman(ours[:, 0], theirs[:, 0]),
            # A flip is worse than any error that flips nothing.
            worst=tuple(int(item) for item in np.argsort(-(error + flipped * 1e6), kind="stable")[:3]),
        )


def _by_item(outputs: Outputs, encoded: Encoded) -> list[FloatArray]:
    """The logits of each item's choices."""
    ends = np.cumsum(np.bincount(encoded.item_of_row, minlength=encoded.items))
    return np.split(outputs[LOGITS][:, 0], ends[:-1])


def _parse(entry: object, place: int) -> Question:
    if not isinstance(entry, Mapping):
        raise InputError(f"item {place} is {type(entry).__name__}, not a prompt with choices", hint=_HINT)
    prompt, choices = entry.get("prompt", entry.get("text")), entry.get("choices")
    if prompt is None or choices is None:
        missing = "prompt" if prompt is None else "choices"
        raise InputError(f'item {place} has no "{missing}": {{{", ".join(map(str, entry))}}}', hint=_HINT)
    if not isinstance(choices, list | tuple):
        raise InputError(f'"choices" of item {place} is {type(choices).__name__}, not a list of strings')
    if not choices:
        raise InputError(f"item {place} has no choices: the list is empty")
    return Question(
        checked_text(prompt, f"prompt {place}"),
        tuple(checked_text(choice, f"choice {number} of item {place}") for number, choice in enumerate(choices, 1)),
    )


def _gold(value: object, question: Question, place: int) -> int:
    if isinstance(value, str) and value in question.choices:
        return question.choices.index(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(question.choices):
        return value
    if value is None:
        raise InputError(f'row {place} has no "label", though other rows have one')
    raise InputError(
        f"row {place} has the label {value!r:.60}, which is none of its {len(question.choices)} choices"
        f"{did_you_mean(str(value), question.choices)}"
    )


TASK = MultipleChoice()
