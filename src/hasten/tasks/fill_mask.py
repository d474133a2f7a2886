"""Which tokens fit where a text has a mask: answers like transformers' pipeline of the same name."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypedDict

import numpy as np

from hasten.core.errors import InputError
from hasten.core.report import Agreement, Metric
from hasten.core.statistics import relative_error, row_cosines
from hasten.core.tensors import MASKS, FloatArray, IntArray, Outputs
from hasten.core.tokenizer import Tokenizer
from hasten.tasks import Encoded, Row, TaskSpec, checked_text, not_finite, parse_texts, read_options

LOGITS = "logits"
_TOP = 5
_METRICS = ("accuracy", f"top-{_TOP} accuracy")
_SAMPLE_ROWS = 150
# No tokenizer makes more tokens than there are bytes, so a mask before this many survives any model's limit.
_SAMPLE_BYTES = 40

logger = logging.getLogger("hasten")


class Filled(TypedDict):
    score: float
    token: int
    token_str: str
    sequence: str


# The best tokens for the one mask, or for each of several.
Answer: TypeAlias = list[Filled] | list[list[Filled]]


@dataclass(frozen=True, slots=True)
class _Given:
    top_k: int | None = None
    targets: str | tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Options:
    mask_token: str
    top_k: int
    targets: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Masked(Encoded):
    """One row an item, with the places of its masks and the tokens that may stand there."""

    places: tuple[IntArray, ...]
    targets: IntArray | None
    tokenizer: Tokenizer

    @property
    def owners(self) -> IntArray:
        """The item of each mask."""
        return np.repeat(self.item_of_row, [len(places) for places in self.places])


class FillMask:
    name = "fill-mask"
    auto_class = "AutoModelForMaskedLM"
    heads = ("ForMaskedLM",)
    fields = ("text",)
    columns = ("text", "label")
    takes_pairs = False
    is_detected = True
    outputs = (LOGITS,)
    axes = (MASKS,)
    # Lower than where a few labels stand apart: of a whole vocabulary, the two best tokens often are as good.
    min_agreement = 0.98

    def parse(self, payload: object) -> list[str]:
        texts = []
        for place, text in enumerate(parse_texts(payload), 1):
            if not isinstance(text, str):
                raise InputError(f'item {place} has a "text_pair", and {self.name} takes one text at a time')
            texts.append(text)
        return texts

    def options(self, spec: TaskSpec, given: Mapping[str, object]) -> Options:
        asked = read_options(_Given, given)
        top_k = _TOP if asked.top_k is None else asked.top_k
        if top_k < 1:
            raise InputError(f"top_k is {top_k}; it must be at least 1")
        targets = (asked.targets,) if isinstance(asked.targets, str) else asked.targets
        for place, target in enumerate(targets or (), 1):
            checked_text(target, f"target {place}", may_be_empty=True)
        return Options(spec.mask_token, top_k, targets)

    def encode(self, items: Sequence[str], tokenizer: Tokenizer, options: Options) -> Masked:
        tokens = tokenizer.encode(items, is_traced=True)
        mask_id = tokenizer.id_of(options.mask_token)
        for place, encoding in enumerate(tokens.encodings, 1):
            # Also where other masks are left: an answer for each is what was asked for.
            if any(mask_id in rest.ids for rest in encoding.overflowing):
                raise InputError(
                    f"text {place} has a mask beyond the model's limit of {tokenizer.spec.max_length} tokens",
                    hint="shorten the text around it",
                )
            if mask_id not in encoding.ids:
                raise InputError(
                    f"text {place} has no mask", hint=f"write {options.mask_token} where a token is missing"
                )
        return Masked(
            batch=tokens.batch,
            item_of_row=np.arange(len(items)),
            items=len(items),
            truncated=tokens.truncated,
            encodings=tokens.encodings,
            places=tuple(np.flatnonzero(np.asarray(encoding.ids) == mask_id) for encoding in tokens.encodings),
            targets=None if options.targets is None else _target_ids(options.targets, tokenizer),
            tokenizer=tokenizer,
        )

    def decode(self, outputs: Outputs, encoded: Encoded, options: Options) -> list[Answer]:
        masked = _as_masked(encoded)
        rows = iter(outputs[LOGITS])
        answers: list[Answer] = []
        for encoding, places in zip(masked.encodings, masked.places, strict=True):
            ids = np.asarray(encoding.ids)
            filled = [_filled(next(rows), ids, place, len(places) == 1, masked, options) for place in places]
            answers.append(filled[0] if len(places) == 1 else filled)
        return answers

    def present(self, payload: object, answers: list[Answer], options: Options) -> object:
        """A list for a list, also of one: there the pipeline gives the one answer without its list."""
        return answers if isinstance(payload, list | tuple) else answers[0]

    def sample(self, texts: Sequence[str], spec: TaskSpec) -> list[Row]:
        """A mask in the place of one of each text's first words."""
        rows: list[Row] = []
        for text in texts:
            words = [word for word in re.finditer(r"\w+", text) if len(text[: word.start()].encode()) < _SAMPLE_BYTES]
            # Alone, a mask says the same in every text.
            if len(words) > 1 and len(rows) < _SAMPLE_ROWS:
                word = words[len(rows) % len(words)]
                rows.append({"text": text[: word.start()] + spec.mask_token + text[word.end() :]})
        return rows

    def gold(self, rows: Sequence[Row], spec: TaskSpec) -> list[object] | None:
        if not any("label" in row for row in rows):
            return None
        return [_gold(row, spec, place) for place, row in enumerate(rows, 1)]

    def metrics(self, gold: Sequence[object], spec: TaskSpec) -> tuple[str, ...]:
        return _METRICS

    def marks(self, outputs: Outputs, encoded: Encoded, gold: Sequence[object], spec: TaskSpec) -> FloatArray:
        """Of an item's masks: how many are filled rightly, how many among the five best, how many there are.

        Rightly is with the token that is the whole label; a label of more than one token never is filled in so.
        """
        masked = _as_masked(encoded)
        labels = [label for row in gold if isinstance(row, tuple) for label in row]
        ranks = np.array(
            [
                _rank(logits, _spellings(label, masked.tokenizer))
                for logits, label in zip(outputs[LOGITS], labels, strict=True)
            ]
        )
        hits = (ranks < 1, ranks < _TOP, ranks >= 0)
        return np.stack([np.bincount(masked.owners, own, masked.items) for own in hits], axis=1)

    def metric(self, marks: FloatArray, spec: TaskSpec) -> Metric:
        first, among, masks = marks.sum(axis=0)
        return Metric(_METRICS[0], float(first / masks), len(marks), {_METRICS[1]: float(among / masks)})

    def agree(self, outputs: Outputs, reference: Outputs, encoded: Encoded, spec: TaskSpec) -> Agreement:
        ours, theirs, owners = outputs[LOGITS], reference[LOGITS], _as_masked(encoded).owners
        broken = ~np.isfinite(ours).all(axis=1)
        if broken.any():
            agreement = not_finite("same token", ours, theirs, replace(encoded, item_of_row=owners))
            return replace(agreement, worst=tuple(dict.fromkeys(owners[broken].tolist()))[:3])
        error = np.array([np.abs(our - their).max() for our, their in zip(ours, theirs, strict=True)], np.float64)
        flipped = ours.argmax(axis=1) != theirs.argmax(axis=1)
        flips = int(flipped.sum())
        # One mask at a time: 150 times a vocabulary of 250,000, in 64 bits, would be gigabytes.
        cosines = [float(row_cosines(our[None], their[None])[0]) for our, their in zip(ours, theirs, strict=True)]
        shared = [len({*_best(our, _TOP)} & {*_best(their, _TOP)}) for our, their in zip(ours, theirs, strict=True)]
        # A flip is worse than any error that flips nothing.
        worst = owners[np.argsort(-(error + flipped * 1e6), kind="stable")]
        return Agreement(
            measure="same token",
            value=1.0 - flips / len(flipped),
            rows=len(ours),
            max_error=float(error.max()),
            relative_error=relative_error(ours, theirs),
            scale=float(np.abs(theirs).max()),
            flips=flips,
            cosine_mean=float(np.mean(cosines)),
            cosine_min=min(cosines),
            top_k_overlap=float(np.mean(shared)) / _TOP,
            worst=tuple(dict.fromkeys(worst.tolist()))[:3],
        )


