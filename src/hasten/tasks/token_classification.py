"""Label the tokens of a text and group them into entities, like transformers' pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, starmap
from typing import TypeAlias, TypedDict

import numpy as np

from hasten.core.errors import InputError
from hasten.core.report import Agreement, Metric
from hasten.core.tensors import BATCH, SEQUENCE, BoolArray, FloatArray, IntArray, Outputs
from hasten.core.text.input_checks import list_items, parse_single_texts
from hasten.core.text.tokenizer import Tokenizer, Tokens
from hasten.metrics.agreement import compare, find_non_finite
from hasten.metrics.entities import OUTSIDE
from hasten.metrics.labels import ENTITY_METRICS, entity_counts, entity_metric
from hasten.metrics.statistics import mean_spearman, row_cosines, softmax
from hasten.tasks import Encoded, Row, Task, TaskSpec, narrow_rows, read_options
from hasten.tasks._labels import find_label, read_labels, require_label

LOGITS = "logits"

# A text, or a sentence that is already split into words.
Text: TypeAlias = str | tuple[str, ...]


class Aggregation(StrEnum):
    """The pipeline's strategies for grouping tokens into entities."""

    NONE = "none"
    SIMPLE = "simple"
    FIRST = "first"
    AVERAGE = "average"
    MAX = "max"


class Token(TypedDict):
    """A labelled token, the answer without aggregation."""

    entity: str
    score: float
    index: int
    word: str
    start: int
    end: int


class Entity(TypedDict):
    """A group of tokens of one type, the answer with aggregation."""

    entity_group: str
    score: float
    word: str
    start: int
    end: int


Answer: TypeAlias = list[Token] | list[Entity]


@dataclass(frozen=True, slots=True)
class _RawOptions:
    aggregation_strategy: Aggregation | None = None
    ignore_labels: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a request, with the model's defaults."""

    labels: tuple[str, ...]
    aggregation: Aggregation
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A token of a text; `word` is its spelling in the vocabulary."""

    word: str
    scores: FloatArray
    index: int
    start: int
    end: int
    is_subword: bool


@dataclass(frozen=True, slots=True)
class Sentences(Encoded):
    """One row per item, with the texts and the tokenizer that turn tokens into words."""

    # The texts that offsets refer to; words are joined with spaces.
    texts: tuple[str, ...]
    # The start of each word in its text, for items that are split into words: their offsets start at the word.
    word_starts: tuple[tuple[int, ...] | None, ...]
    tokenizer: Tokenizer

    def pieces(self, row: int, scores: FloatArray) -> Iterator[_Piece]:
        """Yield the tokens of a row, with the pipeline's rule for which of them continue a word."""
        encoding, text, starts = self.encodings[row], self.texts[row], self.word_starts[row]
        columns = zip(encoding.ids, encoding.offsets, encoding.word_ids, encoding.special_tokens_mask, strict=True)
        for index, (token_id, (start, end), word, is_special) in enumerate(columns):
            if is_special:
                continue
            if starts is not None and word is not None:
                start, end = start + starts[word], end + starts[word]
            # Not encoding.tokens: for an unknown or an added token those have the spelling of the text.
            spelled, surface = self.tokenizer.token(token_id), text[start:end]
            if token_id == self.tokenizer.unknown_id:
                spelled, is_subword = surface, False
            elif self.tokenizer.marks_subwords:
                is_subword = len(spelled) != len(surface)
            else:  # the pipeline looks for spaces
                is_subword = start > 0 and " " not in text[start - 1 : start + 1]
            yield _Piece(spelled, scores[index], index, start, end, is_subword)


@dataclass(frozen=True, slots=True)
class _Tagged:
    """A token or a word with its best label."""

    label: str
    score: float
    word: str
    start: int
    end: int


