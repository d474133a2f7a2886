"""Where in a text the answer to a question stands: answers like the pipeline of that name in transformers 4.

transformers 5 has none any more; what is matched here is 4.57, with a fast tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TypeAlias, TypedDict, TypeGuard

import numpy as np
from tokenizers import Encoding

from hasten.core import squad
from hasten.core.errors import InputError
from hasten.core.report import Agreement, Metric
from hasten.core.spans import following, top_spans
from hasten.core.statistics import relative_error, spearman
from hasten.core.tensors import BATCH, SEQUENCE, BoolArray, FloatArray, IntArray, Outputs
from hasten.core.tokenizer import Tokenizer
from hasten.core.windows import Cutter
from hasten.tasks import Encoded, Row, TaskSpec, checked_text, not_finite, read_options

START, END = "start_logits", "end_logits"
# The pipeline's logit of what can be no part of an answer.
_NEVER = np.float32(-10000.0)
# The longest answer when answers are judged, as in SQuAD's own evaluations.
_JUDGED_TOKENS = 30
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
    score: float
    start: int
    end: int
    answer: str


# One answer stands alone, several are a list.
Answer: TypeAlias = Span | list[Span]


@dataclass(frozen=True, slots=True)
class Query:
    question: str
    context: str


@dataclass(frozen=True, slots=True)
class Options:
    top_k: int = 1
    # How many tokens neighbouring windows share; without it 128, or half a window where that is less.
    doc_stride: int | None = None
    max_answer_len: int = 15
    # How long a window is, question included; without it 384, or the model's limit where that is less.
    max_seq_len: int | None = None
    # Where a question is cut; without it never.
    max_question_len: int | None = None
    handle_impossible_answer: bool = False
    align_to_words: bool = True


@dataclass(frozen=True, slots=True)
class Windows(Encoded):
    """Contexts cut into windows, each joined with its question: a row each."""

    contexts: tuple[str, ...]
    # Which of the two texts of a row is the context.
    context_place: int
    # The tokens an answer may consist of, and the one that stands for no answer: those the softmax goes over.
    candidates: BoolArray

    def rows(self, outputs: Outputs) -> Iterator[tuple[int, Encoding, BoolArray, FloatArray, FloatArray]]:
        """Each row's item, its encoding, where an answer may start and end, its start and its end logits."""
        cuts = np.cumsum(self.batch.lengths)[:-1]
        columns = [np.split(column, cuts) for column in (self.candidates, outputs[START], outputs[END])]
        for item, encoding, candidates, *logits in zip(self.item_of_row, self.encodings, *columns, strict=True):
            # What is no number is no answer: a broken variant must be judged without an error.
            start, end = (np.where(candidates & np.isfinite(own), own, _NEVER).astype(np.float32) for own in logits)
            inside = candidates.copy()
            inside[0] = False  # the place that stands for no answer
            yield int(item), encoding, inside, start, end


