"""Fill the masks of a text with tokens, like transformers' pipeline of the same name."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypedDict

import numpy as np

from hasten.core.errors import InputError
from hasten.core.report import Agreement, Metric
from hasten.core.tensors import MASKS, FloatArray, IntArray, Outputs
from hasten.core.text.input_checks import check_min, check_text, parse_single_texts
from hasten.core.text.tokenizer import Tokenizer
from hasten.metrics.agreement import compare, find_non_finite
from hasten.metrics.statistics import row_cosines, softmax, top_indices, top_k_overlap
from hasten.tasks import Encoded, Row, Task, TaskSpec, narrow_rows, read_options
from hasten.tasks._labels import read_labels

LOGITS = "logits"
_TOP_K = 5
_METRICS = ("accuracy", f"top-{_TOP_K} accuracy")
_SAMPLE_ROWS = 150
# No tokenizer makes more tokens than bytes, so a mask within this many bytes is never truncated.
_SAMPLE_BYTES = 40

logger = logging.getLogger("hasten")


class Filled(TypedDict):
    """A token for a mask, its score, and the text with it."""

    score: float
    token: int
    token_str: str
    sequence: str


# The best tokens for a single mask, or for each of several.
Answer: TypeAlias = list[Filled] | list[list[Filled]]


@dataclass(frozen=True, slots=True)
class _RawOptions:
    top_k: int | None = None
    targets: str | tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a request, with the model's defaults."""

    mask_token: str
    top_k: int
    targets: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class MaskedText(Encoded):
    """One row per item, with the positions of its masks and the tokens that may fill them."""

    mask_positions: tuple[IntArray, ...]
    targets: IntArray | None
    tokenizer: Tokenizer

    @property
    def owners(self) -> IntArray:
        """Return the item of each mask."""
        return np.repeat(self.item_of_row, [len(positions) for positions in self.mask_positions])


class FillMask(Task[str, Answer, Options]):
    """The most likely tokens for each mask of a text."""

    name = "fill-mask"
    auto_class = "AutoModelForMaskedLM"
    heads = ("ForMaskedLM",)
    fields = ("text",)
    columns = ("text", "label")
    takes_pairs = False
    is_detected = True
    outputs = (LOGITS,)
    axes = (MASKS,)
    # Lower than for tasks with a few labels: the two best tokens of a vocabulary are often equally good.
    min_agreement = 0.98

    def parse(self, payload: object) -> list[str]:
        return parse_single_texts(payload, self.name)

    def options(self, spec: TaskSpec, values: Mapping[str, object]) -> Options:
        raw = read_options(_RawOptions, values)
        top_k = _TOP_K if raw.top_k is None else raw.top_k
        check_min("top_k", top_k)
        targets = (raw.targets,) if isinstance(raw.targets, str) else raw.targets
        for position, target in enumerate(targets or (), 1):
            check_text(target, f"target {position}", may_be_empty=True)
        return Options(spec.mask_token, top_k, targets)

    def encode(self, items: Sequence[str], tokenizer: Tokenizer, options: Options) -> MaskedText:
        tokens = tokenizer.encode(items, is_traced=True)
        mask_id = tokenizer.id_of(options.mask_token)
        for position, encoding in enumerate(tokens.encodings, 1):
            # Reject the text even if other masks remain: every mask needs an answer.
            if any(mask_id in rest.ids for rest in encoding.overflowing):
                raise InputError(
                    f"text {position} has a mask beyond the model's limit of {tokenizer.spec.max_length} tokens",
                    hint="shorten the text around it",
                )
            if mask_id not in encoding.ids:
                raise InputError(
                    f"text {position} has no mask", hint=f"write {options.mask_token} where a token is missing"
                )
        return MaskedText(
            batch=tokens.batch,
            item_of_row=np.arange(len(items)),
            items=len(items),
            truncated=tokens.truncated,
            encodings=tokens.encodings,
            mask_positions=tuple(np.flatnonzero(np.asarray(encoding.ids) == mask_id) for encoding in tokens.encodings),
            targets=None if options.targets is None else _target_ids(options.targets, tokenizer),
            tokenizer=tokenizer,
        )

    def decode(self, outputs: Outputs, encoded: Encoded, options: Options) -> list[Answer]:
        masked = narrow_rows(encoded, MaskedText)
        rows = iter(outputs[LOGITS])
        answers: list[Answer] = []
        for encoding, positions in zip(masked.encodings, masked.mask_positions, strict=True):
            ids = np.asarray(encoding.ids)
            is_only = len(positions) == 1
            filled = [_fill(next(rows), ids, position, is_only, masked, options) for position in positions]
            answers.append(filled[0] if is_only else filled)
        return answers

    def sample(self, texts: Sequence[str], spec: TaskSpec) -> list[Row]:
        """Return texts in which a mask replaces one of the first words."""
        rows: list[Row] = []
        for text in texts:
            words = [word for word in re.finditer(r"\w+", text) if len(text[: word.start()].encode()) < _SAMPLE_BYTES]
            # A text of nothing but a mask would be the same every time.
            if len(words) > 1 and len(rows) < _SAMPLE_ROWS:
                word = words[len(rows) % len(words)]
                rows.append({"text": text[: word.start()] + spec.mask_token + text[word.end() :]})
        return rows

    def gold(self, rows: Sequence[Row], spec: TaskSpec) -> list[object] | None:
        return read_labels(rows, "label", lambda row, position: _gold(row, spec, position))

    def metrics(self, gold: Sequence[object], spec: TaskSpec) -> tuple[str, ...]:
        return _METRICS

    def item_scores(self, outputs: Outputs, encoded: Encoded, gold: Sequence[object], spec: TaskSpec) -> FloatArray:
        """Return, per item, the masks whose best token is correct, those with it among the five best, and all masks.

        A token is correct if it is the whole label, so a label of more than one token is never matched.
        """
        masked = narrow_rows(encoded, MaskedText)
        labels = [label for row in gold if isinstance(row, tuple) for label in row]
        ranks = np.array(
            [
                _rank(logits, _spellings(label, masked.tokenizer))
                for logits, label in zip(outputs[LOGITS], labels, strict=True)
            ]
        )
        hits = (ranks < 1, ranks < _TOP_K, ranks >= 0)
        return np.stack([np.bincount(masked.owners, is_hit, masked.items) for is_hit in hits], axis=1)

    def metric(self, item_scores: FloatArray, spec: TaskSpec) -> Metric:
        best, top_k, masks = item_scores.sum(axis=0)
        return Metric(_METRICS[0], float(best / masks), len(item_scores), {_METRICS[1]: float(top_k / masks)})

    def agree(self, outputs: Outputs, reference: Outputs, encoded: Encoded, spec: TaskSpec) -> Agreement:
        ours, theirs, owners = outputs[LOGITS], reference[LOGITS], narrow_rows(encoded, MaskedText).owners
        if (non_finite := find_non_finite("same token", ours, theirs, owners)) is not None:
            return non_finite
        flipped = ours.argmax(axis=1) != theirs.argmax(axis=1)
        # One mask at a time: 150 masks times a vocabulary of 250,000 in fp64 would take gigabytes.
        cosines = [row_cosines(our[None], their[None]) for our, their in zip(ours, theirs, strict=True)]
        return compare(
            "same token",
            ours,
            theirs,
            owners,
            value=1.0 - float(flipped.mean()),
            flipped=flipped,
            flips=int(flipped.sum()),
            cosines=np.concatenate(cosines),
            top_k_overlap=top_k_overlap(ours, theirs, _TOP_K),
        )