class TokenClassification(Task[Text, Answer, Options]):
    """A label per token, or entities."""

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
        """Return texts, as in every task, or the words of {"tokens": […]}."""
        entries = list_items(payload)
        words = [_parse_words(entry, position) for position, entry in enumerate(entries, 1)]
        # Joined words pass the same checks, so that positions and messages are the same.
        joined = [entry if split is None else " ".join(split) for entry, split in zip(entries, words, strict=True)]
        texts = parse_single_texts(joined, self.name)
        return [text if split is None else split for text, split in zip(texts, words, strict=True)]

    def options(self, spec: TaskSpec, values: Mapping[str, object]) -> Options:
        raw = read_options(_RawOptions, values, any_case="aggregation_strategy")
        ignored = (OUTSIDE,) if raw.ignore_labels is None else raw.ignore_labels
        return Options(spec.labels, raw.aggregation_strategy or Aggregation.NONE, ignored)

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
        sentences = narrow_rows(encoded, Sentences)
        scores = sentences.batch.split(softmax(outputs[LOGITS].astype(np.float32)))
        pieces = starmap(sentences.pieces, enumerate(scores))
        if options.aggregation is Aggregation.NONE:
            return [_tokens(row, options) for row in pieces]
        return [_entities(row, options, sentences.tokenizer.to_text) for row in pieces]

    def gold(self, rows: Sequence[Row], spec: TaskSpec) -> list[object] | None:
        return read_labels(rows, "tags", lambda row, position: _gold(row, spec, position))

    def metrics(self, gold: Sequence[object], spec: TaskSpec) -> tuple[str, ...]:
        return ENTITY_METRICS

    def item_scores(self, outputs: Outputs, encoded: Encoded, gold: Sequence[object], spec: TaskSpec) -> FloatArray:
        """Return the numbers of correct, predicted and expected entities; a word has the label of its first token."""
        best = encoded.batch.split(outputs[LOGITS].argmax(axis=1))
        item_scores = []
        for tags, encoding, labels in zip(gold, encoded.encodings, best, strict=True):
            assert isinstance(tags, tuple)
            answer = [OUTSIDE] * len(tags)  # words that were truncated or have no token stay outside
            for word, label in reversed(list(zip(encoding.word_ids, labels, strict=True))):
                if word is not None:
                    answer[word] = spec.labels[label]
            item_scores.append(entity_counts(tags, answer))
        return np.array(item_scores, np.float64)

    def metric(self, item_scores: FloatArray, spec: TaskSpec) -> Metric:
        return entity_metric(item_scores)

    def agree(self, outputs: Outputs, reference: Outputs, encoded: Encoded, spec: TaskSpec) -> Agreement:
        """Compare token by token, without special tokens, whose labels are never returned."""
        real = _real_tokens(encoded)
        ours, theirs = outputs[LOGITS][real].astype(np.float64), reference[LOGITS][real].astype(np.float64)
        owners = np.repeat(encoded.item_of_row, encoded.batch.lengths)[real]
        if (non_finite := find_non_finite("same label", ours, theirs, owners)) is not None:
            return non_finite
        flipped = ours.argmax(axis=1) != theirs.argmax(axis=1)
        return compare(
            "same label",
            ours,
            theirs,
            owners,
            value=1.0 - float(flipped.mean()),
            flipped=flipped,
            flips=int(flipped.sum()),
            cosines=row_cosines(ours, theirs),
            rank_correlation=mean_spearman(ours, theirs),
        )


def _parse_words(entry: object, position: int) -> tuple[str, ...] | None:
    """Return the checked words of an item that is split into words; None for any other."""
    if not isinstance(entry, Mapping) or entry.get("tokens") is None:
        return None
    if entry.get("text") is not None:
        raise InputError(f'item {position} has both "text" and "tokens"', hint="pass only one of them")
    words = entry["tokens"]
    if not isinstance(words, list | tuple):
        raise InputError(f'"tokens" of item {position} is {type(words).__name__}, not a list of strings')
    if not words:
        raise InputError(f"item {position} has no tokens: the list is empty")
    for number, word in enumerate(words, 1):
        if not isinstance(word, str):
            raise InputError(f"token {number} of item {position} is {type(word).__name__}, not a string")
    return tuple(words)


def _encode(items: Sequence[Text], tokenizer: Tokenizer) -> Tokens:
    """Encode texts and split sentences, which the tokenizer takes in separate calls, in the order of the items."""
    texts = tokenizer.encode([item for item in items if isinstance(item, str)], is_traced=True)
    if len(texts.encodings) == len(items):
        return texts
    split = tokenizer.encode_words([item for item in items if not isinstance(item, str)])
    of_texts, of_split = iter(texts.encodings), iter(split.encodings)
    return tokenizer.tokens([next(of_texts if isinstance(item, str) else of_split) for item in items])


def _word_starts(words: Sequence[str]) -> tuple[int, ...]:
    return tuple(accumulate((len(word) + 1 for word in words[:-1]), initial=0))


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
    """Group neighbours of one type; a B- always starts an entity."""
    groups: list[list[_Tagged]] = []
    entity_type = ""
    for tagged in _tagged(pieces, options, to_text):
        begins, type_ = _split_label(tagged.label)
        if not groups or begins or type_ != entity_type:
            groups.append([])
        groups[-1].append(tagged)
        entity_type = type_
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
        # The pipeline joins the tokens of a word, and later the words of an entity.
        spelled = to_text([piece.word for piece in word]) if is_by_word else word[0].word
        yield _Tagged(options.labels[best], float(scores[best]), spelled, word[0].start, word[-1].end)


def _word_scores(word: Sequence[_Piece], aggregation: Aggregation) -> FloatArray:
    if aggregation is Aggregation.AVERAGE:
        average: FloatArray = np.mean([piece.scores for piece in word], axis=0)
        return average
    if aggregation is Aggregation.MAX:
        return max(word, key=lambda piece: float(piece.scores.max())).scores
    return word[0].scores


def _split_label(label: str) -> tuple[bool, str]:
    """Return whether the label starts an entity, and its type; the pipeline knows only the prefixes B- and I-."""
    return label.startswith("B-"), label[2:] if label.startswith(("B-", "I-")) else label


def _gold(row: Row, spec: TaskSpec, position: int) -> tuple[str, ...]:
    words, tags = row.get("tokens"), require_label(row, "tags", position, others="some")
    if not isinstance(words, list | tuple) or not isinstance(tags, list | tuple):
        raise InputError(f'row {position} must have lists in "tokens" and "tags"')
    if len(words) != len(tags):
        raise InputError(f"row {position} has {len(tags)} tags for {len(words)} tokens")
    return tuple(spec.labels[find_label(tag, spec.labels, position, kind="tag")] for tag in tags)


def _real_tokens(encoded: Encoded) -> BoolArray:
    special: IntArray = np.concatenate([encoding.special_tokens_mask for encoding in encoded.encodings])
    real: BoolArray = special == 0
    return real if real.any() else ~real  # texts without tokens leave only special tokens to compare


TASK = TokenClassification()
