"""Find the answer to a question in a text, like the pipeline of that name in transformers 4.

transformers 5 has removed the pipeline; answers match those of 4.57 with a fast tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TypeAlias, TypedDict, TypeGuard

import numpy as np
from tokenizers import Encoding

from hasten.core.errors import InputError
from hasten.core.report import Agreement, Metric
from hasten.core.tensors import BATCH, SEQUENCE, BoolArray, FloatArray, Outputs
from hasten.core.text.input_checks import check_min, check_text, list_items
from hasten.core.text.tokenizer import Tokenizer
from hasten.metrics import squad
from hasten.metrics.agreement import compare, find_non_finite
from hasten.metrics.statistics import mean_spearman, row_cosines, softmax
from hasten.tasks import Encoded, Row, Task, TaskSpec, narrow_rows, read_options
from hasten.tasks._labels import read_labels, require_label
from hasten.tasks._spans.sliding_window import WindowSplitter
from hasten.tasks._spans.spans import following, top_spans

START, END = "start_logits", "end_logits"
# The pipeline's logit of tokens that cannot be part of an answer.
_EXCLUDED_LOGIT = np.float32(-10000.0)
# The longest answer when computing metrics, as in SQuAD's evaluation script.
_MAX_SCORED_TOKENS = 30
_METRICS = ("F1", "exact match")

_KEYS = ("question", "context")
_SAMPLE_QUESTIONS = (
    "What is this about?",
    "Who is named here?",
    "When did it happen, and on which day?",
    "Where is it?",
    "How many were there?",
    "Why did they do that?",
    "Which number comes first?",
    "What was good or bad about it?",
    "How much does it cost, and for how long?",
    "Who did what to whom?",
    "What should be done next?",
)


class Span(TypedDict):
    """An answer: its text, its position in the context and its score."""

    score: float
    start: int
    end: int
    answer: str


# A single answer is not wrapped in a list.
Answer: TypeAlias = Span | list[Span]


@dataclass(frozen=True, slots=True)
class Query:
    """A question and the context that answers it."""

    question: str
    context: str


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a request, under the pipeline's names."""

    top_k: int = 1
    # The number of tokens that neighbouring windows share; by default 128, at most half a window.
    doc_stride: int | None = None
    max_answer_len: int = 15
    # The length of a window, question included; by default 384, at most the model's limit.
    max_seq_len: int | None = None
    # The length to which questions are truncated; by default they are not.
    max_question_len: int | None = None
    handle_impossible_answer: bool = False
    align_to_words: bool = True


@dataclass(frozen=True, slots=True)
class Windows(Encoded):
    """Windows of contexts, each joined with its question: one row per window."""

    contexts: tuple[str, ...]
    # The index of the context among the two texts of a row.
    context_index: int
    # The tokens that the softmax covers: those an answer may consist of, and [CLS] for no answer.
    candidates: BoolArray

    def rows(self, outputs: Outputs) -> Iterator[tuple[int, Encoding, BoolArray, FloatArray, FloatArray]]:
        """Yield the item, the encoding, where an answer may start and end, and the start and end logits of each row."""
        split = self.batch.split
        columns = split(self.candidates), split(outputs[START]), split(outputs[END])
        for item, encoding, candidates, *logits in zip(self.item_of_row, self.encodings, *columns, strict=True):
            # Exclude logits that are not finite: judging a broken variant must not raise.
            start, end = (
                np.where(candidates & np.isfinite(column), column, _EXCLUDED_LOGIT).astype(np.float32)
                for column in logits
            )
            inside = candidates.copy()
            inside[0] = False  # the position that stands for no answer
            yield int(item), encoding, inside, start, end


