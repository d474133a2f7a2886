"""Which label fits each token of a text, and the entities they make: answers like transformers' pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from typing import TypeAlias, TypedDict

import numpy as np

from hasten.core.entities import OUTSIDE
from hasten.core.errors import InputError
from hasten.core.registry import did_you_mean
from hasten.core.report import Agreement, Metric
from hasten.core.scores import ENTITY_METRICS, entity_counts, entity_metric
from hasten.core.statistics import relative_error, row_cosines, spearman
from hasten.core.tensors import BATCH, SEQUENCE, Batch, BoolArray, FloatArray, IntArray, Outputs
from hasten.core.tokenizer import Tokenizer, Tokens
from hasten.tasks import Encoded, Row, TaskSpec, not_finite, parse_texts, read_options

LOGITS = "logits"

# A text, or a sentence that is already cut into words.
Text: TypeAlias = str | tuple[str, ...]


class Aggregation(StrEnum):
    NONE = "none"
    SIMPLE = "simple"
    FIRST = "first"
    AVERAGE = "average"
    MAX = "max"


class Token(TypedDict):
    entity: str
    score: float
    index: int
    word: str
    start: int
    end: int


class Entity(TypedDict):
    entity_group: str
    score: float
    word: str
    start: int
    end: int


Answer: TypeAlias = list[Token] | list[Entity]


@dataclass(frozen=True, slots=True)
class _Given:
    aggregation_strategy: Aggregation | None = None
    ignore_labels: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Options:
    labels: tuple[str, ...]
    aggregation: Aggregation
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sentences(Encoded):
    """One row an item, with what turns tokens into words again."""

    # What offsets point into; words are joined with spaces.
    texts: tuple[str, ...]
    # Where each word starts in there, for an item that came cut into words: its tokens count from their word.
    word_starts: tuple[tuple[int, ...] | None, ...]
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True)
class _Piece:
    """A token of a text; `word` as the tokenizer spells it."""

    word: str
    scores: FloatArray
    index: int
    start: int
    end: int
    is_subword: bool


@dataclass(frozen=True, slots=True)
class _Tagged:
    """A token or a word with its one label."""

    label: str
    score: float
    word: str
    start: int
    end: int


class TokenClassification:
    name = "token-classification"
    auto_class = "AutoModelForTokenClassification"
    heads = ("ForTokenClassification",)
    fields = ("text",)
    columns = ("text", "tokens", "tags")
    takes_pairs = False
    is_detected = True
    outputs = (LOGITS,)
    axes = (BATCH, SEQUENCE)
    min_agreement = 0.995

    def parse(self, payload: object) -> list[Text]:
        """Texts as everywhere, or {"tokens": […]}."""
        entries = payload if isinstance(payload, list | tuple) else [payload]
        words = [_parse_words(entry, place) for place, entry in enumerate(entries, 1)]
        # Joined words go through the same checks, so that places and messages are the same.
        texts = parse_texts(
            [entry if cut is None else " ".join(cut) for entry, cut in zip(entries, words, strict=True)]
        )
        items: list[Text] = []
        for place, (text, cut) in enumerate(zip(texts, words, strict=True), 1):
            if not isinstance(text, str):
                raise InputError(f'item {place} has a "text_pair", and {self.name} takes one text at a time')
            items.append(text if cut is None else cut)
        return items

    def options(self, spec: TaskSpec, given: Mapping[str, object]) -> Options:
        asked = read_options(_Given, given, any_case="aggregation_strategy")
        ignored = (OUTSIDE,) if asked.ignore_labels is None else asked.ignore_labels
        return Options(spec.labels, asked.aggregation_strategy or Aggregation.NONE, ignored)

    def encode(self, items: Sequence[Text], tokenizer: Tokenizer, options: Options) -> Sentences:
        tokens = _encode(items, tokenizer)
        return Sentences(
            batch=tokens.batch,
            item_of_row=np.arange(len(items)),
            items=len(items),
            truncated=tokens.truncated,
            encodings=tokens.encodings,
            texts=tuple(item if isinstance(item, str) else " ".join(item) for item in items),
            word_starts=tuple(None if isinstance(item, str) else _word_starts(item) for item in items),
            tokenizer=tokenizer,
        )

    def decode(self, outputs: Outputs, encoded: Encoded, options: Options) -> list[Answer]:
        if not isinstance(encoded, Sentences):
            raise TypeError("what is decoded must come from this task's own encode: offsets need the texts")
        logits = outputs[LOGITS].astype(np.float32)
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores = powers / powers.sum(axis=1, keepdims=True)
        splits = np.split(scores, np.cumsum(encoded.batch.lengths)[:-1])
        pieces_of = _piece_reader(encoded)
        if options.aggregation is Aggregation.NONE:
            return [_tokens(pieces_of(row, own), options) for row, own in enumerate(splits)]
        to_text = encoded.tokenizer.to_text
        return [_entities(pieces_of(row, own), options, to_text) for row, own in enumerate(splits)]

    def present(self, payload: object, answers: list[Answer], options: Options) -> object:
        return answers if isinstance(payload, list | tuple) else answers[0]

    def sample(self, texts: Sequence[str], spec: TaskSpec) -> list[Row]:
        return [{"text": text} for text in texts]

    def gold(self, rows: Sequence[Row], spec: TaskSpec) -> list[object] | None:
        if not any("tags" in row for row in rows):
            return None
        return [_gold(row, spec, place) for place, row in enumerate(rows, 1)]

    def metrics(self, gold: Sequence[object], spec: TaskSpec) -> tuple[str, ...]:
        return ENTITY_METRICS

    def marks(self, outputs: Outputs, encoded: Encoded, gold: Sequence[object], spec: TaskSpec) -> FloatArray:
        """Entities that are right, that were found, that are there; each word is judged by its first token."""
        best = np.split(outputs[LOGITS].argmax(axis=1), np.cumsum(encoded.batch.lengths)[:-1])
        marks = []
        for tags, encoding, labels in zip(gold, encoded.encodings, best, strict=True):
            assert isinstance(tags, tuple)
            answer = [OUTSIDE] * len(tags)  # what was cut off, or has no token, stays outside
            for word, label in reversed(list(zip(encoding.word_ids, labels, strict=True))):
                if word is not None:
                    answer[word] = spec.labels[label]
            marks.append(entity_counts(tags, answer))
        return np.array(marks, np.float64)

    def metric(self, marks: FloatArray, spec: TaskSpec) -> Metric:
        return entity_metric(marks)

    def agree(self, outputs: Outputs, reference: Outputs, encoded: Encoded, spec: TaskSpec) -> Agreement:
        """Token by token, special ones left out: nobody sees their labels."""
        real = _real_tokens(encoded)
        ours, theirs = outputs[LOGITS][real].astype(np.float64), reference[LOGITS][real].astype(np.float64)
        owners = np.repeat(encoded.item_of_row, encoded.batch.lengths)[real]
        broken = ~np.isfinite(ours).all(axis=1)
        if broken.any():
            agreement = not_finite("same label", ours, theirs, replace(encoded, item_of_row=owners))
            return replace(agreement, worst=tuple(dict.fromkeys(owners[broken].tolist()))[:3])
        error = np.abs(ours - theirs).max(axis=1)
        flipped = ours.argmax(axis=1) != theirs.argmax(axis=1)
        flips = int(flipped.sum())
        cosines = row_cosines(ours, theirs)
        return Agreement(
            measure="same label",
            value=1.0 - flips / len(flipped),
            rows=len(ours),
            max_error=float(error.max()),
            relative_error=relative_error(ours, theirs),
            scale=float(np.abs(theirs).max()),
            flips=flips,
            cosine_mean=float(cosines.mean()),
            cosine_min=float(cosines.min()),
            rank_correlation=float(np.mean([spearman(ours[:, i], theirs[:, i]) for i in range(ours.shape[1])])),
            # A flip is worse than any error that flips nothing.
            worst=_worst(np.where(flipped, error + 1e6, error), owners, encoded.items),
        )


def _parse_words(entry: object, place: int) -> tuple[str, ...] | None:
    """The words of an item that is cut into words, checked; None for any other."""
    if not isinstance(entry, Mapping) or entry.get("tokens") is None:
        return None
    if entry.get("text") is not None:
        raise InputError(f'item {place} has both "text" and "tokens"', hint="give one of them")
    words = entry["tokens"]
    if not isinstance(words, list | tuple):
        raise InputError(f'"tokens" of item {place} is {type(words).__name__}, not a list of strings')
    if not words:
        raise InputError(f"item {place} has no tokens: the list is empty")
    for number, word in enumerate(words, 1):
        if not isinstance(word, str):
            raise InputError(f"token {number} of item {place} is {type(word).__name__}, not a string")
    return tuple(words)


def _encode(items: Sequence[Text], tokenizer: Tokenizer) -> Tokens:
    """Texts and cut sentences, which the tokenizer takes in separate calls, in the order of the items."""
    is_text = np.array([isinstance(item, str) for item in items])
    texts = tokenizer.encode([item for item in items if isinstance(item, str)], is_traced=True)
    if is_text.all():
        return texts
    cut = tokenizer.encode_words([item for item in items if not isinstance(item, str)])
    if not is_text.any():
        return cut
    source = np.concatenate([np.flatnonzero(is_text), np.flatnonzero(~is_text)])  # item of each row, texts first
    order = np.argsort(source)
    lengths = np.concatenate([texts.batch.lengths, cut.batch.lengths])
    values = {name: np.concatenate([column, cut.batch.values[name]]) for name, column in texts.batch.values.items()}
    encodings = [*texts.encodings, *cut.encodings]
    truncated = [*texts.truncated, *(row + len(texts.encodings) for row in cut.truncated)]
    return Tokens(
        Batch(values, lengths).take(order),
        tuple(sorted(int(source[row]) for row in truncated)),
        [encodings[row] for row in order],
    )


def _word_starts(words: Sequence[str]) -> tuple[int, ...]:
    return tuple(accumulate((len(word) + 1 for word in words[:-1]), initial=0))


def _piece_reader(sentences: Sentences) -> Callable[[int, FloatArray], Iterator[_Piece]]:
    """Row and scores to the tokens of the text, with the pipeline's own idea of which of them go on with a word."""
    tokenizer = sentences.tokenizer
    # Only a tokenizer that marks what continues a word tells by the token; for others the pipeline looks for spaces.
    marks_subwords, unknown = tokenizer.marks_subwords, tokenizer.unknown_id

    def read(row: int, scores: FloatArray) -> Iterator[_Piece]:
        encoding, text, starts = sentences.encodings[row], sentences.texts[row], sentences.word_starts[row]
        columns = zip(encoding.ids, encoding.offsets, encoding.word_ids, encoding.special_tokens_mask, strict=True)
        for index, (token_id, (start, end), word, is_special) in enumerate(columns):
            if is_special:
                continue
            if starts is not None and word is not None:
                start, end = start + starts[word], end + starts[word]
            # Not encoding.tokens: of an unknown or an added token those give the text's own spelling.
            spelled, surface = tokenizer.token(token_id), text[start:end]
            if token_id == unknown:
                spelled, is_subword = surface, False
            elif marks_subwords:
                is_subword = len(spelled) != len(surface)
            else:
                is_subword = start > 0 and " " not in text[start - 1 : start + 1]
            yield _Piece(spelled, scores[index], index, start, end, is_subword)

    return read