class QuestionAnswering:
    name = "question-answering"
    auto_class = "AutoModelForQuestionAnswering"
    # Simple: XLNet and its like have another head of the longer name, which searches for spans by itself.
    heads = ("ForQuestionAnsweringSimple", "ForQuestionAnswering")
    fields = _KEYS
    columns = (*_KEYS, "answers")
    takes_pairs = True
    is_detected = True
    outputs = (START, END)
    axes = (BATCH, SEQUENCE)
    min_agreement = 0.99

    def parse(self, payload: object) -> list[Query]:
        """{"question": …, "context": …}, a list of those, or one whose questions, or both, are lists."""
        if _is_several(payload):
            payload = _spread(payload)
        entries = payload if isinstance(payload, list | tuple) else [payload]
        if not entries:
            raise InputError("no question given: the list is empty")
        return [_query(entry, place) for place, entry in enumerate(entries, 1)]

    def options(self, spec: TaskSpec, given: Mapping[str, object]) -> Options:
        # As in the pipeline, None is as good as not given.
        options = read_options(Options, {name: value for name, value in given.items() if value is not None})
        for name, least in (("top_k", 1), ("max_answer_len", 1), ("max_seq_len", 1), ("max_question_len", 1)):
            _check_least(name, getattr(options, name), least)
        _check_least("doc_stride", options.doc_stride, 0)
        return options

    def encode(self, items: Sequence[Query], tokenizer: Tokenizer, options: Options) -> Windows:
        cutter = Cutter.of(tokenizer, options.max_seq_len, options.doc_stride, options.max_question_len)
        questions = tokenizer.encode_whole([item.question for item in items])
        contexts = tokenizer.encode_whole([item.context for item in items])
        rows: list[Encoding] = []
        owners: list[int] = []
        for item, (question, context) in enumerate(zip(questions, contexts, strict=True)):
            rows += cutter.windows(question, context, item + 1)
            owners += [item] * (len(rows) - len(owners))
        return Windows(
            batch=tokenizer.tokens(rows).batch,
            item_of_row=np.array(owners),
            items=len(items),
            truncated=(),
            encodings=rows,
            contexts=tuple(item.context for item in items),
            context_place=cutter.context_place,
            candidates=np.array([allowed for row in rows for allowed in cutter.candidates(row)], np.bool_),
        )

    def decode(self, outputs: Outputs, encoded: Encoded, options: Options) -> list[Answer]:
        windows = _own(encoded)
        # Some will turn out to be the same words: the pipeline's reserve.
        count = 2 * options.top_k + 10 if options.align_to_words else options.top_k
        found: list[dict[str, Span]] = [{} for _ in range(windows.items)]
        nothing = [1.0] * windows.items
        for item, encoding, inside, *logits in windows.rows(outputs):
            start, end = (_softmax(own) for own in logits)
            nothing[item] = min(nothing[item], float(start[0] * end[0]))
            scores = start[:, None] * following(end, options.max_answer_len)
            spans = top_spans(scores, inside, count)
            if len(spans) < count:
                # The pipeline fills up with what has no score, most often with the empty answer.
                spans.append((0, 0, 0.0))
            for first, last, score in spans:
                begin, stop = _characters(encoding, first, last, windows.context_place, options.align_to_words)
                text = windows.contexts[item][begin:stop]
                # What differs in case alone is one answer, whichever windows it comes from.
                span = found[item].setdefault(text.lower(), Span(score=0.0, start=begin, end=stop, answer=text))
                span["score"] += score
        return [_ranked(list(spans.values()), none, options) for spans, none in zip(found, nothing, strict=True)]

    def present(self, payload: object, answers: list[Answer], options: Options) -> object:
        return answers if isinstance(payload, list | tuple) or _is_several(payload) else answers[0]

    def sample(self, texts: Sequence[str], spec: TaskSpec) -> list[Row]:
        """Every text with a question, and long ones together: most models take those in several windows."""
        long = [text for text in texts if len(text) > 1000]
        contexts = [*texts, *(f"{one}\n\n{other}" for one, other in zip(long[::2], long[1::2], strict=False))]
        return [{"question": ask, "context": context} for ask, context in zip(cycle(_SAMPLE_QUESTIONS), contexts)]

    def gold(self, rows: Sequence[Row], spec: TaskSpec) -> list[object] | None:
        if not any("answers" in row for row in rows):
            return None
        return [_right_answers(row, place) for place, row in enumerate(rows, 1)]

    def metrics(self, gold: Sequence[object], spec: TaskSpec) -> tuple[str, ...]:
        return _METRICS

    def marks(self, outputs: Outputs, encoded: Encoded, gold: Sequence[object], spec: TaskSpec) -> FloatArray:
        """F1 and exact match as SQuAD has them: of the span of the greatest logits, or of none where some questions
        have no answer."""
        marks = []
        for answer, rights in zip(_judged(_own(encoded), outputs, may_be_none=not all(gold)), gold, strict=True):
            assert isinstance(rights, tuple)
            marks.append([squad.best(measure, answer, rights) for measure in (squad.f1, squad.exact)])
        return np.array(marks)

    def metric(self, marks: FloatArray, spec: TaskSpec) -> Metric:
        f1, exact = (float(own.mean()) for own in marks.T)
        return Metric(_METRICS[0], f1, len(marks), {_METRICS[1]: exact})

    def agree(self, outputs: Outputs, reference: Outputs, encoded: Encoded, spec: TaskSpec) -> Agreement:
        """Whether the best answer to each question stands at the same place; errors of the logits behind it."""
        windows = _own(encoded)
        # Logits of the question are never looked at.
        counted = windows.candidates if windows.candidates.any() else ~windows.candidates
        ours, theirs = (
            np.stack([given[START], given[END]], axis=1)[counted].astype(np.float64) for given in (outputs, reference)
        )
        owners = np.repeat(windows.item_of_row, windows.batch.lengths)[counted]
        broken = ~np.isfinite(ours).all(axis=1)
        if broken.any():
            agreement = not_finite("same span", ours, theirs, replace(windows, item_of_row=owners))
            worst = tuple(dict.fromkeys(owners[broken].tolist()))[:3]
            return replace(agreement, rows=windows.items, worst=worst)
        error = np.zeros(windows.items)
        np.maximum.at(error, owners, np.abs(ours - theirs).max(axis=1))
        best, wanted = (self.decode(given, windows, Options()) for given in (outputs, reference))
        flipped = np.array([_place(one) != _place(other) for one, other in zip(best, wanted, strict=True)])
        cosines = _item_cosines(ours, theirs, owners, windows.items)
        return Agreement(
            measure="same span",
            value=1.0 - float(flipped.mean()),
            rows=windows.items,
            max_error=float(error.max()),
            relative_error=relative_error(ours, theirs),
            scale=float(np.abs(theirs).max()),
            flips=int(flipped.sum()),
            cosine_mean=float(cosines.mean()),
            cosine_min=float(cosines.min()),
            rank_correlation=float(np.mean([spearman(ours[:, i], theirs[:, i]) for i in range(2)])),
            # A flip is worse than any error that flips nothing.
            worst=tuple(int(item) for item in np.argsort(-np.where(flipped, error + 1e6, error), kind="stable")[:3]),
        )