class QuestionAnswering(Task[Query, Answer, Options]):
    """Extractive question answering over windows of the context."""

    name = "question-answering"
    auto_class = "AutoModelForQuestionAnswering"
    # Simple: XLNet and XLM use the plain name for another head, which searches for spans itself.
    heads = ("ForQuestionAnsweringSimple", "ForQuestionAnswering")
    fields = _KEYS
    columns = (*_KEYS, "answers")
    takes_pairs = True
    is_detected = True
    outputs = (START, END)
    axes = (BATCH, SEQUENCE)
    min_agreement = 0.99

    def parse(self, payload: object) -> list[Query]:
        """Return the queries of {"question": …, "context": …}, a list of those, or one with lists as values."""
        if _has_lists(payload):
            payload = _expand_lists(payload)
        entries = list_items(payload, "no question to answer")
        return [_query(entry, position) for position, entry in enumerate(entries, 1)]

    def options(self, spec: TaskSpec, values: Mapping[str, object]) -> Options:
        # As in the pipeline, None means the default.
        options = read_options(Options, {name: value for name, value in values.items() if value is not None})
        for name in ("top_k", "max_answer_len", "max_seq_len", "max_question_len"):
            check_min(name, getattr(options, name))
        check_min("doc_stride", options.doc_stride, 0)
        return options

    def encode(self, items: Sequence[Query], tokenizer: Tokenizer, options: Options) -> Windows:
        splitter = WindowSplitter.of(tokenizer, options.max_seq_len, options.doc_stride, options.max_question_len)
        questions = tokenizer.encode_whole([item.question for item in items])
        contexts = tokenizer.encode_whole([item.context for item in items])
        rows: list[Encoding] = []
        owners: list[int] = []
        for item, (question, context) in enumerate(zip(questions, contexts, strict=True)):
            rows += splitter.windows(question, context, item + 1)
            owners += [item] * (len(rows) - len(owners))
        return Windows(
            batch=tokenizer.tokens(rows).batch,
            item_of_row=np.array(owners),
            items=len(items),
            truncated=(),
            encodings=rows,
            contexts=tuple(item.context for item in items),
            context_index=splitter.context_index,
            candidates=np.array([allowed for row in rows for allowed in splitter.candidates(row)], np.bool_),
        )

    def decode(self, outputs: Outputs, encoded: Encoded, options: Options) -> list[Answer]:
        windows = narrow_rows(encoded, Windows)
        # The pipeline's reserve: several spans may align to the same words.
        count = 2 * options.top_k + 10 if options.align_to_words else options.top_k
        spans_of_item: list[dict[str, Span]] = [{} for _ in range(windows.items)]
        no_answer = [1.0] * windows.items
        for item, encoding, inside, *logits in windows.rows(outputs):
            start, end = (softmax(column) for column in logits)
            no_answer[item] = min(no_answer[item], float(start[0] * end[0]))
            scores = start[:, None] * following(end, options.max_answer_len)
            spans = top_spans(scores, inside, count)
            if len(spans) < count:
                # The pipeline fills up with spans without a score, most often with the empty answer.
                spans.append((0, 0, 0.0))
            for first, last, score in spans:
                begin, stop = _characters(encoding, first, last, windows.context_index, options.align_to_words)
                text = windows.contexts[item][begin:stop]
                # Answers that differ only in case are one, whichever windows they come from.
                span = spans_of_item[item].setdefault(text.lower(), Span(score=0.0, start=begin, end=stop, answer=text))
                span["score"] += score
        ranked = zip(spans_of_item, no_answer, strict=True)
        return [_rank(list(spans.values()), none, options) for spans, none in ranked]

    def present(self, payload: object, answers: list[Answer], options: Options) -> object:
        return answers if isinstance(payload, list | tuple) or _has_lists(payload) else answers[0]

    def sample(self, texts: Sequence[str], spec: TaskSpec) -> list[Row]:
        """Return every text with a question, and pairs of long texts, which most models split into several windows."""
        long = [text for text in texts if len(text) > 1000]
        contexts = [*texts, *(f"{first}\n\n{second}" for first, second in zip(long[::2], long[1::2], strict=False))]
        return [
            {"question": question, "context": context} for question, context in zip(cycle(_SAMPLE_QUESTIONS), contexts)
        ]

    def gold(self, rows: Sequence[Row], spec: TaskSpec) -> list[object] | None:
        return read_labels(rows, "answers", _reference_answers)

    def metrics(self, gold: Sequence[object], spec: TaskSpec) -> tuple[str, ...]:
        return _METRICS

    def item_scores(self, outputs: Outputs, encoded: Encoded, gold: Sequence[object], spec: TaskSpec) -> FloatArray:
        """Return F1 and exact match of the span with the greatest logits, as SQuAD defines them.

        The empty answer is allowed only if some questions have no answer.
        """
        item_scores = []
        for answer, references in zip(
            _best_answers(narrow_rows(encoded, Windows), outputs, may_be_none=not all(gold)), gold, strict=True
        ):
            assert isinstance(references, tuple)
            item_scores.append([squad.best(measure, answer, references) for measure in (squad.f1, squad.exact)])
        return np.array(item_scores)

    def metric(self, item_scores: FloatArray, spec: TaskSpec) -> Metric:
        f1, exact = (float(column.mean()) for column in item_scores.T)
        return Metric(_METRICS[0], f1, len(item_scores), {_METRICS[1]: exact})

    def agree(self, outputs: Outputs, reference: Outputs, encoded: Encoded, spec: TaskSpec) -> Agreement:
        """Compare the positions of the best answers, and the logits behind them."""
        windows = narrow_rows(encoded, Windows)
        # Logits of the question are never used.
        compared = windows.candidates if windows.candidates.any() else ~windows.candidates
        ours, theirs = (
            np.stack([logits[START], logits[END]], axis=1)[compared].astype(np.float64)
            for logits in (outputs, reference)
        )
        owners = np.repeat(windows.item_of_row, windows.batch.lengths)[compared]
        if (non_finite := find_non_finite("same span", ours, theirs, owners)) is not None:
            return replace(non_finite, rows=windows.items)
        our_answers, their_answers = (self.decode(logits, windows, Options()) for logits in (outputs, reference))
        flipped = np.array([_span(a) != _span(b) for a, b in zip(our_answers, their_answers, strict=True)])
        # A row for each logit; an item's logits are compared as one vector.
        logit_rows = replace(windows, item_of_row=owners)
        vectors = [
            (our.reshape(1, -1), their.reshape(1, -1))
            for our, their in zip(logit_rows.split(ours), logit_rows.split(theirs), strict=True)
        ]
        agreement = compare(
            "same span",
            ours,
            theirs,
            owners,
            value=1.0 - float(flipped.mean()),
            flipped=flipped[owners],
            flips=int(flipped.sum()),
            cosines=np.concatenate([row_cosines(our, their) for our, their in vectors]),
            rank_correlation=mean_spearman(ours, theirs),
        )
        return replace(agreement, rows=windows.items)


