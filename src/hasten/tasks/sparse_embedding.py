"""Embed texts as weights of vocabulary terms, as sentence-transformers' SparseEncoder does (SPLADE)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypedDict

import numpy as np

from hasten.core.report import Agreement
from hasten.core.tensors import BATCH, FloatArray, IntArray, Outputs
from hasten.core.text.input_checks import check_min, parse_texts
from hasten.core.text.tokenizer import Tokenizer
from hasten.metrics.agreement import compare, find_non_finite
from hasten.metrics.statistics import row_cosines, top_k_overlap
from hasten.tasks import Encoded, Task, TaskSpec, read_options
from hasten.tasks._rated_pairs import MAX_COMPARED_TEXTS, RatedPairs, pair_correlation, similarities
from hasten.tasks.sentence_similarity import resolve_prompt

WEIGHTS = "term_weights"
COSINE, DOT = "cosine", "dot"
# The strongest terms of each text whose overlap is reported.
_TOP_TERMS = 10

Text: TypeAlias = str | tuple[str, str]


class SparseVector(TypedDict):
    """The terms of a text, by their ids in the vocabulary in ascending order, and their weights."""

    indices: IntArray
    values: FloatArray


@dataclass(frozen=True, slots=True)
class _RawOptions:
    max_active_dims: int | None = None
    prompt_name: str | None = None
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a request, with the model's defaults."""

    prompt: str
    max_active_dims: int | None
    is_cosine: bool


class SparseEmbedding(RatedPairs, Task[Text, SparseVector | float, Options]):
    """The weighted terms of a text, or the similarity of a pair."""

    name = "sparse-embedding"
    auto_class = "AutoModelForMaskedLM"
    heads = ("ForMaskedLM",)
    fields = ("text",)
    columns = ("text", "text_pair", "score")
    takes_pairs = False
    is_detected = False
    outputs = (WEIGHTS,)
    axes = (BATCH,)
    min_agreement = 0.99

    def parse(self, payload: object) -> list[Text]:
        return parse_texts(payload)

    def options(self, spec: TaskSpec, values: Mapping[str, object]) -> Options:
        raw = read_options(_RawOptions, values)
        check_min("max_active_dims", raw.max_active_dims, alternative=", or null for the model's own number of terms")
        limit = spec.max_active_dims if raw.max_active_dims is None else raw.max_active_dims
        return Options(resolve_prompt(spec, raw.prompt_name, raw.prompt), limit, spec.similarity == COSINE)

    def encode(self, items: Sequence[Text], tokenizer: Tokenizer, options: Options) -> Encoded:
        """Return one row per text; a pair is one item with two rows."""
        texts = [(item,) if isinstance(item, str) else item for item in items]
        tokens = tokenizer.encode([options.prompt + text for item in texts for text in item])
        owners = np.repeat(np.arange(len(items)), [len(item) for item in texts])
        return Encoded(tokens.batch, owners, len(items), tokens.truncated, tokens.encodings)

    def decode(self, outputs: Outputs, encoded: Encoded, options: Options) -> list[SparseVector | float]:
        """Return the terms of a text, and the similarity of a pair."""
        weights = keep_largest(outputs[WEIGHTS], options.max_active_dims)
        if len(weights) == encoded.items:
            return list(to_sparse(weights))
        answers: list[SparseVector | float] = []
        for item in encoded.split(weights):
            is_text = len(item) == 1
            answers.append(to_sparse(item)[0] if is_text else float(_pair_similarities(item, options.is_cosine)[0]))
        return answers

    def item_scores(self, outputs: Outputs, encoded: Encoded, gold: Sequence[object], spec: TaskSpec) -> FloatArray:
        """Return the similarity of each pair and the expected one."""
        weights = keep_largest(outputs[WEIGHTS], spec.max_active_dims)
        ours = _pair_similarities(weights, spec.similarity == COSINE)
        return np.stack([ours, np.asarray(gold, np.float64)], axis=1)

    def agree(self, outputs: Outputs, reference: Outputs, encoded: Encoded, spec: TaskSpec) -> Agreement:
        """Return the lowest of three measures: the cosines of the weights, the shared terms, and the order of texts.

        An inverted index finds a text only by the terms that it has, whatever the cosine is.
        """
        raw = outputs[WEIGHTS], reference[WEIGHTS]
        if (non_finite := find_non_finite("mean cosine", *raw, encoded.item_of_row)) is not None:
            return non_finite
        ours, theirs = (keep_largest(weights, spec.max_active_dims) for weights in raw)
        # One text at a time: hundreds of texts times a vocabulary in fp64 would take gigabytes.
        pairs = list(zip(ours, theirs, strict=True))
        cosines = np.concatenate([row_cosines(our[None], their[None]) for our, their in pairs])
        measures = {
            "mean cosine": float(cosines.mean()),
            "shared terms": float(np.mean([_shared_weight(our, their) for our, their in pairs])),
        }
        is_cosine = spec.similarity == COSINE
        correlation = pair_correlation(
            *(similarities(weights[:MAX_COMPARED_TEXTS], is_cosine=is_cosine) for weights in (ours, theirs))
        )
        if correlation is not None:
            measures["rank correlation"] = correlation
        measure = min(measures, key=lambda name: measures[name])
        # Errors are those of all weights: of two that are nearly equal, rounding decides which is kept.
        agreement = compare(
            measure,
            *raw,
            encoded.item_of_row,
            value=measures[measure],
            cosines=cosines,
            rank_correlation=correlation,
        )
        return replace(agreement, top_k_overlap=top_k_overlap(ours, theirs, min(_TOP_TERMS, ours.shape[1])))


def keep_largest(weights: FloatArray, count: int | None) -> FloatArray:
    """Return rows of weights with only the `count` largest of each, the others zero; all of them if it is None."""
    if count is None or count >= weights.shape[1]:
        return weights
    kept = np.argpartition(weights, -count, axis=1)[:, -count:]
    pruned = np.zeros_like(weights)
    np.put_along_axis(pruned, kept, np.take_along_axis(weights, kept, axis=1), axis=1)
    return pruned


def to_sparse(weights: FloatArray) -> list[SparseVector]:
    """Return the terms of each row whose weight is not zero."""
    rows, indices = np.nonzero(weights)
    values = weights[rows, indices].astype(np.float32, copy=False)
    ends = np.cumsum(np.bincount(rows, minlength=len(weights)))[:-1]
    return [
        SparseVector(indices=row_indices, values=row_values)
        for row_indices, row_values in zip(np.split(indices, ends), np.split(values, ends), strict=True)
    ]


def _pair_similarities(weights: FloatArray, is_cosine: bool) -> FloatArray:
    """Return the similarity of each two adjacent rows."""
    first, second = weights[0::2], weights[1::2]
    if is_cosine:
        return row_cosines(first, second)
    products: FloatArray = np.einsum("ij,ij->i", first, second, dtype=np.float64)
    return products


def _shared_weight(ours: FloatArray, theirs: FloatArray) -> float:
    """Return the share of the weight, of the vector that has less of it, on terms that both have."""
    totals = [float(weights.sum()) for weights in (ours, theirs)]
    if not all(totals):
        return float(totals[0] == totals[1])
    return min(float(ours[theirs > 0].sum()) / totals[0], float(theirs[ours > 0].sum()) / totals[1])


TASK = SparseEmbedding()
