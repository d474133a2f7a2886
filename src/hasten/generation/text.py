"""Tokens to text while it is written: pieces that are never taken back, and stop strings that never get out."""

from __future__ import annotations

from collections.abc import Sequence

from hasten.core.tokenizer import Tokenizer

# Tokens of a prompt that say how the text after it begins: one is enough unless it is special.
_CONTEXT = 8


class Detokenizer:
    """The text of a row of tokens, piece by piece; joined, the pieces are the text of all of them.

    All but this: where bytes that are no character follow others that are one, Llama 2's decoder takes that one back.
    A piece stays.

    A token's text depends on the ones before it: SentencePiece's first word has no space before it, bytes become a
    character together. So a token is decoded behind the last ones that are out already, and what is new is the piece.
    The stream of `tokenizers` does that too, but keeps half a character at the end, and begins without a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        """With a prompt the text goes on from it, and may begin with a space."""
        self._tokenizer = tokenizer
        length = _CONTEXT
        self._ids = list(prompt[-length:])
        self._out = self._text(self._ids)
        # One that begins with half a character may hide all of the bytes behind it.
        while self._out.startswith("\ufffd") and length < len(prompt):
            length *= 2
            self._ids = list(prompt[-length:])
            self._out = self._text(self._ids)
        self._read = len(self._ids)

    def add(self, token: int) -> str:
        """What became text with this token; nothing while it may still change."""
        self._ids.append(token)
        text = self._text(self._ids)
        return "" if self._tokenizer.may_change(text) else self._new(text)

    def end(self) -> str:
        """What was still waited with."""
        return self._new(self._text(self._ids))

    def whole(self, ids: Sequence[int]) -> str:
        """What these tokens would be, were they to come next: for beams, of which only one will."""
        return self._text([*self._ids, *ids])[len(self._out) :]

    def _new(self, text: str) -> str:
        if len(text) <= len(self._out):
            return ""
        piece = text[len(self._out) :]
        self._ids = self._ids[self._read :]
        self._out = self._text(self._ids)
        self._read = len(self._ids)
        return piece

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skips_special=True) if ids else ""


class StopStrings:
    """Lets text through up to the first stop string, whichever pieces it comes in."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_met = False

    def add(self, piece: str) -> str:
        """What is certain not to begin a stop string."""
        if not self._stops:
            return piece
        if self.is_met:
            return ""
        text = self._held + piece
        # The one that is complete first, and of those the longest: so it would be, did each letter come alone.
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.is_met = True
            self._held = ""
            return text[: min(found)[1]]
        kept = max(self._begun(text, stop) for stop in self._stops)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def end(self) -> str:
        """What looked like the beginning of a stop string, and was not."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _begun(text: str, stop: str) -> int:
        """Characters at the end that a stop string begins with."""
        most = min(len(stop) - 1, len(text))
        return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)
