"""What a bundle keeps of a model that writes, to be proven by again: the original's answers, and texts it has read.

A row of the reference is a prompt with the tokens that followed, or a text alone. How likely the original finds those
texts stands in the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from hasten.bundle import Bundle
from hasten.core.errors import BundleError, InputError
from hasten.core.tensors import Batch, IntArray, Outputs
from hasten.core.tokenizer import Tokenizer
from hasten.measure.writing import Answered, Read, Sample
from hasten.tasks import Row

_PROMPT, _TOKENS, _LOGITS = "input_ids", "tokens", "logits"
_TEXT = "text"
# Of an answer's first tokens: what comes of reading, and of a step. All would be heavier than many models.
_KEPT_LOGITS = 2


@dataclass(frozen=True, slots=True)
class TextColumn:
    """What models that write take of a data file; called as tasks call theirs."""

    name: str
    columns: tuple[str, ...] = (_TEXT,)
    fields: tuple[str, ...] = (_TEXT,)


def texts_of(rows: Sequence[Row]) -> list[str]:
    texts = [text for row in rows if isinstance(text := row.get(_TEXT), str) and text]
    if not texts:
        raise InputError("no row has a text")
    return texts


def to_reference(sample: Sample) -> tuple[list[Row], Outputs]:
    """The rows and arrays that are stored."""
    rows: list[Row] = [{_PROMPT: row.prompt.tolist(), _TOKENS: row.tokens.tolist()} for row in sample.answers]
    rows += [{_PROMPT: [*text.prompt.tolist(), *text.tokens.tolist()]} for text in sample.texts]
    return rows, {_LOGITS: np.concatenate([answer.logits[:_KEPT_LOGITS] for answer in sample.answers])}


def stored_sample(bundle: Bundle) -> Sample:
    """As it was when the bundle was built, but for most of the logits."""
    stored = bundle.reference()
    try:
        rows = msgspec.convert(stored.rows, list[dict[str, list[int]]])
        answers = [row for row in rows if _TOKENS in row]
        logits = stored.outputs[_LOGITS]
        kept = [min(_KEPT_LOGITS, len(row[_TOKENS])) for row in answers]
        if sum(kept) != len(logits):
            # Bundles from before held the logits of the first token alone, and no texts.
            kept = [1] * len(answers)
        if not answers or sum(kept) != len(logits):
            raise ValueError(f"{len(logits)} rows of logits for {len(answers)} answers")
        answered = [
            Answered(np.array(row[_PROMPT], np.int32), np.array(row[_TOKENS], np.int32), own)
            for row, own in zip(answers, np.split(logits, np.cumsum(kept)[:-1]), strict=True)
        ]
        texts = [Read.of(np.array(row[_PROMPT], np.int32)) for row in rows if _TOKENS not in row]
    except (msgspec.ValidationError, KeyError, ValueError) as error:
        raise BundleError(
            f"the reference of {bundle.path} is damaged: {error}", hint="build the bundle again"
        ) from error
    verdicts = [candidate.verdict for candidate in bundle.report.candidates if candidate.verdict is not None]
    metric = next((verdict.reference_metric for verdict in verdicts if texts and verdict.reference_metric), None)
    return Sample(tuple(answered), tuple(texts), metric)


def prompts_of(sample: Sample, tokenizer: Tokenizer) -> list[Row]:
    """What was answered, for people to read."""
    return [{_TEXT: tokenizer.decode(answer.prompt.tolist(), skips_special=True)} for answer in sample.answers]


def as_batch(rows: Sequence[IntArray]) -> Batch:
    return Batch({_PROMPT: np.concatenate(rows)}, np.array([len(row) for row in rows], np.int32))


def encoded(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[list[IntArray], int]:
    """Those of more than one token, and how many had to be cut to the model's limit."""
    tokens = tokenizer.encode(texts)
    rows = np.split(tokens.batch.values[_PROMPT], np.cumsum(tokens.batch.lengths)[:-1])
    kept = [row for row in rows if len(row) > 1]
    if not kept:
        raise InputError("no text has more than one token")
    return kept, len(tokens.truncated)
