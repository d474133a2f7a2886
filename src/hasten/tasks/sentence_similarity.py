"""Texts to vectors whose cosine says how alike they are: what sentence-transformers models are for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from hasten.core.errors import InputError
from hasten.core.report import Agreement, Metric
from hasten.core.scores import CORRELATIONS, correlated
from hasten.core.statistics import row_cosines, spearman
from hasten.core.tensors import BATCH, FloatArray, Outputs
from hasten.core.tokenizer import Tokenizer
from hasten.tasks import (
    Encoded,
    Row,
    TaskSpec,
    by_cosine,
    check_spread,
    checked_text,
    is_number,
    not_finite,
    parse_texts,
    read_options,
)

EMBEDDING = "embedding"

# Pairs compared when judging whether neighbours stay neighbours: 200 texts give 19,900 of them.
_COMPARED = 200
_NEIGHBOURS = 10

Text: TypeAlias = str | tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Given:
    prompt_name: str | None = None
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class Options:
    prompt: str


class SentenceSimilarity:
    name = "sentence-similarity"
    auto_class = "AutoModel"
    heads = ()
    fields = ("text",)
    columns = ("text", "text_pair", "score")
    takes_pairs = False
    is_detected = False
    outputs = (EMBEDDING,)
    axes = (BATCH,)
    min_agreement = 0.999

    def parse(self, payload: object) -> list[Text]:
        return parse_texts(payload)

    def options(self, spec: TaskSpec, given: Mapping[str, object]) -> Options:
        asked = read_options(_Given, given)
        return Options(chosen_prompt(spec, asked.prompt_name, asked.prompt))

    def encode(self, items: Sequence[Text], tokenizer: Tokenizer, options: Options) -> Encoded:
        """One row a text; a pair is two rows of one item."""
        texts: list[str] = []
        owners: list[int] = []
        for index, item in enumerate(items):
            for text in (item,) if isinstance(item, str) else item:
                texts.append(options.prompt + text)
                owners.append(index)
        tokens = tokenizer.encode(texts)
        return Encoded(tokens.batch, np.asarray(owners), len(items), tokens.truncated, tokens.encodings)

    def decode(self, outputs: Outputs, encoded: Encoded, options: Options) -> list[FloatArray | float]:
        """A vector for a text, the cosine for a pair."""
        vectors = outputs[EMBEDDING].astype(np.float32, copy=False)
        if len(vectors) == encoded.items:
            return list(vectors)
        starts = np.searchsorted(encoded.item_of_row, np.arange(encoded.items))
        counts = np.bincount(encoded.item_of_row, minlength=encoded.items)
        return [
            vectors[start] if count == 1 else float(row_cosines(vectors[[start]], vectors[[start + 1]])[0])
            for start, count in zip(starts, counts, strict=True)
        ]

    def present(self, payload: object, answers: list[FloatArray | float], options: Options) -> object:
        if not isinstance(payload, list | tuple):
            return answers[0]
        return np.stack([np.asarray(answer, np.float32) for answer in answers]) if _are_alike(answers) else answers

    def sample(self, texts: Sequence[str], spec: TaskSpec) -> list[Row]:
        return [{"text": text} for text in texts]

    def gold(self, rows: Sequence[Row], spec: TaskSpec) -> list[object] | None:
        if not any("score" in row for row in rows):
            return None
        scores: list[object] = []
        for place, row in enumerate(rows, 1):
            score = row.get("score")
            if not is_number(score) or row.get("text_pair") is None:
                raise InputError(f'row {place} has no "text_pair" with a number in "score"')
            scores.append(float(score))
        return scores

    def metrics(self, gold: Sequence[object], spec: TaskSpec) -> tuple[str, ...]:
        check_spread(gold)
        return CORRELATIONS

    def marks(self, outputs: Outputs, encoded: Encoded, gold: Sequence[object], spec: TaskSpec) -> FloatArray:
        """The cosine of each pair, and how alike people find it."""
        vectors = outputs[EMBEDDING]
        return np.stack([row_cosines(vectors[0::2], vectors[1::2]), np.asarray(gold, np.float64)], axis=1)

    def metric(self, marks: FloatArray, spec: TaskSpec) -> Metric:
        return correlated(marks)

    def agree(self, outputs: Outputs, reference: Outputs, encoded: Encoded, spec: TaskSpec) -> Agreement:
        ours, theirs = outputs[EMBEDDING].astype(np.float64), reference[EMBEDDING].astype(np.float64)
        if not np.isfinite(ours).all():
            return not_finite("mean cosine", ours, theirs, encoded)
        cosines = row_cosines(ours, theirs)
        near_ours, near_theirs = _similarities(ours[:_COMPARED]), _similarities(theirs[:_COMPARED])
        upper = np.triu_indices(len(near_ours), 1)
        agreement = by_cosine(ours, theirs, cosines, [int(encoded.item_of_row[row]) for row in np.argsort(cosines)[:3]])
        return replace(
            agreement,
            rank_correlation=spearman(near_ours[upper], near_theirs[upper]) if len(upper[0]) > 1 else None,
            top_k_overlap=_neighbour_overlap(near_ours, near_theirs),
        )


def chosen_prompt(spec: TaskSpec, name: str | None, prompt: str | None) -> str:
    """The prompt that was given, the model's by its name, or its default."""
    if prompt is not None:
        return checked_text(prompt, "the prompt", may_be_empty=True)
    name = name or spec.default_prompt
    if name is None:
        return ""
    if name not in spec.prompts:
        raise InputError(f"the model has no prompt '{name}'", hint=f"its prompts: {', '.join(spec.prompts) or 'none'}")
    return spec.prompts[name]


def _are_alike(answers: Sequence[FloatArray | float]) -> bool:
    return len({np.shape(answer) for answer in answers}) == 1


def _similarities(vectors: FloatArray) -> FloatArray:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(norms == 0, 1.0, norms)
    similarities: FloatArray = unit @ unit.T
    return similarities


def _neighbour_overlap(ours: FloatArray, theirs: FloatArray) -> float | None:
    """Share of each text's ten nearest neighbours that stay among the ten."""
    count = len(ours)
    if count <= _NEIGHBOURS + 1:
        return None
    ours, theirs = ours.copy(), theirs.copy()
    np.fill_diagonal(ours, -np.inf)  # no text is its own neighbour, also where others are as near
    np.fill_diagonal(theirs, -np.inf)
    near_ours = np.argsort(-ours, axis=1, kind="stable")[:, :_NEIGHBOURS].tolist()
    near_theirs = np.argsort(-theirs, axis=1, kind="stable")[:, :_NEIGHBOURS].tolist()
    shared = sum(len(set(a) & set(b)) for a, b in zip(near_ours, near_theirs, strict=True))
    return shared / (count * _NEIGHBOURS)


TASK = SentenceSimilarity()
