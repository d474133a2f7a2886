"""The loop that writes: rows wait for slots, are written a token at a time all together, and leave one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hasten.backends import Decoder
from hasten.core.errors import InputError
from hasten.core.generation import GenerationSpec, Sampling
from hasten.core.tensors import IntArray
from hasten.core.tokenizer import Tokenizer
from hasten.generation.rows import Beams, Course, Row, Single, Told
from hasten.generation.text import Detokenizer


class Writer:
    """Writes for many rows with one decoder. One thread at a time steps and frees; rows may come from any."""

    def __init__(
        self, decoder: Decoder, spec: GenerationSpec, tokenizer: Tokenizer, *, prompts_a_step: int = 1
    ) -> None:
        """Reading a prompt takes as long as many tokens: rows in progress wait for so many between two of theirs."""
        self.spec = spec
        self.tokenizer = tokenizer
        self._decoder = decoder
        self._prompts_a_step = prompts_a_step
        self._free = list(range(decoder.slots))
        self._waiting: deque[Row] = deque()
        self._running: list[Course] = []

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._running

    def row(self, prompt: Sequence[int], sampling: Sampling, told: Told, *, continues: bool = False) -> Row:
        """A text to be written after a prompt, not more of it than the context holds; `add` has it begun.

        One that continues its prompt may begin with the space between two words.
        """
        ids = np.asarray(prompt, np.int32)
        room = self._room(ids)
        if sampling.beams > self._decoder.slots:
            slots = self._decoder.slots
            raise InputError(f"{sampling.beams} beams need as many slots, and there are {slots}", hint=f"beams={slots}")
        text = Detokenizer(self.tokenizer, ids.tolist() if continues else ())
        return Row(ids, replace(sampling, max_tokens=min(sampling.max_tokens, room)), told, text)

    def add(self, row: Row) -> None:
        self._waiting.append(row)

    def step(self) -> None:
        """Read a prompt if there is room, then write one token for everybody."""
        self.free()
        for _ in range(self._prompts_a_step):
            if not self._begin():
                break
        if not self._running:
            return
        slots = [slot for course in self._running for slot in course.stepped]
        logits = self._decoder.step(slots, np.concatenate([course.next_ids for course in self._running]))
        start, failed = 0, None
        for course in self._running:
            count = len(course.stepped)
            try:
                course.advance(logits[start : start + count], self._decoder)
            except Exception as error:
                course.row.cancel()  # its own fault, as where a prompt cannot be read: the others go on
                failed = error
            start += count
        self.free()
        if failed is not None:
            raise failed

    def free(self) -> None:
        """Free the slots of rows that are over; a step does it too."""
        while self._waiting and self._waiting[0].is_cancelled:
            self._waiting.popleft()
        # Asked once: a row may be cancelled meanwhile.
        is_over = [course.row.is_over for course in self._running]
        over = [course for course, ends in zip(self._running, is_over, strict=True) if ends]
        self._running = [course for course, ends in zip(self._running, is_over, strict=True) if not ends]
        for course in over:
            course.end(self._decoder)
            self._free += course.held

    def clear(self) -> None:
        """Cancel every row, as where the decoder failed."""
        while self._waiting:
            self._waiting.popleft().cancel()
        for course in self._running:
            course.row.cancel()
        self.free()

    def _begin(self) -> bool:
        """Read the prompt that waited longest, if its slots are free; those behind it do not overtake it."""
        if not self._waiting or len(self._free) < self._waiting[0].sampling.beams:
            return False
        row = self._waiting.popleft()
        kind = Single if row.sampling.beams == 1 else Beams
        course = kind(row, self.spec, [self._free.pop() for _ in range(row.sampling.beams)])
        self._running.append(course)
        try:
            course.begin(self._decoder)
        except BaseException:
            row.cancel()
            raise
        finally:
            self.free()
        return True

    def _room(self, prompt: IntArray) -> int:
        """Tokens that the context leaves for an answer."""
        if not len(prompt):
            raise InputError("the prompt is empty: there is nothing to go on from")
        # Texts are held against it before; tokens, chats and tensors come here as they are.
        if self.spec.start_ids and len(prompt) > (limit := self.tokenizer.spec.max_length):
            raise InputError(f"the prompt has {len(prompt)} tokens, and the model reads up to {limit}")
        context, read = self.spec.context, len(self.spec.start_ids) or len(prompt)
        if read >= context:
            raise InputError(
                f"the prompt has {read} tokens, and the model's context of {context} must hold the answer too",
                hint=f"at most {context - 1} tokens of prompt",
            )
        return context - read
