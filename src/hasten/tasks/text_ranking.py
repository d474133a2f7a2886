"""Score and rank documents for a query, like sentence-transformers' CrossEncoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from hasten.core.errors import InputError
from hasten.core.report import Agreement, Metric
from hasten.core.tensors import BATCH, FloatArray, IntArray, Outputs
from hasten.core.text.input_checks import check_min, list_items
from hasten.core.text.pair_template import PairTemplate
from hasten.core.text.tokenizer import Tokenizer
from hasten.metrics.agreement import compare, find_non_finite
from hasten.tasks import Encoded, Row, Task, TaskSpec, narrow_rows, read_options
from hasten.tasks._rankings import (
    LABEL_COLUMNS,
    QUERY_HINT,
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
from hasten.tasks.text_classification import TASK as CLASSIFICATION
from hasten.tasks.text_classification import Scoring, apply_scoring

LOGITS = "logits"

# The score of a pair, or its scores if the model has several outputs; the ranked documents of a query.
Answer: TypeAlias = float | FloatArray | list[Ranked]


@dataclass(frozen=True, slots=True)
class _RawOptions:
    top_k: int | None = None
    return_documents: bool = False
    function_to_apply: Scoring | None = None
    prompt_name: str | None = None
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a request, with the model's defaults."""

    scores: int
    scoring: Scoring
    top_k: int | None
    has_documents: bool
    prompt: str
    template: PairTemplate | None


@dataclass(frozen=True, slots=True)
class Queries(Encoded):
    """Rows in the order of the queries and their documents."""

    queries: tuple[Query, ...]

    @property
    def groups(self) -> list[IntArray]:
        """Return the rows of each query."""
        return group_rows(self.queries, self.item_of_row)


