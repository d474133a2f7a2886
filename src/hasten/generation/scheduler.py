"""Continuous batching: sequences wait for slots, share every decode step, and leave one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hasten.backends import Decoder
from hasten.core.errors import InputError
from hasten.core.generation_types import GenerationSpec, SamplingParams
from hasten.core.tensors import IntArray
from hasten.core.text.tokenizer import Tokenizer
from hasten.generation.detokenizer import Detokenizer
from hasten.generation.sequences import BeamSearched, OnText, Sampled, SequenceState, TextSequence


class DecodeScheduler:
    """Runs many sequences on one decoder. One thread at a time may step and free; `row` and `add` are thread-safe."""

    def __init__(
        self, decoder: Decoder, spec: GenerationSpec, tokenizer: Tokenizer, *, prefills_per_step: int = 1
    ) -> None:
        """Set up the scheduler. Each step prefills at most `prefills_per_step` prompts: decodes wait for them."""
        self.spec = spec
        self.tokenizer = tokenizer
        self._decoder = decoder
        self._prefills_per_step = prefills_per_step
        self._free_slots = list(range(decoder.slots))
        self._waiting: deque[TextSequence] = deque()
        self._running: list[SequenceState] = []

    @property
    def waiting(self) -> int:
        """Return the number of sequences without slots."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Return the number of sequences with slots."""
        return len(self._running)

    @property
    def is_idle(self) -> bool:
        """Return whether there are no sequences."""
        return not self._waiting and not self._running

    def row(
        self, prompt: Sequence[int], sampling: SamplingParams, on_text: OnText, *, continues: bool = False
    ) -> TextSequence:
        """Return a new sequence after a prompt, limited to the rest of the context; `add` queues it.

        A sequence that continues its prompt may begin with the space between two words.
        """
        ids = np.asarray(prompt, np.int32)
        max_tokens = self._max_tokens(ids)
        if sampling.num_beams > (slots := self._decoder.slots):
            raise InputError(
                f"{sampling.num_beams} beams need as many slots, and there are {slots}", hint=f"num_beams={slots}"
            )
        detokenizer = Detokenizer(self.tokenizer, ids.tolist() if continues else ())
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, max_tokens))
        return TextSequence(ids, sampling, on_text, detokenizer)

    def add(self, sequence: TextSequence) -> None:
        """Queue a sequence."""
        self._waiting.append(sequence)

    def step(self) -> None:
        """Prefill waiting sequences while slots are free, then run one decode step for all running ones."""
        self.free()
        for _ in range(self._prefills_per_step):
            if not self._prefill_next():
                break
        if not self._running:
            return
        slots = [slot for state in self._running for slot in state.active_slots]
        logits = self._decoder.decode(slots, np.concatenate([state.next_ids for state in self._running]))
        start, failure = 0, None
        for state in self._running:
            count = len(state.active_slots)
            try:
                state.advance(logits[start : start + count], self._decoder)
            except Exception as error:
                state.sequence.cancel()  # only this sequence failed, as with a prompt that cannot be prefilled
                failure = error
            start += count
        self.free()
        if failure is not None:
            raise failure

    def free(self) -> None:
        """Free the slots of sequences that are over; every step does so too."""
        while self._waiting and self._waiting[0].is_cancelled:
            self._waiting.popleft()
        # Read once: a sequence may be cancelled by another thread meanwhile.
        is_over = [state.sequence.is_over for state in self._running]
        over = [state for state, ends in zip(self._running, is_over, strict=True) if ends]
        self._running = [state for state, ends in zip(self._running, is_over, strict=True) if not ends]
        for state in over:
            state.free(self._decoder)
            self._free_slots += state.slots

    def warm_up(self) -> None:
        """Prefill one token in a free slot, if there is one; an error means that the decoder does not work."""
        if self._free_slots:
            slot = self._free_slots[-1]
            self._decoder.prefill(slot, np.zeros(1, np.int32))
            self._decoder.free(slot)

    def clear(self) -> None:
        """Cancel every sequence, for example after a failure of the decoder."""
        while self._waiting:
            self._waiting.popleft().cancel()
        for state in self._running:
            state.sequence.cancel()
        self.free()

    def _prefill_next(self) -> bool:
        """Prefill the sequence that waited longest, if its slots are free; others do not overtake it."""
        if not self._waiting or len(self._free_slots) < self._waiting[0].sampling.num_beams:
            return False
        sequence = self._waiting.popleft()
        num_beams = sequence.sampling.num_beams
        state_type = Sampled if num_beams == 1 else BeamSearched
        state = state_type(sequence, self.spec, [self._free_slots.pop() for _ in range(num_beams)])
        self._running.append(state)
        try:
            state.prefill(self._decoder)
        except BaseException:
            sequence.cancel()
            raise
        finally:
            self.free()
        return True

    def _max_tokens(self, prompt: IntArray) -> int:
        """Return the number of tokens that the context leaves for an answer."""
        if not len(prompt):
            raise InputError("the prompt is empty: there is nothing to go on from")
        # Prompts of text were checked before; tokens, chats and tensors arrive here unchecked.
        if self.spec.decoder_start_token_ids and len(prompt) > (limit := self.tokenizer.spec.max_length):
            raise InputError(f"the prompt has {len(prompt)} tokens, and the model reads up to {limit}")
        context, used = self.spec.max_context, len(self.spec.decoder_start_token_ids) or len(prompt)
        if used >= context:
            raise InputError(
                f"the prompt has {used} tokens, and the model's context of {context} must hold the answer too",
                hint=f"use at most {context - 1} tokens of prompt",
            )
        return context - used