def _as_masked(encoded: Encoded) -> Masked:
    if not isinstance(encoded, Masked):
        raise TypeError("what is decoded must come from this task's own encode: it knows where the masks are")
    return encoded


def _target_ids(targets: Sequence[str], tokenizer: Tokenizer) -> IntArray:
    """Each once; one that is no token gives way to its first piece, as in the pipeline."""
    found: dict[int, None] = {}
    for target in targets:
        token = tokenizer.id_of(target)
        if token is None:
            pieces = tokenizer.encode_whole([target])[0].ids
            if not pieces:
                logger.warning("target %r is nothing to the tokenizer, and is left out", target)
                continue
            token = pieces[0]
            logger.warning("target %r is no token of the model: %r stands for it", target, tokenizer.token(token))
        found[token] = None
    if not found:
        raise InputError("none of the targets is anything to the tokenizer" if targets else "no targets given")
    return np.array(list(found))


def _filled(
    logits: FloatArray, ids: IntArray, place: int, is_only: bool, masked: Masked, options: Options
) -> list[Filled]:
    """The best tokens for one mask, each with the text it makes; other masks are left standing in it."""
    tokenizer = masked.tokenizer
    powers = np.exp(logits - logits.max())
    scores = powers / powers.sum()
    among = np.arange(len(scores)) if masked.targets is None else masked.targets
    answer = []
    for token in among[_best(scores[among], options.top_k)].tolist():
        ids = ids.copy()
        ids[place] = token
        # Padding that was written or predicted is left out even where special tokens are not.
        sequence = tokenizer.decode(ids[ids != tokenizer.spec.pad_id].tolist(), skips_special=is_only)
        answer.append(
            Filled(score=float(scores[token]), token=token, token_str=tokenizer.decode([token]), sequence=sequence)
        )
    return answer


