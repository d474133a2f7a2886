"""Contexts that are longer than a model takes, cut into windows that overlap, each joined with its question."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Encoding

from hasten.core.errors import InputError
from hasten.core.tokenizer import Tokenizer

_WINDOW, _OVERLAP = 384, 128
# In all windows of a context, which makes a context of over a million at the usual sizes. Beyond that a question all
# but fills its windows, and the same tokens would be read again and again.
_MAX_TOKENS = 2**21


@dataclass(frozen=True, slots=True)
class Cutter:
    """Questions and contexts to rows: how long, with how much in common, and in which order."""

    tokenizer: Tokenizer
    length: int
    stride: int
    question_limit: int | None

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, max_seq_len: int | None, doc_stride: int | None, max_question_len: int | None
    ) -> Cutter:
        """By the pipeline's options and, for those that are not given, its defaults."""
        limit = tokenizer.spec.max_length
        length = max_seq_len or min(limit, _WINDOW)
        if length > limit:
            raise InputError(f"max_seq_len is {length}, and the model takes {limit} tokens")
        stride = min(length // 2, _OVERLAP) if doc_stride is None else doc_stride
        if stride > length:
            raise InputError(f"doc_stride is {stride}, more than a window of {length} tokens holds")
        return cls(tokenizer, length, stride, max_question_len)

    @property
    def context_place(self) -> int:
        """The pipeline's rule: where rows are padded on the left, the context comes first."""
        return 0 if self.tokenizer.spec.pads_left else 1

    def windows(self, question: Encoding, context: Encoding, place: int) -> list[Encoding]:
        truncates_left = self.tokenizer.spec.truncates_left
        if self.question_limit is not None and len(question) > self.question_limit:
            question = self.tokenizer.cut(question, self.question_limit)
        room = self.length - self.tokenizer.special_tokens(is_pair=True) - len(question)
        if len(context) > room:
            self._check_room(room, len(question), len(context), place)
            context.truncate(room, self.stride, "left" if truncates_left else "right")
        join = self.tokenizer.join
        parts = [context, *context.overflowing]
        # Window by window: those that `join` makes of what `overflowing` holds have wrong token types.
        return [join(part, question) if self.context_place == 0 else join(question, part) for part in parts]

    def candidates(self, row: Encoding) -> list[bool]:
        """The pipeline's rule: the context and every [CLS] or, where the context comes first, all there is."""
        if self.context_place == 0:
            return [True] * len(row)
        cls_id = self.tokenizer.spec.cls_id
        return [text == 1 or token == cls_id for text, token in zip(row.sequence_ids, row.ids, strict=True)]

    def _check_room(self, room: int, question: int, context: int, place: int) -> None:
        if room <= self.stride:
            raise InputError(
                f"question {place} has {question} tokens, which leaves {max(room, 0)} for its context in windows of"
                f" {self.length} that have {self.stride} in common",
                hint="max_question_len cuts it, a smaller doc_stride makes room",
            )
        count = 1 + -(-(context - room) // (room - self.stride))
        if count * self.length > _MAX_TOKENS:
            raise InputError(
                f"context {place} has {context} tokens, which makes {count} windows of {self.length}, {_MAX_TOKENS}"
                " tokens being the most",
                hint="a shorter context or question, a smaller doc_stride or a greater max_seq_len",
            )
