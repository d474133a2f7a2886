"""Texts in the making: what a row is told, and how it goes on from the logits after its last token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hasten.backends import Decoder
from hasten.core.generation import Finish, GenerationSpec, Sampling
from hasten.core.tensors import FloatArray, IntArray
from hasten.generation.beams import BeamSearch
from hasten.generation.sampling import Chooser
from hasten.generation.text import Detokenizer, StopStrings


@dataclass(frozen=True, slots=True)
class Piece:
    """What was added to a text, and why it ended where it did; the last piece may be empty."""

    text: str
    finish: Finish | None = None


# Called on the thread that steps, for each piece; it must not raise, nor wait.
Told = Callable[[Piece], None]


class Row:
    """One text that was asked for. `cancel` may come from any thread."""

    def __init__(self, prompt: IntArray, sampling: Sampling, told: Told, text: Detokenizer) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.told = told
        self.text = text
        # What was written, the token that ended it left out.
        self.ids: list[int] = []
        self.end_id: int | None = None
        self.finish: Finish | None = None
        self.is_cancelled = False

    @property
    def is_over(self) -> bool:
        return self.finish is not None or self.is_cancelled

    def cancel(self) -> None:
        """Nothing more is told of it, and its slots are free before the next token of anybody else."""
        self.is_cancelled = True


class Course:
    """A row that has slots: which of them are stepped, with what, and what becomes of the logits."""

    def __init__(self, row: Row, spec: GenerationSpec, slots: Sequence[int]) -> None:
        self.row = row
        self.held = list(slots)
        # Those of the held ones that are not empty; the prompt is read into the first.
        self.filled: set[int] = set()
        self.stepped = self.held[:1]
        self.next_ids = np.zeros(0, np.int32)
        self._spec = spec
        self._stops = StopStrings(row.sampling.stop)

    def begin(self, decoder: Decoder) -> None:
        logits = decoder.begin(self.held[0], self.row.prompt)
        self.filled.add(self.held[0])
        self.advance(logits[None], decoder)

    def advance(self, logits: FloatArray, decoder: Decoder) -> None:
        """Go on from the logits (stepped slots, vocabulary)."""
        raise NotImplementedError

    def end(self, decoder: Decoder) -> None:
        for slot in self.filled:
            decoder.end(slot)

    def _before(self) -> list[int]:
        """The tokens before the answer, as far as what must not come again counts them."""
        return list(self._spec.start_ids) or self.row.prompt.tolist()

    def _tell(self, text: str, finish: Finish | None = None) -> None:
        if finish is not None:
            text += self._stops.add(self.row.text.end()) + self._stops.end()
        finish = Finish.STOP if self._stops.is_met else finish
        if (text or finish is not None) and not self.row.is_cancelled:
            self.row.told(Piece(text, finish))
        # Last: another thread that sees it finished must have been told all of it.
        self.row.finish = finish


class Single(Course):
    """Chooses one token after the other."""

    @cached_property
    def _choose(self) -> Chooser:
        return Chooser(self.row.sampling, self._before(), self._spec.end_ids)

    def advance(self, logits: FloatArray, decoder: Decoder) -> None:
        if self._spec.forced_end_id is not None and len(self.row.ids) == self.row.sampling.max_tokens - 1:
            self.row.end_id = self._spec.forced_end_id
            self._tell("", Finish.LENGTH)
            return
        token = self._choose(logits[0])
        if token in self._spec.end_ids:
            self.row.end_id = token
            self._tell("", Finish.STOP)
            return
        self.row.ids.append(token)
        self.next_ids = np.array([token], np.int32)
        is_last = len(self.row.ids) >= self.row.sampling.max_tokens
        self._tell(self._stops.add(self.row.text.add(token)), Finish.LENGTH if is_last else None)


class Beams(Course):
    """Searches; what it found is told at the end, since the best text may become another one until then."""

    @cached_property
    def _search(self) -> BeamSearch:
        return BeamSearch(self.row.sampling, self._before(), self._spec, self._has_stop)

    def advance(self, logits: FloatArray, decoder: Decoder) -> None:
        parents = self._search.advance(logits)
        if self._search.is_done:
            self._tell_best()
            return
        self._move(parents, decoder)
        self.next_ids = np.array([beam.ids[-1] for beam in self._search.running], np.int32)

    def _move(self, parents: Sequence[int], decoder: Decoder) -> None:
        """The first that goes on from a beam stays in its slot; others get a copy of it."""
        staying = {self.stepped[parent] for parent in parents}
        free = [slot for slot in self.held if slot not in staying]
        slots: list[int] = []
        copies: dict[int, int] = {}
        for parent in parents:
            slot = self.stepped[parent]
            if slot in slots:
                copies[free[-1]] = slot
                slot = free.pop()
            slots.append(slot)
        if copies:
            decoder.copy(list(copies.values()), list(copies))
            self.filled.update(copies)
        self.stepped = slots

    def _tell_best(self) -> None:
        best = self._search.best
        self.row.ids = list(best.ids)
        if best.ids[-1] in self._spec.end_ids:
            self.row.end_id = self.row.ids.pop()
        text = "".join(self._stops.add(self.row.text.add(token)) for token in self.row.ids)
        self._tell(text, Finish.STOP if best.is_stopped else Finish.LENGTH)

    def _has_stop(self, ids: Sequence[int]) -> bool:
        stops = self.row.sampling.stop
        text = self.row.text.whole(ids) if stops else ""
        return any(stop in text for stop in stops)