def _tokens(pieces: Iterator[_Piece], options: Options) -> list[Token]:
    answer = []
    for piece in pieces:
        best = piece.scores.argmax()
        if (label := options.labels[best]) not in options.ignored:
            answer.append(
                Token(
                    entity=label,
                    score=float(piece.scores[best]),
                    index=piece.index,
                    word=piece.word,
                    start=piece.start,
                    end=piece.end,
                )
            )
    return answer


def _entities(pieces: Iterator[_Piece], options: Options, to_text: Callable[[Sequence[str]], str]) -> list[Entity]:
    """Neighbours of one type together, a B- always the first of its entity."""
    groups: list[list[_Tagged]] = []
    kind = ""
    for tagged in _tagged(pieces, options, to_text):
        begins, type_ = _begins(tagged.label)
        if not groups or begins or type_ != kind:
            groups.append([])
        groups[-1].append(tagged)
        kind = type_
    entities = [
        Entity(
            entity_group=group[0].label.split("-", 1)[-1],
            score=float(np.mean([tagged.score for tagged in group])),
            word=to_text([tagged.word for tagged in group]),
            start=group[0].start,
            end=group[-1].end,
        )
        for group in groups
    ]
    return [entity for entity in entities if entity["entity_group"] not in options.ignored]


def _tagged(pieces: Iterator[_Piece], options: Options, to_text: Callable[[Sequence[str]], str]) -> Iterator[_Tagged]:
    words: list[list[_Piece]] = []
    is_by_word = options.aggregation is not Aggregation.SIMPLE
    for piece in pieces:
        if words and is_by_word and piece.is_subword:
            words[-1].append(piece)
        else:
            words.append([piece])
    for word in words:
        scores = _word_scores(word, options.aggregation)
        best = scores.argmax()
        # The pipeline puts the tokens of a word together, and then the words of an entity once more.
        spelled = to_text([piece.word for piece in word]) if is_by_word else word[0].word
        yield _Tagged(options.labels[best], float(scores[best]), spelled, word[0].start, word[-1].end)


