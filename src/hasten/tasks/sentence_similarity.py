"""Embed texts as vectors whose cosine is their similarity, as sentence-transformers does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from hasten.core.errors import InputError
from hasten.core.report import Agreement
from hasten.core.tensors import BATCH, PROMPT_MASK, Batch, FloatArray, Outputs, ranges_to_indices
from hasten.core.text.input_checks import check_text, parse_texts
from hasten.core.text.tokenizer import Tokenizer
from hasten.metrics.agreement import compare_vectors
from hasten.metrics.statistics import row_cosines, top_k_overlap
from hasten.tasks import Encoded, Task, TaskSpec, read_options
from hasten.tasks._rated_pairs import MAX_COMPARED_TEXTS, RatedPairs, pair_correlation, similarities

EMBEDDING = "embedding"

_NEIGHBOURS = 10

Text: TypeAlias = str | tuple[str, str]


@dataclass(frozen=True, slots=True)
class _RawOptions:
    prompt_name: str | None = None
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a request, with the model's defaults."""

    prompt: str
    pools_prompt: bool = True
    special_ids: tuple[int, ...] = ()


class SentenceSimilarity(RatedPairs, Task[Text, FloatArray | float, Options]):
    """An embedding per text, or the cosine similarity of a pair."""

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

    def options(self, spec: TaskSpec, values: Mapping[str, object]) -> Options:
        raw = read_options(_RawOptions, values)
        return Options(resolve_prompt(spec, raw.prompt_name, raw.prompt), spec.pools_prompt, spec.special_ids)

    def encode(self, items: Sequence[Text], tokenizer: Tokenizer, options: Options) -> Encoded:
        """Return one row per text; a pair is one item with two rows."""
        texts: list[str] = []
        owners: list[int] = []
        for index, item in enumerate(items):
            for text in (item,) if isinstance(item, str) else item:
                texts.append(options.prompt + text)
                owners.append(index)
        tokens = tokenizer.encode(texts)
        batch = tokens.batch if options.pools_prompt else _mark_prompt(tokens.batch, tokenizer, options)
        return Encoded(batch, np.asarray(owners), len(items), tokens.truncated, tokens.encodings)

    def decode(self, outputs: Outputs, encoded: Encoded, options: Options) -> list[FloatArray | float]:
        """Return a vector for a text and the cosine for a pair."""
        vectors = outputs[EMBEDDING].astype(np.float32, copy=False)
        if len(vectors) == encoded.items:
            return list(vectors)
        items = encoded.split(vectors)
        return [item[0] if len(item) == 1 else float(row_cosines(item[:1], item[1:])[0]) for item in items]

    def present(self, payload: object, answers: list[FloatArray | float], options: Options) -> object:
        if not isinstance(payload, list | tuple):
            return answers[0]
        have_equal_shapes = len({np.shape(answer) for answer in answers}) == 1
        return np.stack([np.asarray(answer, np.float32) for answer in answers]) if have_equal_shapes else answers

    def item_scores(self, outputs: Outputs, encoded: Encoded, gold: Sequence[object], spec: TaskSpec) -> FloatArray:
        """Return the cosine of each pair and its expected similarity."""
        vectors = outputs[EMBEDDING]
        return np.stack([row_cosines(vectors[0::2], vectors[1::2]), np.asarray(gold, np.float64)], axis=1)

    def agree(self, outputs: Outputs, reference: Outputs, encoded: Encoded, spec: TaskSpec) -> Agreement:
        ours, theirs = outputs[EMBEDDING].astype(np.float64), reference[EMBEDDING].astype(np.float64)
        agreement = compare_vectors(ours, theirs, encoded.item_of_row)
        if not agreement.is_finite:
            return agreement
        near_ours, near_theirs = similarities(ours[:MAX_COMPARED_TEXTS]), similarities(theirs[:MAX_COMPARED_TEXTS])
        return replace(
            agreement,
            rank_correlation=pair_correlation(near_ours, near_theirs),
            top_k_overlap=_neighbour_overlap(near_ours, near_theirs),
        )


def resolve_prompt(spec: TaskSpec, name: str | None, prompt: str | None) -> str:
    """Return the given prompt, the model's prompt of this name, or its default prompt."""
    if prompt is not None:
        return check_text(prompt, "the prompt", may_be_empty=True)
    name = name or spec.default_prompt
    if name is None:
        return ""
    if name not in spec.prompts:
        raise InputError(f"the model has no prompt '{name}'", hint=f"its prompts: {', '.join(spec.prompts) or 'none'}")
    return spec.prompts[name]


def _mark_prompt(batch: Batch, tokenizer: Tokenizer, options: Options) -> Batch:
    """Return the rows with an input that marks the tokens of their prompt.

    Like sentence-transformers, count the tokens of the prompt alone, without the special token after it.
    """
    length = 0
    if options.prompt:
        prompt = tokenizer.encode([options.prompt]).batch.values["input_ids"]
        length = len(prompt) - (int(prompt[-1]) in options.special_ids)
    positions = ranges_to_indices(np.zeros_like(batch.lengths), batch.lengths)
    return Batch({**batch.values, PROMPT_MASK: (positions < length).astype(np.int32)}, batch.lengths)


def _neighbour_overlap(ours: FloatArray, theirs: FloatArray) -> float | None:
    """Return the share of each text's ten nearest neighbours that remain among the ten."""
    if len(ours) <= _NEIGHBOURS + 1:
        return None
    ours, theirs = ours.copy(), theirs.copy()
    np.fill_diagonal(ours, -np.inf)  # no text is its own neighbour, even if others are as near
    np.fill_diagonal(theirs, -np.inf)
    return top_k_overlap(ours, theirs, _NEIGHBOURS)


TASK = SentenceSimilarity()
