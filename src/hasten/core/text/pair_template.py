"""The chat template of a reranker, reduced to the fixed texts around a query and a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hasten.core.tensors import Batch
from hasten.core.text.tokenizer import Tokenizer, Tokens

QUERY, DOCUMENT, INSTRUCTION = SLOTS = "query", "document", "instruction"
# Texts whose tokens have no common end: the end that both rows share belongs to the template.
_FILLERS = ("0", "1 2 3 4")


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The texts of a template, and between them the parts of a request."""

    texts: tuple[str, ...]
    # One of SLOTS after each text but the last.
    slots: tuple[str, ...]
    # Whether the template removes white space around each part.
    strips: bool = False

    def __post_init__(self) -> None:
        if len(self.texts) != len(self.slots) + 1 or not set(self.slots) <= set(SLOTS):
            raise ValueError("a template needs a known slot between each two texts")

    def render(self, query: str, document: str, instruction: str = "") -> str:
        """Return the text that the model reads."""
        parts = {QUERY: query, DOCUMENT: document, INSTRUCTION: instruction}
        if self.strips:
            parts = {slot: part.strip() for slot, part in parts.items()}
        return "".join(text + parts[slot] for text, slot in zip(self.texts, self.slots, strict=False)) + self.texts[-1]

    def encode(self, pairs: Sequence[tuple[str, str]], instruction: str, tokenizer: Tokenizer) -> Tokens:
        """Return a row per pair; a pair that is too long is truncated, but not the end of the template."""
        texts = [self.render(query, document, instruction) for query, document in pairs]
        rows = [encoding.ids for encoding in tokenizer.encode_whole(texts)]
        limit = tokenizer.spec.max_length
        truncated = tuple(index for index, row in enumerate(rows) if len(row) > limit)
        if truncated:
            end = self._end(instruction, tokenizer)[-limit:]
            is_left = tokenizer.spec.truncates_left
            for index in truncated:
                rows[index] = rows[index][-limit:] if is_left else rows[index][: limit - len(end)] + end
        values = {
            name: rows if name == "input_ids" else [[0] * len(row) for row in rows] for name in tokenizer.spec.inputs
        }
        return Tokens(Batch.from_rows(values), truncated, ())

    def _end(self, instruction: str, tokenizer: Tokenizer) -> list[int]:
        """Return the tokens after the document, as sentence-transformers finds them."""
        texts = [self.render(filler, filler, instruction) for filler in _FILLERS]
        first, second = (encoding.ids for encoding in tokenizer.encode_whole(texts))
        count = next(
            (count for count in range(min(len(first), len(second))) if first[-1 - count] != second[-1 - count]), 0
        )
        return first[len(first) - count :]
