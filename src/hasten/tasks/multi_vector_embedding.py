"""Embed texts as a vector per token and score documents by MaxSim, like sentence-transformers' MultiVectorEncoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from hasten.core.report import Agreement, Metric
from hasten.core.tensors import (
    BATCH,
    EXPANSION_MASK,
    SEQUENCE,
    Batch,
    BoolArray,
    FloatArray,
    IntArray,
    Outputs,
    ranges_to_indices,
)
from hasten.core.text.input_checks import check_min, check_text, list_items
from hasten.core.text.tokenizer import Tokenizer, Tokens
from hasten.metrics.agreement import compare_vectors
from hasten.tasks import Encoded, LateInteraction, Row, Task, TaskSpec, narrow_rows, read_options
from hasten.tasks._rankings import (
    LABEL_COLUMNS,
    RANK_CORRELATION,
    Query,
    Ranked,
    compare_scores,
    group_rows,
    parse_query,
    rank,
    ranking_metric,
    ranking_metrics,
    ranking_scores,
    read_relevance,
    sample_queries,
)
from hasten.tasks.sentence_similarity import resolve_prompt

VECTORS = "token_embeddings"
QUERY, DOCUMENT = "query", "document"
# The prompts of a document, of which the first that the model has is used.
DOCUMENT_PROMPTS = (DOCUMENT, "passage", "corpus")
MAXSIM, MEAN_MAXSIM = "maxsim", "meanmaxsim"
# Texts whose MaxSim is compared if the rows have no queries.
_MAX_COMPARED_TEXTS = 40

# A text, or a query with documents.
Item: TypeAlias = str | Query
# The vectors of a text, the score of a pair, or the ranked documents of a query.
Answer: TypeAlias = FloatArray | float | list[Ranked]


@dataclass(frozen=True, slots=True)
class _RawOptions:
    input_type: Literal["query", "document"] = "document"
    prompt_name: str | None = None
    prompt: str | None = None
    top_k: int | None = None
    return_documents: bool = False


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a request, with the model's defaults."""

    late: LateInteraction
    # Whether texts by themselves are queries, and the prompt of those texts.
    is_query: bool
    prompt: str
    query_prompt: str
    document_prompt: str
    is_mean: bool
    top_k: int | None
    has_documents: bool


@dataclass(frozen=True, slots=True)
class TokenRows(Encoded):
    """The rows of texts, queries and documents, and the tokens that are scored; a query precedes its documents."""

    contents: tuple[Item, ...]
    is_scored: BoolArray

    def scored(self, vectors: FloatArray) -> list[FloatArray]:
        """Return the vectors of the scored tokens, by row."""
        row_of_token = np.repeat(np.arange(len(self.batch)), self.batch.lengths)
        counts = np.bincount(row_of_token[self.is_scored], minlength=len(self.batch))
        return np.split(vectors[self.is_scored], np.cumsum(counts)[:-1])

    @property
    def queries(self) -> list[Query]:
        """Return the items that are queries with documents."""
        return [item for item in self.contents if isinstance(item, Query)]

    @property
    def query_of_document(self) -> IntArray:
        """Return the query of each document, as an index of `queries`."""
        return np.repeat(np.arange(len(self.queries)), [len(query.documents) for query in self.queries])


