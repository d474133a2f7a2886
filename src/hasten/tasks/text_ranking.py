"""How well a document answers a query: scores and rankings like those of sentence-transformers' CrossEncoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NotRequired, TypeAlias, TypedDict

import numpy as np

from hasten.core.errors import InputError
from hasten.core.ranking import average_precision, ndcg, reciprocal_rank
from hasten.core.report import Agreement, Metric
from hasten.core.scores import CORRELATIONS, correlated
from hasten.core.statistics import concordance, relative_error, spearman
from hasten.core.tensors import BATCH, FloatArray, IntArray, Outputs
from hasten.core.tokenizer import Tokenizer
from hasten.tasks import Encoded, Row, TaskSpec, check_spread, checked_text, is_number, not_finite, read_options
from hasten.tasks.sentence_similarity import chosen_prompt
from hasten.tasks.text_classification import TASK as CLASSIFICATION
from hasten.tasks.text_classification import Scoring, apply_scoring

LOGITS = "logits"
_HINT = 'a pair is {"text": …, "text_pair": …} or, in a list, ["…", "…"]; a ranking {"query": …, "documents": […]}'
_SAMPLE_QUERIES = 120
# Scores within this, relative to the largest, are the same: runtimes of fp32 may differ by as much.
_SAME = 1e-3
# The ways to label rows.
_GOLD = ("relevance", "labels", "label", "score")
# What a query's documents are ranked by, and what pairs are whose queries have one document each.
_RANKED = ("nDCG@10", "MRR@10", "MAP")
_APART = "average precision"


class Ranked(TypedDict):
    corpus_id: int
    score: float
    text: NotRequired[str]


# Of a pair its score, or its scores where the model gives several; of a query its documents, the best first.
Answer: TypeAlias = float | FloatArray | list[Ranked]


@dataclass(frozen=True, slots=True)
class Query:
    """A query and its documents; a pair is a query with one, answered with a bare score."""

    text: str
    documents: tuple[str, ...]
    is_pair: bool


@dataclass(frozen=True, slots=True)
class _Given:
    top_k: int | None = None
    return_documents: bool = False
    function_to_apply: Scoring | None = None
    prompt_name: str | None = None
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class Options:
    scores: int
    scoring: Scoring
    top_k: int | None
    has_documents: bool
    prompt: str


@dataclass(frozen=True, slots=True)
class Queries(Encoded):
    """Rows in the order of the queries and their documents."""

    queries: tuple[Query, ...]

    @property
    def groups(self) -> list[IntArray]:
        """The rows of documents that compete: those of one query, pairs with the same query among them."""
        owners: dict[object, list[int]] = {}
        for row, item in enumerate(self.item_of_row.tolist()):
            query = self.queries[item]
            owners.setdefault(query.text if query.is_pair else item, []).append(row)
        return [np.array(rows) for rows in owners.values()]


class TextRanking:
    name = "text-ranking"
    auto_class = "AutoModelForSequenceClassification"
    heads = ("ForSequenceClassification",)
    fields = ("query", "documents")
    columns = ("query", "documents", "text", "text_pair", *_GOLD)
    takes_pairs = True
    is_detected = False
    outputs = (LOGITS,)
    axes = (BATCH,)
    min_agreement = 0.99

    def parse(self, payload: object) -> list[Query]:
        """Pairs, which in a list may be lists of two, and queries with documents."""
        if isinstance(payload, list | tuple) and not payload:
            raise InputError("nothing to rank: the list is empty")
        entries = payload if isinstance(payload, list | tuple) else [payload]
        return [_parse_item(entry, place) for place, entry in enumerate(entries, 1)]

    def options(self, spec: TaskSpec, given: Mapping[str, object]) -> Options:
        asked = read_options(_Given, given, any_case="function_to_apply")
        if asked.top_k is not None and asked.top_k < 1:
            raise InputError(f"top_k is {asked.top_k}; it must be at least 1, or null for all documents")
        return Options(
            scores=len(spec.labels),
            scoring=asked.function_to_apply or _scoring(spec),
            top_k=asked.top_k,
            has_documents=asked.return_documents,
            prompt=chosen_prompt(spec, asked.prompt_name, asked.prompt),
        )

    def encode(self, items: Sequence[Query], tokenizer: Tokenizer, options: Options) -> Queries:
        """One row a document."""
        ranking = next((place for place, item in enumerate(items, 1) if not item.is_pair), None)
        if ranking is None and (options.top_k is not None or options.has_documents):
            raise InputError("top_k and return_documents are for rankings, and these are pairs", hint=_HINT)
        if ranking is not None and options.scores > 1:
            raise InputError(
                f"item {ranking} asks for a ranking, and this model gives {options.scores} scores for each document",
                hint='ask about pairs: {"text": …, "text_pair": …}',
            )
        tokens = tokenizer.encode(
            [(options.prompt + item.text, document) for item in items for document in item.documents]
        )
        owners = np.repeat(np.arange(len(items)), [len(item.documents) for item in items])
        return Queries(tokens.batch, owners, len(items), tokens.truncated, tokens.encodings, tuple(items))

    def decode(self, outputs: Outputs, encoded: Encoded, options: Options) -> list[Answer]:
        queries = _queries(encoded).queries
        scores = apply_scoring(outputs[LOGITS], options.scoring)
        if options.scores == 1:
            scores = scores[:, 0]
        answers: list[Answer] = []
        ends = np.cumsum([len(query.documents) for query in queries])
        for query, own in zip(queries, np.split(scores, ends[:-1]), strict=True):
            if query.is_pair:
                answers.append(own[0] if options.scores > 1 else float(own[0]))
                continue
            # Stable, so that equal scores keep the documents' own order, as CrossEncoder's sort does.
            order = np.argsort(-own, kind="stable")[: options.top_k].tolist()
            ranking = [Ranked(corpus_id=place, score=float(own[place])) for place in order]
            if options.has_documents:
                for entry in ranking:
                    entry["text"] = query.documents[entry["corpus_id"]]
            answers.append(ranking)
        return answers

    def present(self, payload: object, answers: list[Answer], options: Options) -> object:
        """One array for pairs, as CrossEncoder has it, and lists for rankings."""
        if not isinstance(payload, list | tuple):
            return answers[0]
        are_scores = not any(isinstance(answer, list) for answer in answers)
        return np.asarray(answers, np.float32) if are_scores else answers

    def sample(self, texts: Sequence[str], spec: TaskSpec) -> list[Row]:
        """The first half of a text as the query, for documents that fit it more or less: the text, its rest, others."""
        rows: list[Row] = []
        for place in range(0, len(texts), max(1, len(texts) // _SAMPLE_QUERIES)):
            text, others = texts[place], [texts[(place + step) % len(texts)] for step in (1, 8)]
            query, rest = text[: (len(text) + 1) // 2].strip() or text, text[len(text) // 2 :].strip() or text
            documents = [others[0], rest, others[1], text]
            if len(spec.labels) > 1:
                rows += [{"text": query, "text_pair": document} for document in dict.fromkeys(documents)]
            else:
                rows.append({"query": query, "documents": documents})
        return rows

    def gold(self, rows: Sequence[Row], spec: TaskSpec) -> list[object] | None:
        """Relevances for rankings; for pairs classes, or relevances as "label", or numbers to correlate as "score"."""
        if len(spec.labels) > 1:
            return CLASSIFICATION.gold(rows, spec)
        kinds = [key for key in _GOLD if any(key in row for row in rows)]
        if not kinds:
            return None
        if len(kinds) > 1:
            raise InputError(f'rows have "{kinds[0]}" and "{kinds[1]}"', hint="label them all in one way")
        return [_gold(row, kinds[0], place) for place, row in enumerate(rows, 1)]

    def metrics(self, gold: Sequence[object], spec: TaskSpec) -> tuple[str, ...]:
        """Of pairs with relevances, which of the two it is shows only when queries are compared."""
        if len(spec.labels) > 1:
            return CLASSIFICATION.metrics(gold, spec)
        if isinstance(gold[0], float):
            check_spread(gold)
            return CORRELATIONS
        if not any(isinstance(own, tuple) and any(own) for own in gold):
            raise InputError("no document is relevant to its query, so no order is better than another")
        are_pairs = all(isinstance(own, tuple) and len(own) == 1 for own in gold)
        return (*_RANKED, _APART) if are_pairs else _RANKED

    def marks(self, outputs: Outputs, encoded: Encoded, gold: Sequence[object], spec: TaskSpec) -> FloatArray:
        """Score and wanted score of a pair; or score, relevance and one for a pair whose query has no other; or a
        query's three measures and how many items it stands for."""
        if len(spec.labels) > 1:
            return CLASSIFICATION.marks(outputs, encoded, gold, spec)
        scores = apply_scoring(outputs[LOGITS], _scoring(spec))[:, 0].astype(np.float64)
        if isinstance(gold[0], float):
            return np.stack([scores, np.asarray(gold, np.float64)], axis=1)
        relevance = np.concatenate([np.asarray(own, np.float64) for own in gold])
        groups = _queries(encoded).groups
        if all(len(rows) == 1 for rows in groups):
            # Nothing competes within a query: the question is whether relevant pairs come before all others.
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

    def metric(self, marks: FloatArray, spec: TaskSpec) -> Metric:
        if len(spec.labels) > 1:
            return CLASSIFICATION.metric(marks, spec)
        if marks.shape[1] == 2:
            return correlated(marks)
        if marks.shape[1] == 3:
            return Metric(_APART, average_precision(marks[:, 0], marks[:, 1]), len(marks))
        first, *also = zip(_RANKED, (float(own.mean()) for own in marks[:, :3].T), strict=True)
        return Metric(*first, int(marks[:, 3].sum()), dict(also))

    def agree(self, outputs: Outputs, reference: Outputs, encoded: Encoded, spec: TaskSpec) -> Agreement:
        """The least of three, each blind to what another sees: the order of all documents, the order within queries,
        and the scores themselves, which may keep their order and still cross a threshold."""
        if len(spec.labels) > 1:
            return CLASSIFICATION.agree(outputs, reference, encoded, spec)
        ours, theirs = outputs[LOGITS][:, 0].astype(np.float64), reference[LOGITS][:, 0].astype(np.float64)
        broken = ~np.isfinite(ours)
        if broken.any():
            agreement = not_finite("rank correlation", ours[:, None], theirs[:, None], encoded)
            return replace(agreement, worst=tuple(dict.fromkeys(encoded.item_of_row[broken].tolist()))[:3])
        scale = float(np.abs(theirs).max())
        tolerance = _SAME * max(1.0, scale)
        measures = {
            "rank correlation": _kept(spearman, ours, theirs, tolerance),
            "concordance of scores": _kept(concordance, ours, theirs, tolerance),
        }
        groups = [rows for rows in _queries(encoded).groups if len(rows) > 1]
        flipped = np.zeros(len(ours), bool)
        for rows in groups:
            flipped[rows] = ours[rows].argmax() != theirs[rows].argmax()
        if groups:
            own = np.concatenate([ours[rows] - ours[rows].mean() for rows in groups])
            original = np.concatenate([theirs[rows] - theirs[rows].mean() for rows in groups])
            measures["rank correlation within queries"] = _kept(spearman, own, original, tolerance)
        error = np.abs(ours - theirs)
        measure = min(measures, key=lambda name: measures[name])
        return Agreement(
            measure=measure,
            value=measures[measure],
            rows=len(ours),
            max_error=float(error.max()),
            relative_error=relative_error(ours, theirs),
            scale=scale,
            flips=sum(bool(flipped[rows[0]]) for rows in groups) if groups else None,
            rank_correlation=measures["rank correlation"],
            worst=_worst(np.where(flipped, error + 1e6, error), encoded),
        )


