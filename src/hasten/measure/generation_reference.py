"""Store the reference of a generative model in a bundle: the answers of the original model, and texts to score.

A row of the reference is a prompt with the tokens that followed, or a text alone. The likelihood of the texts under the
original model is in the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from hasten.bundle import Bundle
from hasten.core.errors import BundleError, InputError
from hasten.core.tensors import Batch, IntArray, Outputs
from hasten.core.text.tokenizer import Tokenizer
from hasten.measure.generation_gate import GenerationReference, GreedyReference, ScoredText
from hasten.tasks import Row

_PROMPT, _TOKENS, _LOGITS = "input_ids", "tokens", "logits"
_TEXT = "text"
# Logits are stored for the first tokens of an answer: one from prefill, one from a decode step. Those of all tokens
# would be larger than many models.
_STORED_LOGITS = 2


@dataclass(frozen=True, slots=True)
class TextColumn:
    """The columns that text generation reads from a data file."""

    name: str
    columns: tuple[str, ...] = (_TEXT,)
    fields: tuple[str, ...] = (_TEXT,)


def texts_of(rows: Sequence[Row]) -> list[str]:
    """Return the texts of rows that have one."""
    texts = [text for row in rows if isinstance(text := row.get(_TEXT), str) and text]
    if not texts:
        raise InputError("no row has a text")
    return texts


def to_reference(reference: GenerationReference) -> tuple[list[Row], Outputs]:
    """Return the rows and arrays that a bundle stores."""
    rows: list[Row] = [{_PROMPT: row.prompt.tolist(), _TOKENS: row.tokens.tolist()} for row in reference.answers]
    rows += [{_PROMPT: [*text.prompt.tolist(), *text.tokens.tolist()]} for text in reference.texts]
    return rows, {_LOGITS: np.concatenate([answer.logits[:_STORED_LOGITS] for answer in reference.answers])}


def stored_reference(bundle: Bundle) -> GenerationReference:
    """Return the reference of the build, without most of its logits."""
    stored = bundle.reference()
    try:
        rows = msgspec.convert(stored.rows, list[dict[str, list[int]]])
        answers = [row for row in rows if _TOKENS in row]
        logits = stored.outputs[_LOGITS]
        counts = [min(_STORED_LOGITS, len(row[_TOKENS])) for row in answers]
        if sum(counts) != len(logits):
            # Older bundles hold the logits of the first token only, and no texts.
            counts = [1] * len(answers)
        if not answers or sum(counts) != len(logits):
            raise ValueError(f"{len(logits)} rows of logits for {len(answers)} answers")
        greedy = [
            GreedyReference(np.array(row[_PROMPT], np.int32), np.array(row[_TOKENS], np.int32), first_logits)
            for row, first_logits in zip(answers, np.split(logits, np.cumsum(counts)[:-1]), strict=True)
        ]
        texts = [ScoredText.of(np.array(row[_PROMPT], np.int32)) for row in rows if _TOKENS not in row]
    except (msgspec.ValidationError, KeyError, ValueError) as error:
        message = f"the reference of {bundle.path} is damaged: {error}"
        raise BundleError(message, hint="build the bundle again") from error
    verdicts = [candidate.verdict for candidate in bundle.report.candidates if candidate.verdict is not None]
    metric = next((verdict.reference_metric for verdict in verdicts if texts and verdict.reference_metric), None)
    return GenerationReference(tuple(greedy), tuple(texts), metric)


def prompts_of(reference: GenerationReference, tokenizer: Tokenizer) -> list[Row]:
    """Return the prompts of a reference as rows of text."""
    return [{_TEXT: tokenizer.decode(answer.prompt.tolist(), skips_special=True)} for answer in reference.answers]


def as_batch(rows: Sequence[IntArray]) -> Batch:
    """Return rows of token ids as a batch."""
    return Batch({_PROMPT: np.concatenate(rows)}, np.array([len(row) for row in rows], np.int32))


def encode_texts(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[list[IntArray], int]:
    """Return the token ids of texts of more than one token, and how many texts were truncated to the model's limit."""
    tokens = tokenizer.encode(texts)
    rows = np.split(tokens.batch.values[_PROMPT], np.cumsum(tokens.batch.lengths)[:-1])
    scorable = [row for row in rows if len(row) > 1]
    if not scorable:
        raise InputError("no text has more than one token")
    return scorable, len(tokens.truncated)