class TextRanking(Task[Query, Answer, Options]):
    """Relevance scores of pairs, or rankings of documents."""

    name = "text-ranking"
    auto_class = "AutoModelForSequenceClassification"
    heads = ("ForSequenceClassification",)
    fields = ("query", "documents")
    columns = ("query", "documents", "text", "text_pair", *LABEL_COLUMNS)
    takes_pairs = True
    is_detected = False
    outputs = (LOGITS,)
    axes = (BATCH,)
    min_agreement = 0.99

    def parse(self, payload: object) -> list[Query]:
        """Return the queries of pairs and rankings; in a list, a pair may be a list of two texts."""
        entries = list_items(payload, "nothing to rank")
        return [parse_query(entry, position) for position, entry in enumerate(entries, 1)]

    def options(self, spec: TaskSpec, values: Mapping[str, object]) -> Options:
        raw = read_options(_RawOptions, values, any_case="function_to_apply")
        check_min("top_k", raw.top_k, alternative=", or null for all documents")
        prompt = resolve_prompt(spec, raw.prompt_name, raw.prompt)
        return Options(
            scores=len(spec.labels),
            scoring=raw.function_to_apply or _scoring(spec),
            top_k=raw.top_k,
            has_documents=raw.return_documents,
            prompt=prompt,
            template=spec.instructed_template if prompt else spec.template,
        )

    def encode(self, items: Sequence[Query], tokenizer: Tokenizer, options: Options) -> Queries:
        """Return one row per document."""
        ranking = next((position for position, item in enumerate(items, 1) if not item.is_pair), None)
        if ranking is None and (options.top_k is not None or options.has_documents):
            raise InputError("top_k and return_documents apply to rankings, but these are pairs", hint=QUERY_HINT)
        if ranking is not None and options.scores > 1:
            raise InputError(
                f"item {ranking} is a ranking, but this model returns {options.scores} scores per document",
                hint='use pairs: {"text": …, "text_pair": …}',
            )
        pairs = [(item.text, document) for item in items for document in item.documents]
        if options.template is None:
            tokens = tokenizer.encode([(options.prompt + query, document) for query, document in pairs])
        else:
            tokens = options.template.encode(pairs, options.prompt, tokenizer)
        owners = np.repeat(np.arange(len(items)), [len(item.documents) for item in items])
        return Queries(tokens.batch, owners, len(items), tokens.truncated, tokens.encodings, tuple(items))

    def decode(self, outputs: Outputs, encoded: Encoded, options: Options) -> list[Answer]:
        queries = narrow_rows(encoded, Queries).queries
        scores = apply_scoring(outputs[LOGITS], options.scoring)
        if options.scores == 1:
            scores = scores[:, 0]
        answers: list[Answer] = []
        for query, query_scores in zip(queries, encoded.split(scores), strict=True):
            if query.is_pair:
                answers.append(query_scores[0] if options.scores > 1 else float(query_scores[0]))
                continue
            answers.append(rank(query_scores, query, options.top_k, has_documents=options.has_documents))
        return answers

    def present(self, payload: object, answers: list[Answer], options: Options) -> object:
        """Return one array for pairs, as CrossEncoder does, and lists for rankings."""
        if not isinstance(payload, list | tuple):
            return answers[0]
        are_scores = not any(isinstance(answer, list) for answer in answers)
        return np.asarray(answers, np.float32) if are_scores else answers

    def sample(self, texts: Sequence[str], spec: TaskSpec) -> list[Row]:
        if len(spec.labels) < 2:
            return [{"query": query, "documents": documents} for query, documents in sample_queries(texts)]
        return [
            {"text": query, "text_pair": document}
            for query, documents in sample_queries(texts)
            for document in dict.fromkeys(documents)
        ]

    def gold(self, rows: Sequence[Row], spec: TaskSpec) -> list[object] | None:
        """Return relevances for rankings; classes, relevances ("label") or numbers to correlate ("score") for pairs."""
        if len(spec.labels) > 1:
            return CLASSIFICATION.gold(rows, spec)
        return read_relevance(rows)

    def metrics(self, gold: Sequence[object], spec: TaskSpec) -> tuple[str, ...]:
        """Return the metrics; which one applies to pairs with relevances depends on whether queries repeat."""
        if len(spec.labels) > 1:
            return CLASSIFICATION.metrics(gold, spec)
        return ranking_metrics(gold)

    def item_scores(self, outputs: Outputs, encoded: Encoded, gold: Sequence[object], spec: TaskSpec) -> FloatArray:
        if len(spec.labels) > 1:
            return CLASSIFICATION.item_scores(outputs, encoded, gold, spec)
        scores = apply_scoring(outputs[LOGITS], _scoring(spec))[:, 0].astype(np.float64)
        encoded = narrow_rows(encoded, Queries)
        return ranking_scores(scores, encoded.item_of_row, encoded.groups, gold)

    def metric(self, item_scores: FloatArray, spec: TaskSpec) -> Metric:
        if len(spec.labels) > 1:
            return CLASSIFICATION.metric(item_scores, spec)
        return ranking_metric(item_scores)

    def agree(self, outputs: Outputs, reference: Outputs, encoded: Encoded, spec: TaskSpec) -> Agreement:
        """Return the lowest of three measures: the order of all documents, the order within queries, and the scores.

        Scores may cross a threshold even if their order is kept.
        """
        if len(spec.labels) > 1:
            return CLASSIFICATION.agree(outputs, reference, encoded, spec)
        ours, theirs = outputs[LOGITS][:, 0].astype(np.float64), reference[LOGITS][:, 0].astype(np.float64)
        owners = encoded.item_of_row
        if (non_finite := find_non_finite("rank correlation", ours[:, None], theirs[:, None], owners)) is not None:
            return non_finite
        all_groups = narrow_rows(encoded, Queries).groups
        measures = compare_scores(ours, theirs, all_groups)
        groups = [rows for rows in all_groups if len(rows) > 1]
        flipped = np.zeros(len(ours), bool)
        for rows in groups:
            flipped[rows] = ours[rows].argmax() != theirs[rows].argmax()
        measure = min(measures, key=lambda name: measures[name])
        return compare(
            measure,
            ours,
            theirs,
            owners,
            value=measures[measure],
            flipped=flipped,
            flips=sum(bool(flipped[rows[0]]) for rows in groups) if groups else None,
            rank_correlation=measures[RANK_CORRELATION],
        )


def _scoring(spec: TaskSpec) -> Scoring:
    return Scoring(spec.activation or ("sigmoid" if len(spec.labels) == 1 else "none"))


TASK = TextRanking()
