"""Change logits before a token is chosen, as transformers' logits processors do."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from hasten.core.generation_types import SamplingParams
from hasten.core.tensors import FloatArray, IntArray

# Beyond these bounds float32 becomes zero or infinity, and a logit times or divided by it NaN.
_MIN_FACTOR, _MAX_FACTOR = 1e-30, 1e30


class LogitsProcessor:
    """Changes the logits of one sequence; repetitions of its prompt count too."""

    def __init__(self, sampling: SamplingParams, prompt_ids: Sequence[int], eos_token_ids: Collection[int]) -> None:
        self._sampling = sampling
        self._prompt_ids = np.asarray(prompt_ids, np.int64)
        self._distinct_prompt_ids = np.unique(self._prompt_ids)
        self._eos_token_ids = list(eos_token_ids)
        # The last tokens of forbidden words, by the tokens before them.
        self._bad_word_ends: dict[tuple[int, ...], list[int]] = {}
        for word in sampling.bad_words_ids:
            self._bad_word_ends.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._bad_word_lengths = {len(prefix) for prefix in self._bad_word_ends}

    def __call__(self, logits: FloatArray, generated: Sequence[int]) -> FloatArray:
        """Return the logits after these generated tokens; the same array if nothing changes."""
        changed, penalty, banned = logits, self._sampling.repetition_penalty, self._banned(generated)
        if penalty != 1:
            seen = np.concatenate([self._distinct_prompt_ids, _array(generated)])
            changed = apply_repetition_penalty(logits, seen, penalty)
        banned = banned[banned < len(logits)]
        if len(banned):
            changed = changed.copy() if changed is logits else changed
            changed[banned] = -np.inf
        return changed

    def _banned(self, generated: Sequence[int]) -> IntArray:
        sampling = self._sampling
        banned = [_array(self._eos_token_ids)] if len(generated) < sampling.min_tokens else []
        if sampling.no_repeat_ngram_size or sampling.bad_words_ids:
            ids = np.concatenate([self._prompt_ids, _array(generated)])
            banned.append(_repeated_ngram_ends(ids, sampling.no_repeat_ngram_size))
            for length in self._bad_word_lengths:
                last = tuple(ids[len(ids) - length :].tolist()) if length <= len(ids) else None
                if last is not None and last in self._bad_word_ends:
                    banned.append(_array(self._bad_word_ends[last]))
        return np.concatenate(banned) if banned else _array(())


def _array(ids: Sequence[int]) -> IntArray:
    return np.fromiter(ids, np.int64, len(ids))


def apply_repetition_penalty(logits: FloatArray, seen: IntArray, penalty: float) -> FloatArray:
    """Return the logits with tokens that occurred before made less likely, however often they did."""
    # An embedding may have more tokens than there are logits.
    ids = seen[seen < len(logits)]
    changed = logits.astype(np.float32, copy=True)
    before, factor = changed[ids], finite_factor(penalty)
    changed[ids] = np.where(before < 0, before * factor, before / factor)
    return changed


def finite_factor(value: float) -> np.float32:
    """Clamp a factor of logits so that products and quotients stay finite in float32."""
    return np.float32(min(max(value, _MIN_FACTOR), _MAX_FACTOR))


def _repeated_ngram_ends(ids: IntArray, size: int) -> IntArray:
    """Return the tokens that would repeat an n-gram of this size."""
    ends = np.arange(size - 1, len(ids)) if size else np.zeros(0, np.int64)
    # Positions remain whose tokens before them are the last ones.
    for offset in range(1, min(size, len(ids))):
        ends = ends[ids[ends - offset] == ids[-offset]]
    return ids[ends]
