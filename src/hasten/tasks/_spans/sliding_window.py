"""Split long contexts into overlapping windows, each joined with its question."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Encoding

from hasten.core.errors import InputError
from hasten.core.text.tokenizer import Tokenizer

_DEFAULT_LENGTH, _DEFAULT_STRIDE = 384, 128
# Over all windows of a context, enough for a context of over a million tokens at the default sizes. Beyond that the
# question nearly fills the windows, and the same tokens would be processed again and again.
_MAX_WINDOW_TOKENS = 2**21


@dataclass(frozen=True, slots=True)
class WindowSplitter:
    """Joins questions and contexts into rows of `length` tokens, of which neighbours share `stride`."""

    tokenizer: Tokenizer
    length: int
    stride: int
    question_limit: int | None

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, max_seq_len: int | None, doc_stride: int | None, max_question_len: int | None
    ) -> WindowSplitter:
        """Return a splitter from the pipeline's options; None means its defaults."""
        limit = tokenizer.spec.max_length
        length = max_seq_len or min(limit, _DEFAULT_LENGTH)
        if length > limit:
            raise InputError(f"max_seq_len is {length}, but the model takes {limit} tokens")
        stride = min(length // 2, _DEFAULT_STRIDE) if doc_stride is None else doc_stride
        if stride > length:
            raise InputError(f"doc_stride is {stride}, more than a window of {length} tokens holds")
        return cls(tokenizer, length, stride, max_question_len)

    @property
    def context_index(self) -> int:
        """Return which text of a row is the context: the first if rows are padded on the left, as in the pipeline."""
        return 0 if self.tokenizer.spec.pads_left else 1

    def windows(self, question: Encoding, context: Encoding, position: int) -> list[Encoding]:
        """Return the rows of one item; `position` counts items from 1, for messages."""
        truncates_left = self.tokenizer.spec.truncates_left
        if self.question_limit is not None and len(question) > self.question_limit:
            question = self.tokenizer.cut(question, self.question_limit)
        room = self.length - self.tokenizer.special_tokens(is_pair=True) - len(question)
        if len(context) > room:
            self._check_room(room, len(question), len(context), position)
            context.truncate(room, self.stride, "left" if truncates_left else "right")
        join = self.tokenizer.join
        parts = [context, *context.overflowing]
        # Join each window separately: rows that `join` makes of `overflowing` have wrong token types.
        return [join(part, question) if self.context_index == 0 else join(question, part) for part in parts]

    def candidates(self, row: Encoding) -> list[bool]:
        """Return the tokens that may be part of an answer: the context and [CLS], or all if the context comes first."""
        if self.context_index == 0:
            return [True] * len(row)
        cls_id = self.tokenizer.spec.cls_id
        return [text == 1 or token == cls_id for text, token in zip(row.sequence_ids, row.ids, strict=True)]

    def _check_room(self, room: int, question: int, context: int, position: int) -> None:
        if room <= self.stride:
            raise InputError(
                f"question {position} has {question} tokens, which leaves {max(room, 0)} for its context in windows of"
                f" {self.length} that share {self.stride}",
                hint="set max_question_len to truncate it, or a smaller doc_stride",
            )
        count = 1 + -(-(context - room) // (room - self.stride))
        if count * self.length > _MAX_WINDOW_TOKENS:
            raise InputError(
                f"context {position} has {context} tokens, which makes {count} windows of {self.length}, more than the"
                f" limit of {_MAX_WINDOW_TOKENS} tokens",
                hint="use a shorter context or question, a smaller doc_stride or a larger max_seq_len",
            )