def _has_lists(payload: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(payload, Mapping) and any(isinstance(payload.get(key), list | tuple) for key in _KEYS)


def _expand_lists(payload: Mapping[str, object]) -> list[Row]:
    """Return a row per question, with the one context or with its own."""
    questions, contexts = (payload.get(key) for key in _KEYS)
    if not isinstance(questions, list | tuple):
        raise InputError('"context" is a list, but "question" is not', hint="pass a question for each context")
    if not isinstance(contexts, list | tuple):
        contexts = [contexts] * len(questions)
    if len(questions) != len(contexts):
        raise InputError(f"{len(questions)} questions do not match {len(contexts)} contexts")
    return [{"question": question, "context": context} for question, context in zip(questions, contexts, strict=True)]


def _query(entry: object, position: int) -> Query:
    if not isinstance(entry, Mapping):
        raise InputError(
            f"item {position} is {type(entry).__name__}, not a question with its context",
            hint='as in {"question": "…", "context": "…"}',
        )
    for key in _KEYS:
        if entry.get(key) is None:
            raise InputError(f'item {position} has no "{key}"')
    return Query(*(check_text(entry[key], f"{key} {position}") for key in _KEYS))


def _characters(encoding: Encoding, first: int, last: int, text: int, align_to_words: bool) -> tuple[int, int]:
    """Return the start and end characters of a span, extended to whole words if `align_to_words`."""
    if align_to_words:
        words = encoding.token_to_word(first), encoding.token_to_word(last)
        ends = [None if word is None else encoding.word_to_chars(word, text) for word in words]
        if ends[0] is not None and ends[1] is not None:
            return ends[0][0], ends[1][1]
    return encoding.offsets[first][0], encoding.offsets[last][1]


def _rank(spans: list[Span], none: float, options: Options) -> Answer:
    if options.handle_impossible_answer:
        spans.append(Span(score=none, start=0, end=0, answer=""))
    best = sorted(spans, key=lambda span: span["score"], reverse=True)[: options.top_k]
    return best[0] if len(best) == 1 else best


def _span(answer: Answer) -> tuple[int, int]:
    best = answer[0] if isinstance(answer, list) else answer
    return best["start"], best["end"]


def _best_answers(windows: Windows, outputs: Outputs, *, may_be_none: bool) -> list[str]:
    """Return the answer to each question that is compared with the references; empty only if `may_be_none`."""
    best = [(-np.inf, "")] * windows.items
    no_answer = [np.inf] * windows.items
    for item, encoding, inside, start, end in windows.rows(outputs):
        no_answer[item] = min(no_answer[item], float(start[0] + end[0]))
        scores = start[:, None] + following(end, _MAX_SCORED_TOKENS)
        for first, last, score in top_spans(scores, inside, 1):
            if score > best[item][0]:
                begin, stop = _characters(encoding, first, last, windows.context_index, align_to_words=False)
                best[item] = score, windows.contexts[item][begin:stop]
    return ["" if may_be_none and none > score else text for (score, text), none in zip(best, no_answer, strict=True)]


def _reference_answers(row: Row, position: int) -> tuple[str, ...]:
    """Return {"text": […]} (Hugging Face), [{"text": …}] (SQuAD) or plain texts as a tuple; it may be empty."""
    answers = require_label(row, "answers", position, others="some")
    entries = answers.get("text") if isinstance(answers, Mapping) else answers
    if not isinstance(entries, list | tuple):
        raise InputError(
            f'row {position} must have a list of texts in "answers"', hint="use an empty list for no answer"
        )
    texts = [entry.get("text") if isinstance(entry, Mapping) else entry for entry in entries]
    return tuple(check_text(text, f"an answer of row {position}", may_be_empty=True) for text in texts)


TASK = QuestionAnswering()
