"""Beam search as transformers.generate(num_beams=…, do_sample=False, early_stopping=False) does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hasten.core.generation import Sampling
from hasten.core.tensors import FloatArray
from hasten.generation.sampling import largest, penalized


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
        seen: Sequence[int],
        end_ids: Sequence[int],
        forced: int = 0,
        has_stopped: Callable[[Sequence[int]], bool] = lambda _: False,
    ) -> None:
        self.sampling = sampling
        self.running = [Beam((), 0.0)]
        self.finished: list[Beam] = []
        self.is_done = False
        self._seen = tuple(seen)
        self._end_ids = frozenset(end_ids)
        self._has_stopped = has_stopped
        # Tokens that every answer begins with, and that count as its own by transformers' measure of length.
        self._forced = forced

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
        self.is_done = not going or not self._can_improve(length)
        return [parent for parent, _ in going]

    def _likeliest(self, logits: FloatArray) -> list[tuple[int, int, float]]:
        """Parent, token and score of the best continuations, enough that each of them may end."""
        scores = np.stack([self._scores(beam, row) for beam, row in zip(self.running, logits, strict=True)])
        flat = scores.ravel()
        count = min(max(2, 1 + len(self._end_ids)) * self.sampling.beams, len(flat))
        places = largest(flat, count)
        places = places[np.argsort(-flat[places], kind="stable")][:count]
        return [(*divmod(int(place), logits.shape[1]), float(flat[place])) for place in places]

    def _scores(self, beam: Beam, logits: FloatArray) -> FloatArray:
        shifted = logits.astype(np.float32) - logits.max()
        log_probabilities = shifted - np.log(np.exp(shifted).sum())
        seen = {*self._seen, *beam.ids}
        return penalized(log_probabilities, seen, self.sampling.repetition_penalty) + np.float32(beam.score)

    def _extended(self, parent: int, token: int, score: float) -> Beam:
        ids = (*self.running[parent].ids, token)
        return Beam(ids, score, token in self._end_ids or self._has_stopped(ids))

    def _by_length(self, score: float, length: int) -> float:
        return float(score / (length + self._forced) ** self.sampling.length_penalty)

    def _can_improve(self, length: int) -> bool:
        """Whether the best running beam, were it to end here, is better than the worst that ended."""
        if len(self.finished) < self.sampling.beams:
            return True
        return self._by_length(self.running[0].score, length) > self.finished[-1].score