def _is_several(payload: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(payload, Mapping) and any(isinstance(payload.get(key), list | tuple) for key in _KEYS)


def _spread(payload: Mapping[str, object]) -> list[Row]:
    """Questions with the one context, or with a context each."""
    questions, contexts = (payload.get(key) for key in _KEYS)
    if not isinstance(questions, list | tuple):
        raise InputError('"context" is a list, and "question" is none', hint="give a question for each context")
    if not isinstance(contexts, list | tuple):
        contexts = [contexts] * len(questions)
    if len(questions) != len(contexts):
        raise InputError(f"{len(questions)} questions do not go with {len(contexts)} contexts")
    return [{"question": question, "context": context} for question, context in zip(questions, contexts, strict=True)]


def _query(entry: object, place: int) -> Query:
    if not isinstance(entry, Mapping):
        raise InputError(
            f"item {place} is {type(entry).__name__}, not a question with its context",
            hint='as in {"question": "…", "context": "…"}',
        )
    for key in _KEYS:
        if entry.get(key) is None:
            raise InputError(f'item {place} has no "{key}"')
    return Query(*(checked_text(entry[key], f"{key} {place}") for key in _KEYS))


def _check_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise InputError(f"{name} is {value}; it must be at least {least}")


def _own(encoded: Encoded) -> Windows:
    if not isinstance(encoded, Windows):
        raise TypeError("these rows must come from this task's own encode: answers need the contexts")
    return encoded


def _softmax(logits: FloatArray) -> FloatArray:
    powers = np.exp(logits - logits.max())
    scores: FloatArray = powers / powers.sum()
    return scores


def _characters(encoding: Encoding, first: int, last: int, text: int, by_words: bool) -> tuple[int, int]:
    """Where a span stands in its text, from the start of its first word to the end of its last if so wished."""
    if by_words:
        words = encoding.token_to_word(first), encoding.token_to_word(last)
        ends = [None if word is None else encoding.word_to_chars(word, text) for word in words]
        if ends[0] is not None and ends[1] is not None:
            return ends[0][0], ends[1][1]
    return encoding.offsets[first][0], encoding.offsets[last][1]


def _ranked(spans: list[Span], none: float, options: Options) -> Answer:
    if options.handle_impossible_answer:
        spans.append(Span(score=none, start=0, end=0, answer=""))
    best = sorted(spans, key=lambda span: span["score"], reverse=True)[: options.top_k]
    return best[0] if len(best) == 1 else best


def _place(answer: Answer) -> tuple[int, int]:
    best = answer[0] if isinstance(answer, list) else answer
    return best["start"], best["end"]


def _judged(windows: Windows, outputs: Outputs, *, may_be_none: bool) -> list[str]:
    """The answer to each question that is held against the right ones; the empty one only where it may be."""
    best = [(-np.inf, "")] * windows.items
    nothing = [np.inf] * windows.items
    for item, encoding, inside, start, end in windows.rows(outputs):
        nothing[item] = min(nothing[item], float(start[0] + end[0]))
        scores = start[:, None] + following(end, _JUDGED_TOKENS)
        for first, last, score in top_spans(scores, inside, 1):
            if score > best[item][0]:
                begin, stop = _characters(encoding, first, last, windows.context_place, by_words=False)
                best[item] = score, windows.contexts[item][begin:stop]
    return ["" if may_be_none and none > score else text for (score, text), none in zip(best, nothing, strict=True)]


def _right_answers(row: Row, place: int) -> tuple[str, ...]:
    """{"text": […]} as in Hugging Face's files, [{"text": …}] as in SQuAD's own, or plain texts; none is an answer."""
    given = row.get("answers")
    if given is None:
        raise InputError(f'row {place} has no "answers", though other rows have some')
    entries = given.get("text") if isinstance(given, Mapping) else given
    if not isinstance(entries, list | tuple):
        raise InputError(f'row {place} must have a list of texts in "answers"', hint="an empty one for no answer")
    texts = [entry.get("text") if isinstance(entry, Mapping) else entry for entry in entries]
    return tuple(checked_text(text, f"an answer of row {place}", may_be_empty=True) for text in texts)


def _item_cosines(ours: FloatArray, theirs: FloatArray, owners: IntArray, items: int) -> FloatArray:
    """Of all the logits of an item, taken as one vector; two that are nothing but zeros agree."""

    def products(a: FloatArray, b: FloatArray) -> FloatArray:
        return np.bincount(owners, (a * b).sum(axis=1), items).astype(np.float64)

    norms = np.sqrt(products(ours, ours) * products(theirs, theirs))
    is_same = (products(ours - theirs, ours - theirs) == 0).astype(np.float64)
    cosines: FloatArray = np.divide(products(ours, theirs), norms, out=is_same, where=norms > 0)
    return cosines


TASK = QuestionAnswering()