def _word_scores(word: Sequence[_Piece], aggregation: Aggregation) -> FloatArray:
    if aggregation is Aggregation.AVERAGE:
        average: FloatArray = np.mean([piece.scores for piece in word], axis=0)
        return average
    if aggregation is Aggregation.MAX:
        return max(word, key=lambda piece: float(piece.scores.max())).scores
    return word[0].scores


def _begins(label: str) -> tuple[bool, str]:
    """Whether the label starts an entity, and its type: the pipeline knows B- and I- and no other marks."""
    return label.startswith("B-"), label[2:] if label.startswith(("B-", "I-")) else label


def _gold(row: Row, spec: TaskSpec, place: int) -> tuple[str, ...]:
    words, tags = row.get("tokens"), row.get("tags")
    if tags is None:
        raise InputError(f'row {place} has no "tags", though other rows have some')
    if not isinstance(words, list | tuple) or not isinstance(tags, list | tuple):
        raise InputError(f'row {place} must have lists in "tokens" and "tags"')
    if len(words) != len(tags):
        raise InputError(f"row {place} has {len(tags)} tags for {len(words)} tokens")
    return tuple(_label(tag, spec, place) for tag in tags)


def _label(tag: object, spec: TaskSpec, place: int) -> str:
    if isinstance(tag, str) and tag in spec.labels:
        return tag
    if isinstance(tag, int) and not isinstance(tag, bool) and 0 <= tag < len(spec.labels):
        return spec.labels[tag]
    shown = ", ".join(spec.labels[:8]) + (", …" if len(spec.labels) > 8 else "")
    raise InputError(
        f"row {place} has the tag {tag!r:.60}, which the model does not know{did_you_mean(str(tag), spec.labels)}",
        hint=f"its labels: {shown}",
    )


def _real_tokens(encoded: Encoded) -> BoolArray:
    special: IntArray = np.concatenate([encoding.special_tokens_mask for encoding in encoded.encodings])
    real: BoolArray = special == 0
    return real if real.any() else ~real  # where texts are nothing to the tokenizer, there is only this to compare


def _worst(badness: FloatArray, owners: IntArray, items: int) -> tuple[int, ...]:
    """The items with the worst tokens."""
    worst = np.full(items, -1.0)
    np.maximum.at(worst, owners, badness)
    return tuple(int(item) for item in np.argsort(-worst, kind="stable")[:3])


TASK = TokenClassification()
