"""Score and rank documents for a query, like sentence-transformers' CrossEncoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypeAlias, TypedDict

import numpy as np

from hasten.core.errors import InputError
from hasten.core.report import Agreement, Metric
from hasten.core.tensors import BATCH, FloatArray, IntArray, Outputs
from hasten.core.text.input_checks import check_min, check_text, check_texts, list_items
from hasten.core.text.pair_template import PairTemplate
from hasten.core.text.tokenizer import Tokenizer
from hasten.metrics.agreement import compare, find_non_finite
from hasten.metrics.labels import CORRELATIONS, correlation
from hasten.metrics.ranking import average_precision, ndcg, reciprocal_rank
from hasten.metrics.statistics import concordance, spearman
from hasten.tasks import Encoded, Row, Task, TaskSpec, narrow_rows, read_options
from hasten.tasks._labels import check_spread, is_number, require_label
from hasten.tasks.sentence_similarity import resolve_prompt
from hasten.tasks.text_classification import TASK as CLASSIFICATION
from hasten.tasks.text_classification import Scoring, apply_scoring

LOGITS = "logits"
_HINT = 'a pair is {"text": …, "text_pair": …} or, in a list, ["…", "…"]; a ranking {"query": …, "documents": […]}'
_SAMPLE_QUERIES = 120
# Scores that differ by less, relative to the largest, count as equal: fp32 runtimes may differ by as much.
_RELATIVE_TOLERANCE = 1e-3
# The columns that may hold labels.
_LABEL_COLUMNS = ("relevance", "labels", "label", "score")
# The metrics of rankings, and the metric of pairs whose queries have a single document.
_RANKING_METRICS = ("nDCG@10", "MRR@10", "MAP")
_PAIR_METRIC = "average precision"


class Ranked(TypedDict):
    """A document in a ranking: its index, its score and, on request, its text."""

    corpus_id: int
    score: float
    text: NotRequired[str]


# The score of a pair, or its scores if the model has several outputs; the ranked documents of a query.
Answer: TypeAlias = float | FloatArray | list[Ranked]


@dataclass(frozen=True, slots=True)
class Query:
    """A query and its documents; a pair is a query with one document, answered with a bare score."""

    text: str
    documents: tuple[str, ...]
    is_pair: bool


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
        """Return the rows of each query; pairs with the same query text belong together."""
        owners: dict[object, list[int]] = {}
        for row, item in enumerate(self.item_of_row.tolist()):
            query = self.queries[item]
            owners.setdefault(query.text if query.is_pair else item, []).append(row)
        return [np.array(rows) for rows in owners.values()]


class TextRanking(Task[Query, Answer, Options]):
    """Relevance scores of pairs, or rankings of documents."""

    name = "text-ranking"
    auto_class = "AutoModelForSequenceClassification"
    heads = ("ForSequenceClassification",)
    fields = ("query", "documents")
    columns = ("query", "documents", "text", "text_pair", *_LABEL_COLUMNS)
    takes_pairs = True
    is_detected = False
    outputs = (LOGITS,)
    axes = (BATCH,)
    min_agreement = 0.99

    def parse(self, payload: object) -> list[Query]:
        """Return the queries of pairs and rankings; in a list, a pair may be a list of two texts."""
        entries = list_items(payload, "nothing to rank")
        return [_parse_item(entry, position) for position, entry in enumerate(entries, 1)]

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
            raise InputError("top_k and return_documents apply to rankings, but these are pairs", hint=_HINT)
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
            # A stable sort keeps the order of documents with equal scores, as CrossEncoder's does.
            order = np.argsort(-query_scores, kind="stable")[: options.top_k].tolist()
            ranking = [Ranked(corpus_id=index, score=float(query_scores[index])) for index in order]
            if options.has_documents:
                for entry in ranking:
                    entry["text"] = query.documents[entry["corpus_id"]]
            answers.append(ranking)
        return answers

    def present(self, payload: object, answers: list[Answer], options: Options) -> object:
        """Return one array for pairs, as CrossEncoder does, and lists for rankings."""
        if not isinstance(payload, list | tuple):
            return answers[0]
        are_scores = not any(isinstance(answer, list) for answer in answers)
        return np.asarray(answers, np.float32) if are_scores else answers

    def sample(self, texts: Sequence[str], spec: TaskSpec) -> list[Row]:
        """Return the first half of a text as query, with documents of varying relevance: the text, its rest, others."""
        rows: list[Row] = []
        for index in range(0, len(texts), max(1, len(texts) // _SAMPLE_QUERIES)):
            text, others = texts[index], [texts[(index + step) % len(texts)] for step in (1, 8)]
            query, rest = text[: (len(text) + 1) // 2].strip() or text, text[len(text) // 2 :].strip() or text
            documents = [others[0], rest, others[1], text]
            if len(spec.labels) > 1:
                rows += [{"text": query, "text_pair": document} for document in dict.fromkeys(documents)]
            else:
                rows.append({"query": query, "documents": documents})
        return rows

    def gold(self, rows: Sequence[Row], spec: TaskSpec) -> list[object] | None:
        """Return relevances for rankings; classes, relevances ("label") or numbers to correlate ("score") for pairs."""
        if len(spec.labels) > 1:
            return CLASSIFICATION.gold(rows, spec)
        kinds = [key for key in _LABEL_COLUMNS if any(key in row for row in rows)]
        if not kinds:
            return None
        if len(kinds) > 1:
            raise InputError(f'rows have "{kinds[0]}" and "{kinds[1]}"', hint="label all rows with the same column")
        return [_gold(row, kinds[0], position) for position, row in enumerate(rows, 1)]

    def metrics(self, gold: Sequence[object], spec: TaskSpec) -> tuple[str, ...]:
        """Return the metrics; which one applies to pairs with relevances depends on whether queries repeat."""
        if len(spec.labels) > 1:
            return CLASSIFICATION.metrics(gold, spec)
        if isinstance(gold[0], float):
            check_spread(gold)
            return CORRELATIONS
        if not any(isinstance(relevance, tuple) and any(relevance) for relevance in gold):
            raise InputError("ranking metrics are undefined: no document is relevant to its query")
        are_pairs = all(isinstance(relevance, tuple) and len(relevance) == 1 for relevance in gold)
        return (*_RANKING_METRICS, _PAIR_METRIC) if are_pairs else _RANKING_METRICS

    def item_scores(self, outputs: Outputs, encoded: Encoded, gold: Sequence[object], spec: TaskSpec) -> FloatArray:
        """Return the scores of each pair, or of each query if the rows are ranked.

        A pair has a score and an expected score, or with a query of its own a score, a relevance and 1; a query has
        its three metrics and the number of its items.
        """
        if len(spec.labels) > 1:
            return CLASSIFICATION.item_scores(outputs, encoded, gold, spec)
        scores = apply_scoring(outputs[LOGITS], _scoring(spec))[:, 0].astype(np.float64)
        if isinstance(gold[0], float):
            return np.stack([scores, np.asarray(gold, np.float64)], axis=1)
        relevance = np.concatenate([np.asarray(relevances, np.float64) for relevances in gold])
        groups = narrow_rows(encoded, Queries).groups
        if all(len(rows) == 1 for rows in groups):
            # Queries have a single document each: compare the scores of relevant pairs with those of all others.
            return np.stack([scores, relevance, np.ones(len(gold))], axis=1)
        return np.array(
            [
                [
                    *(measure(scores[rows], relevance[rows]) for measure in (ndcg, reciprocal_rank, average_precision)),
                    len(np.unique(encoded.item_of_row[rows])),
                ]
                for rows in groups
            ]
        )

    def metric(self, item_scores: FloatArray, spec: TaskSpec) -> Metric:
        if len(spec.labels) > 1:
            return CLASSIFICATION.metric(item_scores, spec)
        if item_scores.shape[1] == 2:
            return correlation(item_scores)
        if item_scores.shape[1] == 3:
            return Metric(_PAIR_METRIC, average_precision(item_scores[:, 0], item_scores[:, 1]), len(item_scores))
        first, *also = zip(_RANKING_METRICS, (float(column.mean()) for column in item_scores[:, :3].T), strict=True)
        return Metric(*first, int(item_scores[:, 3].sum()), dict(also))

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
        tolerance = _RELATIVE_TOLERANCE * max(1.0, float(np.abs(theirs).max()))
        measures = {
            "rank correlation": _correlate(spearman, ours, theirs, tolerance),
            "concordance of scores": _correlate(concordance, ours, theirs, tolerance),
        }
        groups = [rows for rows in narrow_rows(encoded, Queries).groups if len(rows) > 1]
        flipped = np.zeros(len(ours), bool)
        for rows in groups:
            flipped[rows] = ours[rows].argmax() != theirs[rows].argmax()
        if groups:
            our_order = np.concatenate([ours[rows] - ours[rows].mean() for rows in groups])
            their_order = np.concatenate([theirs[rows] - theirs[rows].mean() for rows in groups])
            measures["rank correlation within queries"] = _correlate(spearman, our_order, their_order, tolerance)
        measure = min(measures, key=lambda name: measures[name])
        return compare(
            measure,
            ours,
            theirs,
            owners,
            value=measures[measure],
            flipped=flipped,
            flips=sum(bool(flipped[rows[0]]) for rows in groups) if groups else None,
            rank_correlation=measures["rank correlation"],
        )


def _parse_item(entry: object, position: int) -> Query:
    if isinstance(entry, Mapping) and ("query" in entry or "documents" in entry):
        return _parse_ranking(entry, position)
    if isinstance(entry, Mapping):
        if entry.get("text") is None or entry.get("text_pair") is None:
            raise InputError(
                f'item {position} has no "text" and "text_pair"; its fields are: {", ".join(map(str, entry))}',
                hint=_HINT,
            )
        texts: Sequence[object] = (entry["text"], entry["text_pair"])
    elif isinstance(entry, list | tuple):
        texts = entry
    else:
        raise InputError(f"item {position} is {type(entry).__name__}, not a pair of texts", hint=_HINT)
    if len(texts) != 2:
        raise InputError(f"item {position} is a list of {len(texts)}, not a pair of texts", hint=_HINT)
    text, document = check_text(texts[0], f"text {position}"), check_text(texts[1], f"text_pair {position}")
    return Query(text, (document,), is_pair=True)


def _parse_ranking(entry: Mapping[str, object], position: int) -> Query:
    for key in ("query", "documents"):
        if entry.get(key) is None:
            raise InputError(f'item {position} has no "{key}"', hint=_HINT)
    if entry.get("text_pair") is not None:
        raise InputError(f'item {position} has both "documents" and a "text_pair"', hint=_HINT)
    documents = check_texts(entry["documents"], "documents", position)
    return Query(check_text(entry["query"], f"query {position}"), documents, is_pair=False)


def _scoring(spec: TaskSpec) -> Scoring:
    return Scoring(spec.activation or ("sigmoid" if len(spec.labels) == 1 else "none"))


def _gold(row: Row, kind: str, position: int) -> float | tuple[float, ...]:
    """Return a number to correlate with, or the relevance of each document."""
    value = require_label(row, kind, position)
    if kind in ("score", "label"):
        if "documents" in row:
            raise InputError(
                f'row {position} has documents and a single "{kind}"', hint='"relevance" takes a number per document'
            )
        number = _number(value, kind, position)
        return number if kind == "score" else (_relevance(number, kind, position),)
    documents = row.get("documents")
    if not isinstance(documents, list | tuple) or not isinstance(value, list | tuple) or len(documents) != len(value):
        raise InputError(f'row {position} must have as many numbers in "{kind}" as it has documents')
    return tuple(_relevance(_number(number, kind, position), kind, position) for number in value)


def _number(value: object, kind: str, position: int) -> float:
    if is_number(value):
        return float(value)
    raise InputError(f'row {position} has no number in "{kind}": {value!r:.60}')


def _relevance(number: float, kind: str, position: int) -> float:
    if number < 0:
        raise InputError(f'row {position} has {number:g} in "{kind}": relevance must be at least 0')
    return number


def _correlate(
    correlation: Callable[[FloatArray, FloatArray], float], ours: FloatArray, theirs: FloatArray, tolerance: float
) -> float:
    """Return a correlation or, if the reference scores are all equal, whether ours equal them."""
    if np.ptp(theirs) > tolerance:
        return correlation(ours, theirs)
    return 1.0 if np.abs(ours - theirs).max() <= tolerance else 0.0


TASK = TextRanking()