def _parse_item(entry: object, place: int) -> Query:
    if isinstance(entry, Mapping) and ("query" in entry or "documents" in entry):
        return _parse_ranking(entry, place)
    if isinstance(entry, Mapping):
        if entry.get("text") is None or entry.get("text_pair") is None:
            raise InputError(
                f'item {place} has no "text" and "text_pair": {{{", ".join(map(str, entry))}}}', hint=_HINT
            )
        texts: Sequence[object] = (entry["text"], entry["text_pair"])
    elif isinstance(entry, list | tuple):
        texts = entry
    else:
        raise InputError(f"item {place} is {type(entry).__name__}, not a pair of texts", hint=_HINT)
    if len(texts) != 2:
        raise InputError(f"item {place} is a list of {len(texts)}, not a pair of texts", hint=_HINT)
    text, document = checked_text(texts[0], f"text {place}"), checked_text(texts[1], f"text_pair {place}")
    return Query(text, (document,), is_pair=True)


def _parse_ranking(entry: Mapping[str, object], place: int) -> Query:
    for key in ("query", "documents"):
        if entry.get(key) is None:
            raise InputError(f'item {place} has no "{key}"', hint=_HINT)
    if entry.get("text_pair") is not None:
        raise InputError(f'item {place} has both "documents" and a "text_pair"', hint=_HINT)
    documents = entry["documents"]
    if not isinstance(documents, list | tuple):
        raise InputError(f'"documents" of item {place} is {type(documents).__name__}, not a list of strings')
    if not documents:
        raise InputError(f"item {place} has no documents: the list is empty")
    return Query(
        checked_text(entry["query"], f"query {place}"),
        tuple(checked_text(text, f"document {number} of item {place}") for number, text in enumerate(documents, 1)),
        is_pair=False,
    )


