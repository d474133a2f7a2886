"""Queries with documents: read them and their labels, and judge their scores by the order of the documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import numpy as np

from hasten.core.errors import InputError
from hasten.core.report import Metric
from hasten.core.tensors import FloatArray, IntArray
from hasten.core.text.input_checks import check_text, check_texts
from hasten.metrics.labels import CORRELATIONS, correlation
from hasten.metrics.ranking import average_precision, ndcg, reciprocal_rank
from hasten.metrics.statistics import concordance, spearman
from hasten.tasks import Row
from hasten.tasks._labels import check_spread, is_number, require_label

QUERY_HINT = 'a pair is {"text": …, "text_pair": …} or, in a list, ["…", "…"]; a ranking {"query": …, "documents": […]}'
_SAMPLE_QUERIES = 120
RANK_CORRELATION = "rank correlation"
# Scores that differ by less, relative to the largest, count as equal: fp32 runtimes may differ by as much.
_RELATIVE_TOLERANCE = 1e-3
# The columns that may hold labels.
LABEL_COLUMNS = ("relevance", "labels", "label", "score")
# The metrics of rankings, and the metric of pairs whose queries have a single document.
_RANKING_METRICS = ("nDCG@10", "MRR@10", "MAP")
_PAIR_METRIC = "average precision"


class Ranked(TypedDict):
    """A document in a ranking: its index, its score and, on request, its text."""

    corpus_id: int
    score: float
    text: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Query:
    """A query and its documents; a pair is a query with one document, answered with a bare score."""

    text: str
    documents: tuple[str, ...]
    is_pair: bool


def parse_query(entry: object, position: int) -> Query:
    """Return the query of a pair or a ranking at this position of a payload; a pair may be a list of two texts."""
    if isinstance(entry, Mapping) and ("query" in entry or "documents" in entry):
        return _parse_ranking(entry, position)
    if isinstance(entry, Mapping):
        if entry.get("text") is None or entry.get("text_pair") is None:
            raise InputError(
                f'item {position} has no "text" and "text_pair"; its fields are: {", ".join(map(str, entry))}',
                hint=QUERY_HINT,
            )
        texts: Sequence[object] = (entry["text"], entry["text_pair"])
    elif isinstance(entry, list | tuple):
        texts = entry
    else:
        raise InputError(f"item {position} is {type(entry).__name__}, not a pair of texts", hint=QUERY_HINT)
    if len(texts) != 2:
        raise InputError(f"item {position} is a list of {len(texts)}, not a pair of texts", hint=QUERY_HINT)
    text, document = check_text(texts[0], f"text {position}"), check_text(texts[1], f"text_pair {position}")
    return Query(text, (document,), is_pair=True)


def _parse_ranking(entry: Mapping[str, object], position: int) -> Query:
    for key in ("query", "documents"):
        if entry.get(key) is None:
            raise InputError(f'item {position} has no "{key}"', hint=QUERY_HINT)
    if entry.get("text_pair") is not None:
        raise InputError(f'item {position} has both "documents" and a "text_pair"', hint=QUERY_HINT)
    documents = check_texts(entry["documents"], "documents", position)
    return Query(check_text(entry["query"], f"query {position}"), documents, is_pair=False)


def group_rows(queries: Sequence[Query], query_of_document: IntArray) -> list[IntArray]:
    """Return the documents of each query; pairs with the same query text belong together."""
    owners: dict[object, list[int]] = {}
    for document, index in enumerate(query_of_document.tolist()):
        query = queries[index]
        owners.setdefault(query.text if query.is_pair else index, []).append(document)
    return [np.array(documents) for documents in owners.values()]


def rank(scores: FloatArray, query: Query, top_k: int | None, *, has_documents: bool) -> list[Ranked]:
    """Return the documents of a query in the order of their scores, with their texts if requested."""
    # A stable sort keeps the order of documents with equal scores, as CrossEncoder's does.
    order = np.argsort(-scores, kind="stable")[:top_k].tolist()
    ranking = [Ranked(corpus_id=index, score=float(scores[index])) for index in order]
    if has_documents:
        for entry in ranking:
            entry["text"] = query.documents[entry["corpus_id"]]
    return ranking


def sample_queries(texts: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the first half of a text as query, with documents of varying relevance: the text, its rest, others."""
    queries = []
    for index in range(0, len(texts), max(1, len(texts) // _SAMPLE_QUERIES)):
        text, others = texts[index], [texts[(index + step) % len(texts)] for step in (1, 8)]
        query, rest = text[: (len(text) + 1) // 2].strip() or text, text[len(text) // 2 :].strip() or text
        queries.append((query, [others[0], rest, others[1], text]))
    return queries


def read_relevance(rows: Sequence[Row]) -> list[object] | None:
    """Return relevances for rankings; relevances ("label") or numbers to correlate ("score") for pairs."""
    kinds = [key for key in LABEL_COLUMNS if any(key in row for row in rows)]
    if not kinds:
        return None
    if len(kinds) > 1:
        raise InputError(f'rows have "{kinds[0]}" and "{kinds[1]}"', hint="label all rows with the same column")
    return [_gold(row, kinds[0], position) for position, row in enumerate(rows, 1)]


def ranking_metrics(gold: Sequence[object]) -> tuple[str, ...]:
    """Return the names of the metrics; which one applies to pairs with relevances depends on whether queries repeat."""
    if isinstance(gold[0], float):
        check_spread(gold)
        return CORRELATIONS
    if not any(isinstance(relevance, tuple) and any(relevance) for relevance in gold):
        raise InputError("ranking metrics are undefined: no document is relevant to its query")
    are_pairs = all(isinstance(relevance, tuple) and len(relevance) == 1 for relevance in gold)
    return (*_RANKING_METRICS, _PAIR_METRIC) if are_pairs else _RANKING_METRICS


def ranking_scores(
    scores: FloatArray, query_of_document: IntArray, groups: Sequence[IntArray], gold: Sequence[object]
) -> FloatArray:
    """Return the scores of each pair, or of each query if the documents are ranked.

    A pair has a score and an expected score, or with a query of its own a score, a relevance and 1; a query has its
    three metrics and the number of its items.
    """
    if isinstance(gold[0], float):
        return np.stack([scores, np.asarray(gold, np.float64)], axis=1)
    relevance = np.concatenate([np.asarray(relevances, np.float64) for relevances in gold])
    if all(len(documents) == 1 for documents in groups):
        # Queries have a single document each: compare the scores of relevant pairs with those of all others.
        return np.stack([scores, relevance, np.ones(len(gold))], axis=1)
    return np.array(
        [
            [
                *(measure(scores[rows], relevance[rows]) for measure in (ndcg, reciprocal_rank, average_precision)),
                len(np.unique(query_of_document[rows])),
            ]
            for rows in groups
        ]
    )


def ranking_metric(item_scores: FloatArray) -> Metric:
    """Return the metric of rows of `ranking_scores`."""
    if item_scores.shape[1] == 2:
        return correlation(item_scores)
    if item_scores.shape[1] == 3:
        return Metric(_PAIR_METRIC, average_precision(item_scores[:, 0], item_scores[:, 1]), len(item_scores))
    first, *also = zip(_RANKING_METRICS, (float(column.mean()) for column in item_scores[:, :3].T), strict=True)
    return Metric(*first, int(item_scores[:, 3].sum()), dict(also))


def compare_scores(ours: FloatArray, theirs: FloatArray, groups: Sequence[IntArray]) -> dict[str, float]:
    """Return three measures: the order of all documents, their scores, and the order within queries, if there is one.

    Scores may cross a threshold even if their order is kept.
    """
    tolerance = _RELATIVE_TOLERANCE * max(1.0, float(np.abs(theirs).max()))
    measures = {
        RANK_CORRELATION: _correlate(spearman, ours, theirs, tolerance),
        "concordance of scores": _correlate(concordance, ours, theirs, tolerance),
    }
    if groups := [rows for rows in groups if len(rows) > 1]:
        our_order = np.concatenate([ours[rows] - ours[rows].mean() for rows in groups])
        their_order = np.concatenate([theirs[rows] - theirs[rows].mean() for rows in groups])
        measures["rank correlation within queries"] = _correlate(spearman, our_order, their_order, tolerance)
    return measures


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