def _target_ids(targets: Sequence[str], tokenizer: Tokenizer) -> IntArray:
    """Return distinct token ids; a target that is not a token is replaced by its first piece, as in the pipeline."""
    token_ids: dict[int, None] = {}
    for target in targets:
        token = tokenizer.id_of(target)
        if token is None:
            pieces = tokenizer.encode_whole([target])[0].ids
            if not pieces:
                logger.warning("target %r is skipped: the tokenizer returns no tokens for it", target)
                continue
            token = pieces[0]
            logger.warning(
                "target %r is not a token of the model: using its first piece %r", target, tokenizer.token(token)
            )
        token_ids[token] = None
    if not token_ids:
        raise InputError(
            "the tokenizer returns no tokens for any of the targets" if targets else "the list of targets is empty"
        )
    return np.array(list(token_ids))


def _fill(
    logits: FloatArray, ids: IntArray, position: int, is_only: bool, masked: MaskedText, options: Options
) -> list[Filled]:
    """Return the best tokens for one mask, each with the text that it makes; other masks stay in the text."""
    tokenizer = masked.tokenizer
    scores = softmax(logits)
    choices = np.arange(len(scores)) if masked.targets is None else masked.targets
    answer = []
    for token in choices[top_indices(scores[choices], options.top_k)].tolist():
        ids = ids.copy()
        ids[position] = token
        # Padding in the text or predicted is removed even if special tokens are not.
        sequence = tokenizer.decode(ids[ids != tokenizer.spec.pad_id].tolist(), skips_special=is_only)
        answer.append(
            Filled(score=float(scores[token]), token=token, token_str=tokenizer.decode([token]), sequence=sequence)
        )
    return answer


def _gold(row: Row, spec: TaskSpec, position: int) -> tuple[str, ...]:
    label = row.get("label")
    labels = label if isinstance(label, list | tuple) else [label]
    if not all(isinstance(text, str) and text.strip() for text in labels):
        raise InputError(f'row {position} needs the missing token in "label", or a list of them: {label!r}')
    masks = str(row.get("text")).count(spec.mask_token)
    if len(labels) != masks:
        raise InputError(f"row {position} has {len(labels)} labels for {masks} masks")
    return tuple(check_text(text, f"the label of row {position}") for text in labels)


def _spellings(label: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that are this word, by itself and after a space, which many tokenizers include in the token."""
    whole = [encoding.ids for encoding in tokenizer.encode_whole([label, f" {label.strip()}"])]
    token_ids = {ids[0] for ids in whole if len(ids) == 1} | {tokenizer.id_of(label)}
    return [token for token in token_ids if token is not None and token != tokenizer.unknown_id]


def _rank(logits: FloatArray, tokens: Sequence[int]) -> float:
    """Return the number of tokens with a higher logit than the best of these."""
    return float((logits > logits[list(tokens)].max()).sum()) if tokens else float("inf")


TASK = FillMask()
