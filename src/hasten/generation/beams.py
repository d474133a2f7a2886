"""Beam search as transformers.generate(num_beams=…, do_sample=False) does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hasten.core.generation import GenerationSpec, Sampling
from hasten.core.tensors import FloatArray
from hasten.generation.rules import Rules
from hasten.generation.sampling import largest


@dataclass(frozen=True, slots=True)
class Beam:
    """A text so far and the logarithm of its probability; of one that ended, by its length."""

    ids: tuple[int, ...]
    score: float
    # Whether a token or a text ended it, and not the limit.
    is_stopped: bool = False


class BeamSearch:
    """Which texts go on after each token. It knows no model: whoever drives it brings logits and keeps slots."""

    def __init__(
        self,
        sampling: Sampling,
        before: Sequence[int],
        spec: GenerationSpec,
        has_stopped: Callable[[Sequence[int]], bool] = lambda _: False,
    ) -> None:
        self.sampling = sampling
        self._spec = spec
        self.running = [Beam((), 0.0)]
        self.finished: list[Beam] = []
        self.is_done = False
        self._rules = Rules(sampling, before, spec.end_ids)
        self._has_stopped = has_stopped
        # Tokens that every answer begins with, and that count as its own by transformers' measure of length.
        self._forced = max(0, len(spec.start_ids) - 1)

    @property
    def best(self) -> Beam:
        return self.finished[0]

    def advance(self, logits: FloatArray) -> list[int]:
        """Take the logits (running, vocabulary) after each running beam: which of them each new one goes on from."""
        beams = self.sampling.beams
        length = len(self.running[0].ids) + 1
        chosen = [(parent, self._extended(parent, token, score)) for parent, token, score in self._likeliest(logits)]
        has_ended = [beam.is_stopped or length >= self.sampling.max_tokens for _, beam in chosen]
        # Those past the first few only stand in for ones that ended: they may go on, but not end.
        ended = [beam for (_, beam), ends in zip(chosen[:beams], has_ended[:beams], strict=True) if ends]
        self.finished += [Beam(beam.ids, self._by_length(beam.score, length), beam.is_stopped) for beam in ended]
        self.finished = sorted(self.finished, key=lambda beam: -beam.score)[:beams]
        going = [pair for pair, ends in zip(chosen, has_ended, strict=True) if not ends][:beams]
        self.running = [beam for _, beam in going]
        is_full = len(self.finished) == beams
        self.is_done = not going or (is_full and self.sampling.early_stopping) or not self._can_improve(length)
        return [parent for parent, _ in going]

    def _likeliest(self, logits: FloatArray) -> list[tuple[int, int, float]]:
        """Parent, token and score of the best continuations, enough that each of them may end."""
        scores = np.stack([self._scores(beam, row) for beam, row in zip(self.running, logits, strict=True)])
        flat = scores.ravel()
        count = min(max(2, 1 + len(self._spec.end_ids)) * self.sampling.beams, len(flat))
        places = largest(flat, count)
        places = places[np.argsort(-flat[places], kind="stable")][:count]
        return [(*divmod(int(place), logits.shape[1]), float(flat[place])) for place in places]

    def _scores(self, beam: Beam, logits: FloatArray) -> FloatArray:
        if self._spec.forced_end_id is not None and len(beam.ids) == self.sampling.max_tokens - 1:
            # What is forced costs nothing.
            forced = np.full(logits.shape, -np.inf, np.float32)
            forced[self._spec.forced_end_id] = beam.score
            return forced
        scores = self._rules(_log_probabilities(logits), beam.ids)
        return (_log_probabilities(scores) if self._spec.renormalizes else scores) + np.float32(beam.score)

    def _extended(self, parent: int, token: int, score: float) -> Beam:
        ids = (*self.running[parent].ids, token)
        return Beam(ids, score, token in self._spec.end_ids or self._has_stopped(ids))

    def _by_length(self, score: float, length: int) -> float:
        return float(score / (length + self._forced) ** self.sampling.length_penalty)

    def _can_improve(self, length: int) -> bool:
        """Whether the best running beam, were it to end here, is better than the worst that ended."""
        if len(self.finished) < self.sampling.beams:
            return True
        return self._by_length(self.running[0].score, length) > self.finished[-1].score


def _log_probabilities(logits: FloatArray) -> FloatArray:
    shifted = logits.astype(np.float32) - logits.max()
    found: FloatArray = shifted - np.log(np.exp(shifted).sum())
    return found
