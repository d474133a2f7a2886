"""Change logits before a token is chosen, as transformers' logits processors do."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from hasten.core.generation_types import SamplingParams
from hasten.core.tensors import FloatArray

# Beyond these bounds float32 becomes zero or infinity, and a logit times or divided by it NaN.
_MIN_FACTOR, _MAX_FACTOR = 1e-30, 1e30


class LogitsProcessor:
    """Changes the logits of one sequence; repetitions of its prompt count too."""

    def __init__(self, sampling: SamplingParams, prompt_ids: Sequence[int], eos_token_ids: Collection[int]) -> None:
        self._sampling = sampling
        self._prompt_ids = list(prompt_ids)
        self._eos_token_ids = list(eos_token_ids)

    def __call__(self, logits: FloatArray, generated: Sequence[int]) -> FloatArray:
        """Return the logits after these generated tokens; the same array if nothing changes."""
        changed, penalty = logits, self._sampling.repetition_penalty
        if penalty != 1:
            changed = apply_repetition_penalty(logits, {*self._prompt_ids, *generated}, penalty)
        banned = [token for token in self._banned(generated) if token < len(logits)]
        if banned:
            changed = changed.copy() if changed is logits else changed
            changed[banned] = -np.inf
        return changed

    def _banned(self, generated: Sequence[int]) -> Iterator[int]:
        sampling = self._sampling
        if len(generated) < sampling.min_tokens:
            yield from self._eos_token_ids
        if sampling.no_repeat_ngram_size or sampling.bad_words_ids:
            ids = [*self._prompt_ids, *generated]
            yield from _repeated_ngram_ends(ids, sampling.no_repeat_ngram_size)
            yield from _bad_word_ends(ids, sampling.bad_words_ids)


def apply_repetition_penalty(logits: FloatArray, seen: Collection[int], penalty: float) -> FloatArray:
    """Return the logits with tokens that occurred before made less likely."""
    ids = np.fromiter(seen, np.int64, len(seen))
    # An embedding may have more tokens than there are logits.
    ids = ids[ids < len(logits)]
    changed = logits.astype(np.float32, copy=True)
    before, factor = changed[ids], finite_factor(penalty)
    changed[ids] = np.where(before < 0, before * factor, before / factor)
    return changed


def finite_factor(value: float) -> np.float32:
    """Clamp a factor of logits so that products and quotients stay finite in float32."""
    return np.float32(min(max(value, _MIN_FACTOR), _MAX_FACTOR))


def _repeated_ngram_ends(ids: Sequence[int], size: int) -> Iterator[int]:
    """Yield the tokens that would repeat an n-gram of this size."""
    if 0 < size <= len(ids):
        last = list(ids[len(ids) - size + 1 :])
        for start in range(len(ids) - size + 1):
            if ids[start : start + size - 1] == last:
                yield ids[start + size - 1]


def _bad_word_ends(ids: Sequence[int], words: Sequence[Sequence[int]]) -> Iterator[int]:
    """Yield the last token of each word whose other tokens were just generated."""
    for word in words:
        length = len(word) - 1
        if not length or list(ids[-length:]) == list(word[:-1]):
            yield word[-1]
