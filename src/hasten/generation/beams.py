"""Beam search, equal to `transformers.generate(num_beams=…, do_sample=False)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hasten.core.generation_types import GenerationSpec, SamplingParams
from hasten.core.tensors import FloatArray
from hasten.generation.logits import LogitsProcessor
from hasten.generation.sampling import largest


@dataclass(frozen=True, slots=True)
class Beam:
    """A text so far and its log-probability, divided by the length penalty once it has ended."""

    ids: tuple[int, ...]
    score: float
    # Whether a token or a stop string ended it, and not the limit.
    is_stopped: bool = False


class BeamSearch:
    """Selects the texts to continue after each token. The caller provides logits and manages slots."""

    def __init__(
        self,
        sampling: SamplingParams,
        prompt_ids: Sequence[int],
        spec: GenerationSpec,
        has_stopped: Callable[[Sequence[int]], bool] = lambda _: False,
    ) -> None:
        self.sampling = sampling
        self._spec = spec
        self.running = [Beam((), 0.0)]
        # The finished beams, the best first.
        self.finished: list[Beam] = []
        self.is_done = False
        self._process_logits = LogitsProcessor(sampling, prompt_ids, spec.eos_token_ids)
        self._has_stopped = has_stopped
        # Forced first tokens, which transformers counts as part of the answer's length.
        self._forced = max(0, len(spec.decoder_start_token_ids) - 1)

    def advance(self, logits: FloatArray) -> list[int]:
        """Extend the running beams by the logits (running, vocabulary); return the parent of each new running beam."""
        num_beams = self.sampling.num_beams
        length = len(self.running[0].ids) + 1
        candidates = [(parent, self._extended(parent, token, score)) for parent, token, score in self._top(logits)]
        has_ended = [beam.is_stopped or length >= self.sampling.max_tokens for _, beam in candidates]
        # Candidates past the first `num_beams` only replace beams that ended: they may continue, but not end.
        ended = [beam for (_, beam), ends in zip(candidates[:num_beams], has_ended[:num_beams], strict=True) if ends]
        self.finished += [Beam(beam.ids, self._penalized(beam.score, length), beam.is_stopped) for beam in ended]
        self.finished = sorted(self.finished, key=lambda beam: -beam.score)[:num_beams]
        continuing = [pair for pair, ends in zip(candidates, has_ended, strict=True) if not ends][:num_beams]
        self.running = [beam for _, beam in continuing]
        is_full = len(self.finished) == num_beams
        self.is_done = not continuing or (is_full and self.sampling.early_stopping) or not self._can_improve(length)
        return [parent for parent, _ in continuing]

    def _top(self, logits: FloatArray) -> list[tuple[int, int, float]]:
        """Return parent, token and score of the best continuations: enough even if every beam may end."""
        scores = np.stack([self._scores(beam, row) for beam, row in zip(self.running, logits, strict=True)])
        flat = scores.ravel()
        count = min(max(2, 1 + len(self._spec.eos_token_ids)) * self.sampling.num_beams, len(flat))
        indices = largest(flat, count)
        indices = indices[np.argsort(-flat[indices], kind="stable")][:count]
        return [(*divmod(int(index), logits.shape[1]), float(flat[index])) for index in indices]

    def _scores(self, beam: Beam, logits: FloatArray) -> FloatArray:
        if self._spec.forced_eos_token_id is not None and len(beam.ids) == self.sampling.max_tokens - 1:
            # A forced token does not change the score.
            forced = np.full(logits.shape, -np.inf, np.float32)
            forced[self._spec.forced_eos_token_id] = beam.score
            return forced
        scores = self._process_logits(_log_softmax(logits), beam.ids)
        return (_log_softmax(scores) if self._spec.renormalize_logits else scores) + np.float32(beam.score)

    def _extended(self, parent: int, token: int, score: float) -> Beam:
        ids = (*self.running[parent].ids, token)
        return Beam(ids, score, token in self._spec.eos_token_ids or self._has_stopped(ids))

    def _penalized(self, score: float, length: int) -> float:
        return float(score / (length + self._forced) ** self.sampling.length_penalty)

    def _can_improve(self, length: int) -> bool:
        """Return whether the best running beam, if it ended here, would beat the worst finished one."""
        if len(self.finished) < self.sampling.num_beams:
            return True
        return self._penalized(self.running[0].score, length) > self.finished[-1].score


def _log_softmax(logits: FloatArray) -> FloatArray:
    shifted = logits.astype(np.float32) - logits.max()
    result: FloatArray = shifted - np.log(np.exp(shifted).sum())
    return result
