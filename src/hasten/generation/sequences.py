"""Sequences being generated, and how each continues from the logits after its last token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hasten.backends import Decoder, SupportsChunkedPrefill
from hasten.core.generation_types import Finish, GenerationSpec, SamplingParams
from hasten.core.tensors import FloatArray, IntArray
from hasten.generation.beams import BeamSearch
from hasten.generation.detokenizer import Detokenizer, StopStrings
from hasten.generation.sampling import Sampler

# Tokens that one character may take, and tokens before a stop string that determine how its text begins.
_MAX_CHARACTER_TOKENS, _TAIL_CONTEXT = 4, 8


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text added to a sequence and, in the last delta, why it ended; the last delta may be empty."""

    text: str
    finish: Finish | None = None


# Called for each delta on the thread that runs the decoder; it must neither raise nor block.
OnText = Callable[[TextDelta], None]


class TextSequence:
    """One text to generate. `cancel` is thread-safe."""

    def __init__(self, prompt: IntArray, sampling: SamplingParams, on_text: OnText, detokenizer: Detokenizer) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.on_text = on_text
        self.detokenizer = detokenizer
        # The generated tokens, without the end-of-sequence token.
        self.ids: list[int] = []
        self.eos_token_id: int | None = None
        self.finish: Finish | None = None
        self.is_cancelled = False

    @property
    def is_over(self) -> bool:
        """Return whether it is finished or cancelled."""
        return self.finish is not None or self.is_cancelled

    def cancel(self) -> None:
        """Stop emitting deltas; its slots are freed before the next decode step."""
        self.is_cancelled = True


class SequenceState:
    """A sequence that holds slots: which of them decode next, with which tokens, and how it uses the logits."""

    def __init__(self, sequence: TextSequence, spec: GenerationSpec, slots: Sequence[int]) -> None:
        self.sequence = sequence
        self.slots = list(slots)
        # The slots with content; prefill fills the first.
        self.filled_slots: set[int] = set()
        self.active_slots = self.slots[:1]
        self.next_ids = np.zeros(0, np.int32)
        # Tokens of the prompt that are not prefilled yet.
        self.prompt_left = len(sequence.prompt)
        self._spec = spec
        self._stops = StopStrings(sequence.sampling.stop)

    def prefill(self, decoder: Decoder, chunk_tokens: int | None = None) -> int:
        """Process the next tokens of the prompt, or all, and return how many; after the last, choose the first token.

        Only a decoder that supports chunked prefill accepts `chunk_tokens`.
        """
        prompt = self.sequence.prompt
        begin = len(prompt) - self.prompt_left
        ids = prompt[begin:][:chunk_tokens]
        if self.filled_slots:
            assert isinstance(decoder, SupportsChunkedPrefill)
            logits = decoder.extend(self.slots[0], ids)
        else:
            if len(ids) < self.prompt_left:
                assert isinstance(decoder, SupportsChunkedPrefill)
                # While only the other sequences' tokens have to be moved, and once instead of at every doubling.
                decoder.reserve(len(prompt))
            logits = decoder.prefill(self.slots[0], ids)
            self.filled_slots.add(self.slots[0])
        self.prompt_left -= len(ids)
        if not self.prompt_left:
            self.advance(logits[None], decoder)
        return len(ids)

    def advance(self, logits: FloatArray, decoder: Decoder) -> None:
        """Continue from the logits (active slots, vocabulary)."""
        raise NotImplementedError

    def free(self, decoder: Decoder) -> None:
        """Free the slots."""
        for slot in self.filled_slots:
            decoder.free(slot)

    def _prompt_ids(self) -> list[int]:
        """Return the tokens before the answer that count as repetitions."""
        return list(self._spec.decoder_start_token_ids) or self.sequence.prompt.tolist()

    def _emit(self, text: str, finish: Finish | None = None) -> None:
        sequence = self.sequence
        if finish is not None:
            text += self._stops.add(sequence.detokenizer.end()) + self._stops.end()
        finish = Finish.STOP if self._stops.is_met else finish
        if (text or finish is not None) and not sequence.is_cancelled:
            sequence.on_text(TextDelta(text, finish))
        # Last: when another thread sees it finished, all deltas must have been emitted.
        sequence.finish = finish


class Sampled(SequenceState):
    """Samples one token after the other."""

    @cached_property
    def _sample(self) -> Sampler:
        return Sampler(self.sequence.sampling, self._prompt_ids(), self._spec.eos_token_ids)

    def advance(self, logits: FloatArray, decoder: Decoder) -> None:
        sequence = self.sequence
        if self._spec.forced_eos_token_id is not None and len(sequence.ids) == sequence.sampling.max_tokens - 1:
            sequence.eos_token_id = self._spec.forced_eos_token_id
            self._emit("", Finish.LENGTH)
            return
        token = self._sample(logits[0])
        if token in self._spec.eos_token_ids:
            sequence.eos_token_id = token
            self._emit("", Finish.STOP)
            return
        sequence.ids.append(token)
        self.next_ids = np.array([token], np.int32)
        is_last = len(sequence.ids) >= sequence.sampling.max_tokens
        self._emit(self._stops.add(sequence.detokenizer.add(token)), Finish.LENGTH if is_last else None)


class BeamSearched(SequenceState):
    """Runs a beam search; its text is emitted at the end, since the best text may change until then."""

    @cached_property
    def _search(self) -> BeamSearch:
        return BeamSearch(self.sequence.sampling, self._prompt_ids(), self._spec, self._has_stop)

    def advance(self, logits: FloatArray, decoder: Decoder) -> None:
        parents = self._search.advance(logits)
        if self._search.is_done:
            self._emit_best()
            return
        self._assign_slots(parents, decoder)
        self.next_ids = np.array([beam.ids[-1] for beam in self._search.running], np.int32)

    def _assign_slots(self, parents: Sequence[int], decoder: Decoder) -> None:
        """Keep the first continuation of a beam in its slot; fork the slot for the others."""
        used = {self.active_slots[parent] for parent in parents}
        free = [slot for slot in self.slots if slot not in used]
        slots: list[int] = []
        forks: dict[int, int] = {}
        for parent in parents:
            slot = self.active_slots[parent]
            if slot in slots:
                forks[free[-1]] = slot
                slot = free.pop()
            slots.append(slot)
        if forks:
            decoder.fork(list(forks.values()), list(forks))
            self.filled_slots.update(forks)
        self.active_slots = slots

    def _emit_best(self) -> None:
        best, sequence = self._search.finished[0], self.sequence
        sequence.ids = list(best.ids)
        if best.ids[-1] in self._spec.eos_token_ids:
            sequence.eos_token_id = sequence.ids.pop()
        text = "".join(self._stops.add(sequence.detokenizer.add(token)) for token in sequence.ids)
        self._emit(text, Finish.STOP if best.is_stopped else Finish.LENGTH)

    def _has_stop(self, ids: Sequence[int]) -> bool:
        """Return whether the last token completes a stop string: the beam before it had none."""
        stops = self.sequence.sampling.stop
        if not stops:
            return False
        tail = _MAX_CHARACTER_TOKENS * max(map(len, stops)) + _TAIL_CONTEXT
        text = self.sequence.detokenizer.preview(ids[-tail:])
        return any(stop in text for stop in stops)
