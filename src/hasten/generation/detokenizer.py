"""Convert tokens to text incrementally: emitted text is never taken back, and stop strings are never emitted."""

from __future__ import annotations

from collections.abc import Sequence

from hasten.core.text.tokenizer import Tokenizer

# Tokens of a prompt that determine how the text after it begins: one is enough unless it is special.
_CONTEXT = 8


class Detokenizer:
    """Decodes a sequence of tokens into text deltas; joined, they are the text of all tokens.

    There is one exception: if invalid bytes follow valid ones, Llama 2's decoder takes back a character. A delta is not
    taken back.

    The text of a token depends on the ones before it: SentencePiece's first word has no space before it, and several
    byte tokens become one character. So a token is decoded after the last tokens that were emitted, and the delta is
    what that adds. The stream of `tokenizers` does so too, but keeps an incomplete character at the end, and starts
    without a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        """Start empty, or, with a prompt, as its continuation, which may begin with a space."""
        self._tokenizer = tokenizer
        length = _CONTEXT
        # A context that begins with an incomplete character may hide all bytes after it.
        while self._decode(prompt[-length:]).startswith("\ufffd") and length < len(prompt):
            length *= 2
        self._set_context(prompt[-length:])

    def add(self, token: int) -> str:
        """Return the text that this token completes; empty while the text may still change."""
        self._ids.append(token)
        text = self._decode(self._ids)
        return "" if self._tokenizer.may_change(text) else self._delta(text)

    def end(self) -> str:
        """Return the text that was held back."""
        return self._delta(self._decode(self._ids))

    def preview(self, ids: Sequence[int]) -> str:
        """Return the text of these tokens without adding them: only one of several beams will be."""
        return self._decode([*self._ids, *ids])[len(self._emitted) :]

    def _delta(self, text: str) -> str:
        if len(text) <= len(self._emitted):
            return ""
        delta = text[len(self._emitted) :]
        self._set_context(self._ids[self._emitted_ids :])
        return delta

    def _set_context(self, ids: Sequence[int]) -> None:
        """Set the emitted tokens that further tokens are decoded after, whose text was emitted."""
        self._ids = list(ids)
        self._emitted = self._decode(self._ids)
        self._emitted_ids = len(self._ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skips_special=True) if ids else ""


class StopStrings:
    """Passes text through up to the first stop string, however it is divided into deltas."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_met = False

    def add(self, delta: str) -> str:
        """Return the text that cannot be the beginning of a stop string."""
        if not self._stops:
            return delta
        if self.is_met:
            return ""
        text = self._held + delta
        # The one that is complete first, and of those the longest, as if each character came alone.
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self.is_met = True
            self._held = ""
            return text[: min(matches)[1]]
        held = max(
            size for stop in self._stops for size in range(min(len(stop), len(text) + 1)) if text.endswith(stop[:size])
        )
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """Return the text that was held back and is not part of a stop string."""
        held, self._held = self._held, ""
        return held