def _scoring(spec: TaskSpec) -> Scoring:
    return Scoring(spec.activation or ("sigmoid" if len(spec.labels) == 1 else "none"))


def _queries(encoded: Encoded) -> Queries:
    if not isinstance(encoded, Queries):
        raise TypeError("outputs are read with what this task's own encode gave: whose documents rows are stands there")
    return encoded


def _gold(row: Row, kind: str, place: int) -> float | tuple[float, ...]:
    """A number to correlate with, or how relevant each document is."""
    value = row.get(kind)
    if value is None:
        raise InputError(f'row {place} has no "{kind}", though other rows have one')
    if kind in ("score", "label"):
        if "documents" in row:
            raise InputError(f'row {place} has documents and one "{kind}"', hint='"relevance" takes a number for each')
        number = _number(value, kind, place)
        return number if kind == "score" else (_relevance(number, kind, place),)
    documents = row.get("documents")
    if not isinstance(documents, list | tuple) or not isinstance(value, list | tuple) or len(documents) != len(value):
        raise InputError(f'row {place} must have as many numbers in "{kind}" as it has documents')
    return tuple(_relevance(_number(number, kind, place), kind, place) for number in value)


def _number(value: object, kind: str, place: int) -> float:
    if is_number(value):
        return float(value)
    raise InputError(f'row {place} has no number in "{kind}": {value!r:.60}')


def _relevance(number: float, kind: str, place: int) -> float:
    if number < 0:
        raise InputError(f'row {place} has {number:g} in "{kind}": relevance starts at 0, for none')
    return number


def _kept(
    correlation: Callable[[FloatArray, FloatArray], float], ours: FloatArray, theirs: FloatArray, tolerance: float
) -> float:
    """A correlation or, where the reference knows no differences, whether the numbers themselves are the same."""
    if np.ptp(theirs) > tolerance:
        return correlation(ours, theirs)
    return 1.0 if np.abs(ours - theirs).max() <= tolerance else 0.0


def _worst(badness: FloatArray, encoded: Encoded) -> tuple[int, ...]:
    """The items with the worst documents."""
    worst = np.full(encoded.items, -1.0)
    np.maximum.at(worst, encoded.item_of_row, badness)
    return tuple(int(item) for item in np.argsort(-worst, kind="stable")[:3])


TASK = TextRanking()
