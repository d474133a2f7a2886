"""Continuous batching: sequences wait for slots, share every decode step, and leave one by one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hasten.backends import Decoder, SupportsChunkedPrefill
from hasten.core.errors import InputError
from hasten.core.generation_types import GenerationSpec, SamplingParams
from hasten.core.tensors import IntArray
from hasten.core.text.tokenizer import Tokenizer
from hasten.generation.detokenizer import Detokenizer
from hasten.generation.prefill_pace import PrefillPace
from hasten.generation.sequences import BeamSearched, OnText, Sampled, SequenceState, TextSequence


class DecodeScheduler:
    """Runs many sequences on one decoder.

    One thread at a time may step and free; `new_sequence` and `add` are thread-safe.
    """

    def __init__(
        self,
        decoder: Decoder,
        spec: GenerationSpec,
        tokenizer: Tokenizer,
        *,
        prefills_per_step: int = 1,
        prefill_target_s: float | None = None,
    ) -> None:
        """Set up the scheduler. Each step prefills at most `prefills_per_step` prompts: decodes wait for them.

        With `prefill_target_s`, a step prefills a chunk of a prompt that takes about this many seconds, if the decoder
        supports that; prompts take turns. A prompt that an encoder reads is always prefilled at once.
        """
        self.spec = spec
        self.tokenizer = tokenizer
        self._decoder = decoder
        self._prefills_per_step = prefills_per_step
        is_chunked = isinstance(decoder, SupportsChunkedPrefill) and not spec.decoder_start_token_ids
        self._pace = PrefillPace(prefill_target_s) if prefill_target_s is not None and is_chunked else None
        self._free_slots = list(range(decoder.slots))
        self._waiting: deque[TextSequence] = deque()
        self._prefilling: deque[SequenceState] = deque()
        self._decoding: list[SequenceState] = []

    @property
    def waiting(self) -> int:
        """Return the number of sequences without slots."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Return the number of sequences with slots."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def decoding(self) -> int:
        """Return the number of sequences whose prompt is prefilled."""
        return len(self._decoding)

    @property
    def prefill_backlog(self) -> int:
        """Return the number of prompt tokens to prefill. Thread-safe."""
        unfinished = sum(state.prompt_left for state in tuple(self._prefilling))
        return unfinished + sum(len(sequence.prompt) for sequence in tuple(self._waiting))

    @property
    def next_prefill_tokens(self) -> int:
        """Return the number of prompt tokens that one prefill of the next step takes, at most."""
        if self._prefilling:
            tokens = self._prefilling[0].prompt_left
        else:
            tokens = len(self._waiting[0].prompt) if self._waiting else 0
        return tokens if self._pace is None else min(tokens, self._pace.chunk_tokens)

    @property
    def max_prefill_tokens_per_s(self) -> float:
        """Return the highest prefill speed that was measured; 0 before, or without chunks."""
        return 0.0 if self._pace is None else self._pace.max_tokens_per_s

    @property
    def is_idle(self) -> bool:
        """Return whether there are no sequences."""
        return not self._waiting and not self.running

    def new_sequence(
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
        """Prefill a chunk of a prompt, or several, then run one decode step for all prefilled sequences."""
        self.free()
        for _ in range(self._prefills_per_step):
            if not self._prefill_next():
                break
        if not self._decoding:
            return
        slots = [slot for state in self._decoding for slot in state.active_slots]
        begin = time.perf_counter()
        logits = self._decoder.decode(slots, np.concatenate([state.next_ids for state in self._decoding]))
        if self._pace is not None:
            self._pace.record_decode(time.perf_counter() - begin)
        start, failure = 0, None
        for state in self._decoding:
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
        over = [state for state in (*self._prefilling, *self._decoding) if state.sequence.is_over]
        if not over:
            return
        self._prefilling = deque(state for state in self._prefilling if state not in over)
        self._decoding = [state for state in self._decoding if state not in over]
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
        for state in (*self._prefilling, *self._decoding):
            state.sequence.cancel()
        self.free()

    def _prefill_next(self) -> bool:
        """Prefill the next chunk of the sequence whose turn it is; return whether there was one."""
        self._assign_slots()
        if not self._prefilling:
            return False
        state = self._prefilling[0]
        try:
            begin = time.perf_counter()
            tokens = state.prefill(self._decoder, None if self._pace is None else self._pace.chunk_tokens)
            if self._pace is not None:
                self._pace.record(tokens, time.perf_counter() - begin)
        except BaseException:
            state.sequence.cancel()
            raise
        finally:
            if not state.prompt_left:
                self._decoding.append(state)
            # Only now: other threads count the sequences that hold slots.
            self._prefilling.popleft()
            if state.prompt_left:
                self._prefilling.append(state)
            self.free()
        return True

    def _assign_slots(self) -> None:
        """Give slots to the sequence that waited longest, if enough are free; others do not overtake it."""
        if self._waiting and len(self._free_slots) >= (num_beams := self._waiting[0].sampling.num_beams):
            state_type = Sampled if num_beams == 1 else BeamSearched
            slots = [self._free_slots.pop() for _ in range(num_beams)]
            self._prefilling.append(state_type(self._waiting.popleft(), self.spec, slots))

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