class MultiVectorEmbedding(Task[Item, Answer, Options]):
    """A vector per token of a text, the MaxSim of a pair, or the ranked documents of a query."""

    name = "multi-vector-embedding"
    auto_class = "AutoModel"
    heads = ()
    fields = ("text",)
    columns = ("text", "text_pair", "query", "documents", *LABEL_COLUMNS)
    takes_pairs = False
    is_detected = False
    outputs = (VECTORS,)
    axes = (BATCH, SEQUENCE)
    min_agreement = 0.99

    def parse(self, payload: object) -> list[Item]:
        return [_parse_item(entry, position) for position, entry in enumerate(list_items(payload), 1)]

    def options(self, spec: TaskSpec, values: Mapping[str, object]) -> Options:
        raw = read_options(_RawOptions, values)
        check_min("top_k", raw.top_k, alternative=", or null for all documents")
        query_prompt = spec.prompts.get(QUERY, "")
        document_prompt = next((spec.prompts[name] for name in DOCUMENT_PROMPTS if name in spec.prompts), "")
        is_query = raw.input_type == QUERY
        prompt = query_prompt if is_query else document_prompt
        if raw.prompt is not None or raw.prompt_name is not None:
            prompt = resolve_prompt(spec, raw.prompt_name, raw.prompt)
        late, is_mean = spec.late_interaction or LateInteraction(), spec.similarity == MEAN_MAXSIM
        return Options(late, is_query, prompt, query_prompt, document_prompt, is_mean, raw.top_k, raw.return_documents)

    def encode(self, items: Sequence[Item], tokenizer: Tokenizer, options: Options) -> TokenRows:
        """Return a row per text, and per query and document."""
        texts: list[tuple[int, bool, str]] = []
        for index, item in enumerate(items):
            if isinstance(item, str):
                texts.append((index, options.is_query, options.prompt + item))
            else:
                texts.append((index, True, options.query_prompt + item.text))
                texts += [(index, False, options.document_prompt + document) for document in item.documents]
        is_query = np.array([is_query for _, is_query, _ in texts])
        late = options.late
        limits = late.document_length, late.query_length
        sides = [
            tokenizer.limited_to(limits[side]).encode([text for _, is_query, text in texts if is_query is bool(side)])
            for side in (False, True)
            if (is_query == side).any()
        ]
        rows = [np.flatnonzero(is_query == side) for side in (False, True) if (is_query == side).any()]
        tokens = _join(sides, rows)
        batch = _expand(tokens.batch, np.where(is_query, late.expansion_length, 0), late)
        skips = np.array([DOCUMENT in late.skipped_sides, QUERY in late.skipped_sides])[is_query.astype(np.intp)]
        is_skipped = np.isin(batch.values["input_ids"], late.skipped_ids) & np.repeat(skips, batch.lengths)
        owners = np.array([index for index, _, _ in texts])
        return TokenRows(batch, owners, len(items), tokens.truncated, tokens.encodings, tuple(items), ~is_skipped)

    def decode(self, outputs: Outputs, encoded: Encoded, options: Options) -> list[Answer]:
        rows = narrow_rows(encoded, TokenRows)
        vectors = iter(rows.scored(outputs[VECTORS].astype(np.float32, copy=False)))
        answers: list[Answer] = []
        for item in rows.contents:
            first = next(vectors)
            if isinstance(item, str):
                answers.append(first)
                continue
            scores = max_sim(first, [next(vectors) for _ in item.documents], is_mean=options.is_mean)
            ranking = rank(scores, item, options.top_k, has_documents=options.has_documents)
            answers.append(float(scores[0]) if item.is_pair else ranking)
        return answers

    def present(self, payload: object, answers: list[Answer], options: Options) -> object:
        """Return one array for pairs, and a list for texts and rankings, whose sizes differ."""
        if not isinstance(payload, list | tuple):
            return answers[0]
        are_scores = all(isinstance(answer, float) for answer in answers)
        return np.asarray(answers, np.float32) if are_scores else answers

    def sample(self, texts: Sequence[str], spec: TaskSpec) -> list[Row]:
        return [{"query": query, "documents": documents} for query, documents in sample_queries(texts)]

    def gold(self, rows: Sequence[Row], spec: TaskSpec) -> list[object] | None:
        """Return relevances for rankings; relevances ("label") or numbers to correlate ("score") for pairs."""
        return read_relevance(rows)

    def metrics(self, gold: Sequence[object], spec: TaskSpec) -> tuple[str, ...]:
        return ranking_metrics(gold)

    def item_scores(self, outputs: Outputs, encoded: Encoded, gold: Sequence[object], spec: TaskSpec) -> FloatArray:
        rows = narrow_rows(encoded, TokenRows)
        owners = rows.query_of_document
        return ranking_scores(document_scores(outputs, rows, spec), owners, group_rows(rows.queries, owners), gold)

    def metric(self, item_scores: FloatArray, spec: TaskSpec) -> Metric:
        return ranking_metric(item_scores)

    def agree(self, outputs: Outputs, reference: Outputs, encoded: Encoded, spec: TaskSpec) -> Agreement:
        """Return the lowest of several measures: the cosines of scored tokens, and the order and values of MaxSim."""
        rows = narrow_rows(encoded, TokenRows)
        ours, theirs = (source[VECTORS][rows.is_scored].astype(np.float64) for source in (outputs, reference))
        owners = np.repeat(rows.item_of_row, rows.batch.lengths)[rows.is_scored]
        agreement = compare_vectors(ours, theirs, owners)
        if not agreement.is_finite:
            return agreement
        if rows.queries:
            scores = [document_scores(source, rows, spec) for source in (outputs, reference)]
            groups = group_rows(rows.queries, rows.query_of_document)
        else:
            scores = [_scores_of_texts(source, rows, spec) for source in (outputs, reference)]
            groups = np.split(np.arange(len(scores[0])), min(_MAX_COMPARED_TEXTS, rows.items))
        measures = compare_scores(scores[0], scores[1], groups)
        measure = min(measures, key=lambda name: measures[name])
        agreement = replace(agreement, rank_correlation=measures[RANK_CORRELATION])
        if measures[measure] < agreement.value:
            agreement = replace(agreement, measure=f"MaxSim {measure}", value=measures[measure])
        return agreement