def _best(scores: FloatArray, count: int) -> IntArray:
    """The places of the highest, best first; of equals the first."""
    count = min(count, len(scores))
    least = np.partition(scores, -count)[-count]
    # Which of equals `argpartition` would take differs from processor to processor.
    best = np.union1d(np.flatnonzero(scores > least), np.flatnonzero(scores == least)[:count])
    return best[np.argsort(-scores[best], kind="stable")][:count]


def _gold(row: Row, spec: TaskSpec, place: int) -> tuple[str, ...]:
    label = row.get("label")
    labels = label if isinstance(label, list | tuple) else [label]
    if not all(isinstance(one, str) and one.strip() for one in labels):
        raise InputError(f'row {place} needs the missing token in "label", or a list of them: {label!r}')
    masks = str(row.get("text")).count(spec.mask_token)
    if len(labels) != masks:
        raise InputError(f"row {place} has {len(labels)} labels for {masks} masks")
    return tuple(checked_text(one, f"the label of row {place}") for one in labels)


def _spellings(label: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens that are this word: as it stands, and within a text, where many tokenizers put a space into it."""
    whole = [encoding.ids for encoding in tokenizer.encode_whole([label, f" {label.strip()}"])]
    found = {ids[0] for ids in whole if len(ids) == 1} | {tokenizer.id_of(label)}
    return [token for token in found if token is not None and token != tokenizer.unknown_id]


def _rank(logits: FloatArray, tokens: Sequence[int]) -> float:
    """How many tokens are thought better than the best of these."""
    return float((logits > logits[list(tokens)].max()).sum()) if tokens else float("inf")


TASK = FillMask()
