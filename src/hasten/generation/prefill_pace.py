"""Choose how many tokens of a prompt are prefilled between two decode steps, by the measured speed."""

from __future__ import annotations

# The first chunk, before any was timed, and the smallest: fewer tokens take as long, since all weights are read.
_FIRST_TOKENS, _MIN_TOKENS = 64, 16
# A chunk may take as long as this many decode steps.
_DECODE_STEPS = 2
# Weight of earlier decode steps in their time.
_DECAY = 0.9


class PrefillPace:
    """Adapts the chunk of a prefill until one takes between half of a target time and all of it.

    The target is at least the time of two decode steps: where steps are slow, smaller chunks would spend most of their
    time on reading all weights, and running sequences still keep a third of their speed. Chunks double and halve, so
    that prompts are divided into few different shapes.
    """

    def __init__(self, target_s: float) -> None:
        self.chunk_tokens = _FIRST_TOKENS
        # The speed of the fastest chunk of about the target time: an upper bound that a busy moment does not lower.
        # 0 before there was such a chunk.
        self.max_tokens_per_s = 0.0
        self._target_s = target_s
        self._decode_s = 0.0

    def record_decode(self, seconds: float) -> None:
        """Adapt to the time of a decode step."""
        self._decode_s = _DECAY * self._decode_s + (1 - _DECAY) * seconds

    def record(self, tokens: int, seconds: float) -> None:
        """Adapt to the time of a chunk; the rest of a prompt, shorter than a chunk, says nothing."""
        if tokens < self.chunk_tokens:
            return
        target_s = max(self._target_s, _DECODE_STEPS * self._decode_s)
        if seconds < target_s / 2:
            self.chunk_tokens = 2 * tokens
            return
        self.max_tokens_per_s = max(self.max_tokens_per_s, tokens / seconds)
        if seconds > target_s:
            self.chunk_tokens = max(_MIN_TOKENS, tokens // 2)