def max_sim(query: FloatArray, documents: Sequence[FloatArray], *, is_mean: bool) -> FloatArray:
    """Return, per document, the sum or mean over query tokens of the largest product with a token of the document."""
    sums = [(query @ document.T).max(axis=1).sum() if len(document) else 0.0 for document in documents]
    return np.array(sums, np.float32) / (max(1, len(query)) if is_mean else 1)


def document_scores(outputs: Outputs, encoded: Encoded, spec: TaskSpec) -> FloatArray:
    """Return the scores of all documents for their queries."""
    rows = narrow_rows(encoded, TokenRows)
    vectors = rows.scored(outputs[VECTORS].astype(np.float32, copy=False))
    is_mean = spec.similarity == MEAN_MAXSIM
    scores: list[FloatArray] = []
    ends = np.cumsum(np.bincount(rows.item_of_row, minlength=rows.items))
    for item, end in zip(rows.contents, ends.tolist(), strict=True):
        if isinstance(item, Query):
            first = end - len(item.documents) - 1
            scores.append(max_sim(vectors[first], vectors[first + 1 : end], is_mean=is_mean))
    return np.concatenate(scores).astype(np.float64)


def _scores_of_texts(outputs: Outputs, rows: TokenRows, spec: TaskSpec) -> FloatArray:
    """Return the scores of the first texts for each other."""
    texts = rows.scored(outputs[VECTORS].astype(np.float32, copy=False))[:_MAX_COMPARED_TEXTS]
    scores = [max_sim(text, texts, is_mean=spec.similarity == MEAN_MAXSIM) for text in texts]
    return np.concatenate(scores).astype(np.float64)


def _parse_item(entry: object, position: int) -> Item:
    if isinstance(entry, str) or (isinstance(entry, Mapping) and set(entry) <= {"text"}):
        text = entry.get("text") if isinstance(entry, Mapping) else entry
        return check_text(text, f"text {position}")
    if isinstance(entry, Mapping) and "text" in entry and entry.get("text_pair") is None:
        return check_text(entry["text"], f"text {position}")
    return parse_query(entry, position)


def _join(sides: Sequence[Tokens], rows: Sequence[IntArray]) -> Tokens:
    """Return the tokens of documents and queries as rows in their original order."""
    if len(sides) == 1:
        return sides[0]
    position = np.concatenate(rows)
    order = np.argsort(position)
    truncated = sorted(int(index[row]) for side, index in zip(sides, rows, strict=True) for row in side.truncated)
    return Tokens(Batch.concatenate([side.batch for side in sides]).take(order), tuple(truncated), ())


def _expand(batch: Batch, min_lengths: IntArray, late: LateInteraction) -> Batch:
    """Fill rows up to a length with the expansion token, which is marked if other tokens do not attend to it."""
    if not late.expansion_length:
        return batch
    lengths = np.maximum(batch.lengths, min_lengths).astype(np.int32)
    positions = ranges_to_indices(np.zeros_like(lengths), lengths)
    is_filled = positions >= np.repeat(batch.lengths, lengths)
    values: dict[str, IntArray] = {}
    for name, column in batch.values.items():
        values[name] = np.full(len(positions), late.expansion_id if name == "input_ids" else 0, np.int32)
        values[name][~is_filled] = column
    if not late.is_expansion_attended:
        values[EXPANSION_MASK] = is_filled.astype(np.int32)
    return Batch(values, lengths)


TASK = MultiVectorEmbedding()
