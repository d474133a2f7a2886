"""What changes logits before a token is chosen among them, as transformers' logits processors define it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from hasten.core.generation import Sampling
from hasten.core.tensors import FloatArray

# Beyond these float32 makes zero or infinity of a number, and of a logit times or over it no number at all.
_SMALLEST, _LARGEST = 1e-30, 1e30


class Rules:
    """Of one text: what was there before its answer counts too, where something must not come again."""

    def __init__(self, sampling: Sampling, before: Sequence[int], end_ids: Collection[int]) -> None:
        self._sampling = sampling
        self._before = list(before)
        self._end_ids = list(end_ids)

    def __call__(self, logits: FloatArray, written: Sequence[int]) -> FloatArray:
        """The logits after so much of the answer; as they are where no rule has anything to say."""
        changed, penalty = logits, self._sampling.repetition_penalty
        if penalty != 1:
            changed = penalized(logits, {*self._before, *written}, penalty)
        banned = [token for token in self._banned(written) if token < len(logits)]
        if banned:
            changed = changed.copy() if changed is logits else changed
            changed[banned] = -np.inf
        return changed

    def _banned(self, written: Sequence[int]) -> Iterator[int]:
        sampling = self._sampling
        if len(written) < sampling.min_tokens:
            yield from self._end_ids
        if sampling.no_repeat_ngram_size or sampling.bad_words_ids:
            ids = [*self._before, *written]
            yield from _repeating(ids, sampling.no_repeat_ngram_size)
            yield from _ending(ids, sampling.bad_words_ids)


def penalized(logits: FloatArray, seen: Collection[int], penalty: float) -> FloatArray:
    """Tokens that were there before, less likely."""
    ids = np.fromiter(seen, np.int64, len(seen))
    # An embedding may know tokens that no logit stands for.
    ids = ids[ids < len(logits)]
    changed = logits.astype(np.float32, copy=True)
    before = changed[ids]
    changed[ids] = np.where(before < 0, before * single(penalty), before / single(penalty))
    return changed


def single(value: float) -> np.float32:
    """What logits are multiplied with, or divided by."""
    return np.float32(min(max(value, _SMALLEST), _LARGEST))


def _repeating(ids: Sequence[int], size: int) -> Iterator[int]:
    """Tokens that would end a run of so many tokens that was there before."""
    if 0 < size <= len(ids):
        last = list(ids[len(ids) - size + 1 :])
        for start in range(len(ids) - size + 1):
            if ids[start : start + size - 1] == last:
                yield ids[start + size - 1]


def _ending(ids: Sequence[int], words: Sequence[Sequence[int]]) -> Iterator[int]:
    """The last token of each word whose others have just been written."""
    for word in words:
        begun = len(word) - 1
        if not begun or list(ids[-begun:]) == list(word[:-1]):
            yield word[-1]
