"""Choose the best of several continuations of a prompt, with transformers' multiple-choice models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypedDict

import msgspec
import numpy as np

from hasten.core.errors import InputError
from hasten.core.report import Agreement, Metric
from hasten.core.tensors import BATCH, FloatArray, Outputs
from hasten.core.text.input_checks import check_min, check_text, check_texts, list_items
from hasten.core.text.tokenizer import Tokenizer
from hasten.metrics.agreement import compare, find_non_finite
from hasten.metrics.statistics import mean_spearman, softmax
from hasten.tasks import Encoded, Row, Task, TaskSpec, narrow_rows, read_options
from hasten.tasks._labels import find_label, read_labels, require_label

LOGITS = "logits"
_HINT = 'as in {"prompt": "…", "choices": ["…", "…"]}'
_SAMPLE_ROWS = 130
_SAMPLE_CHARACTERS = 200


class Chosen(TypedDict):
    """A choice, its index and its score."""

    score: float
    index: int
    answer: str


Answer: TypeAlias = Chosen | list[Chosen]


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and its choices."""

    prompt: str
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a request."""

    # Without it the answer is the best choice; with it, even if it is 1, a list, as in text-classification.
    top_k: int | msgspec.UnsetType | None = msgspec.UNSET


@dataclass(frozen=True, slots=True)
class Questions(Encoded):
    """One row per choice."""

    questions: tuple[Question, ...]


class MultipleChoice(Task[Question, Answer, Options]):
    """The probabilities of choices after a prompt."""

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
        """Return the questions of {"prompt": …, "choices": […]} or a list of those; "text" is an alias of "prompt"."""
        entries = list_items(payload, "nothing to choose from", hint=_HINT)
        return [_parse(entry, position) for position, entry in enumerate(entries, 1)]

    def options(self, spec: TaskSpec, values: Mapping[str, object]) -> Options:
        options = read_options(Options, values)
        check_min("top_k", options.top_k, alternative=", or null for all choices")
        return options

    def encode(self, items: Sequence[Question], tokenizer: Tokenizer, options: Options) -> Questions:
        """Return a row per prompt and choice; long pairs are truncated longest-first, as in transformers' recipe."""
        tokens = tokenizer.encode([(item.prompt, choice) for item in items for choice in item.choices])
        owners = np.repeat(np.arange(len(items)), [len(item.choices) for item in items])
        return Questions(tokens.batch, owners, len(items), tokens.truncated, tokens.encodings, tuple(items))

    def decode(self, outputs: Outputs, encoded: Encoded, options: Options) -> list[Answer]:
        questions = narrow_rows(encoded, Questions).questions
        answers: list[Answer] = []
        for question, logits in zip(questions, encoded.split(outputs[LOGITS][:, 0]), strict=True):
            scores = softmax(logits)
            ranked = [
                Chosen(score=float(scores[index]), index=index, answer=question.choices[index])
                for index in np.argsort(-scores, kind="stable").tolist()
            ]
            answers.append(ranked[0] if isinstance(options.top_k, msgspec.UnsetType) else ranked[: options.top_k])
        return answers

    def sample(self, texts: Sequence[str], spec: TaskSpec) -> list[Row]:
        """Return texts of any length as prompts, each with two to four short texts as choices."""
        short = [text for text in texts if len(text) < _SAMPLE_CHARACTERS]
        rows: list[Row] = []
        for index, prompt in enumerate(texts[:_SAMPLE_ROWS]):
            others = [short[(index + step) % len(short)] for step in range(5)]
            rows.append({"prompt": prompt, "choices": [text for text in others if text != prompt][: 2 + index % 3]})
        return rows

    def gold(self, rows: Sequence[Row], spec: TaskSpec) -> list[object] | None:
        return read_labels(rows, "label", _gold)

    def metrics(self, gold: Sequence[object], spec: TaskSpec) -> tuple[str, ...]:
        return ("accuracy",)

    def item_scores(self, outputs: Outputs, encoded: Encoded, gold: Sequence[object], spec: TaskSpec) -> FloatArray:
        """Return 1 for each item whose best choice is the expected one, else 0."""
        best = [logits.argmax() for logits in encoded.split(outputs[LOGITS])]
        return np.array([[index == expected] for index, expected in zip(best, gold, strict=True)], np.float64)

    def metric(self, item_scores: FloatArray, spec: TaskSpec) -> Metric:
        return Metric("accuracy", float(item_scores.mean()), len(item_scores))

    def agree(self, outputs: Outputs, reference: Outputs, encoded: Encoded, spec: TaskSpec) -> Agreement:
        ours, theirs = outputs[LOGITS].astype(np.float64), reference[LOGITS].astype(np.float64)
        owners = encoded.item_of_row
        if (non_finite := find_non_finite("same choice", ours, theirs, owners)) is not None:
            return non_finite
        pairs = zip(encoded.split(ours), encoded.split(theirs), strict=True)
        flipped = np.array([our.argmax() != their.argmax() for our, their in pairs])
        agreement = compare(
            "same choice",
            ours,
            theirs,
            owners,
            value=1.0 - float(flipped.mean()),
            flipped=flipped[owners],
            flips=int(flipped.sum()),
            rank_correlation=mean_spearman(ours, theirs),
        )
        return replace(agreement, rows=encoded.items)


def _parse(entry: object, position: int) -> Question:
    if not isinstance(entry, Mapping):
        raise InputError(f"item {position} is {type(entry).__name__}, not a prompt with choices", hint=_HINT)
    prompt, choices = entry.get("prompt", entry.get("text")), entry.get("choices")
    if prompt is None or choices is None:
        missing = "prompt" if prompt is None else "choices"
        raise InputError(
            f'item {position} has no "{missing}"; its fields are: {", ".join(map(str, entry))}', hint=_HINT
        )
    return Question(check_text(prompt, f"prompt {position}"), check_texts(choices, "choices", position))


def _gold(row: Row, position: int) -> int:
    choices = _parse(row, position).choices
    label = require_label(row, "label", position)
    return find_label(label, choices, position, candidates=f"{len(choices)} choices")


TASK = MultipleChoice()
