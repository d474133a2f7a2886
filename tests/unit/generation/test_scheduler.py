"""Continuous batching: which sequences wait, share steps and leave, and the effect on the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hasten.core.errors import InputError, StageError
from hasten.core.generation_types import Finish, GenerationSpec, SamplingParams
from hasten.generation.prefill_pace import PrefillPace
from hasten.generation.scheduler import DecodeScheduler
from hasten.generation.sequences import TextDelta, TextSequence
from support.models import tiny_decoders

VOCABULARY = 300
END = 2
SPEC = GenerationSpec(tiny_decoders.CONTEXT, VOCABULARY, (END,))


class Counting:
    """A `Decoder` that counts up; a sequence ends after the token its prompt begins with."""

    def __init__(self, slots: int = 2) -> None:
        self.slots = slots
        self.rows: dict[int, list[int]] = {}
        self.log: list[tuple[str, tuple[int, ...]]] = []
        self.fails_at: str | None = None

    def prefill(self, slot: int, ids: Any) -> Any:
        self.log.append(("begin", (slot,)))
        self._may_fail("begin")
        assert slot not in self.rows
        self.rows[slot] = [int(token) for token in ids]
        return self._logits(slot)

    def decode(self, slots: Sequence[int], ids: Any) -> Any:
        self.log.append(("step", tuple(slots)))
        self._may_fail("step")
        for slot, token in zip(slots, ids, strict=True):
            self.rows[slot].append(int(token))
        return np.stack([self._logits(slot) for slot in slots])

    def fork(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        before = {slot: list(row) for slot, row in self.rows.items()}
        for source, target in zip(sources, targets, strict=True):
            self.rows[target] = before[source]

    def free(self, slot: int) -> None:
        self.log.append(("end", (slot,)))
        del self.rows[slot]

    def close(self) -> None:
        self.rows.clear()

    def _may_fail(self, call: str) -> None:
        if self.fails_at == call:
            raise StageError("the runtime failed")

    def _logits(self, slot: int) -> Any:
        logits = np.zeros(VOCABULARY, np.float32)
        last = self.rows[slot][-1]
        logits[END if last == self.rows[slot][0] and len(self.rows[slot]) > 1 else last + 1] = 9
        return logits


class Chunked(Counting):
    """Prefills in chunks and records the tokens of each, and the lengths that room was made for."""

    def __init__(self, slots: int = 2) -> None:
        super().__init__(slots)
        self.chunks: list[int] = []
        self.reserved: list[int] = []

    def reserve(self, tokens: int) -> None:
        self.reserved.append(tokens)

    def prefill(self, slot: int, ids: Any) -> Any:
        self.chunks.append(len(ids))
        return super().prefill(slot, ids)

    def extend(self, slot: int, ids: Any) -> Any:
        self.log.append(("extend", (slot,)))
        self._may_fail("extend")
        self.chunks.append(len(ids))
        self.rows[slot] += [int(token) for token in ids]
        return self._logits(slot)


# No chunk takes so long: each has twice the tokens of the one before, from 64 on.
DOUBLING = {"spec": replace(SPEC, max_context=1000), "prefill_target_s": 1e9}
LONG = [99, *[50] * 598, 60]


def make_scheduler(decoder: Counting, spec: GenerationSpec = SPEC, **fields: Any) -> DecodeScheduler:
    return DecodeScheduler(decoder, spec, tiny_decoders.ours(tiny_decoders.byte_level()), **fields)


def added(
    loop: DecodeScheduler, prompt: Sequence[int], max_tokens: int = 5, **fields: Any
) -> tuple[TextSequence, list[TextDelta]]:
    deltas: list[TextDelta] = []
    row = loop.new_sequence(prompt, SamplingParams(max_tokens, **fields), deltas.append)
    loop.add(row)
    return row, deltas


def done(loop: DecodeScheduler) -> None:
    while not loop.is_idle:
        loop.step()


def test_sequence_ends_at_eos_or_limit() -> None:
    loop = make_scheduler(Counting())
    stopped, deltas = added(loop, [43, 40], 9)
    cut, _ = added(loop, [99, 40], 9)
    done(loop)
    assert (stopped.ids, stopped.finish) == ([41, 42, 43], Finish.STOP)
    assert (cut.ids, cut.finish) == ([*range(41, 50)], Finish.LENGTH)
    assert [piece.finish for piece in deltas] == [None, None, None, Finish.STOP]


def test_sequences_share_steps_and_slots_are_reused() -> None:
    decoder = Counting(slots=2)
    loop = make_scheduler(decoder)
    rows = [added(loop, [99, start], tokens)[0] for start, tokens in ((40, 6), (60, 2), (80, 3))]
    assert (loop.waiting, loop.running) == (3, 0)
    loop.step()
    assert (loop.waiting, loop.running) == (2, 1)
    done(loop)
    assert [row.ids for row in rows] == [[*range(41, 47)], [61, 62], [81, 82, 83]]
    assert decoder.rows == {}
    assert max(len(slots) for call, slots in decoder.log if call == "step") == 2


def test_one_prefill_per_step_by_default() -> None:
    """Running sequences wait for one prefill at most, however many requests arrive."""
    decoder = Counting(slots=4)
    loop = make_scheduler(decoder)
    added(loop, [99, 40], 12)
    loop.step()
    for start in (60, 80, 100):
        added(loop, [200, start], 9)
    decoder.log.clear()
    done(loop)
    assert [call for call, _ in decoder.log[:6]] == ["begin", "step"] * 3
    assert "begin" not in [call for call, _ in decoder.log[6:]]


def test_several_prefills_per_step_when_configured() -> None:
    decoder = Counting(slots=4)
    loop = make_scheduler(decoder, prefills_per_step=4)
    for start in (40, 60, 80, 100, 120):
        added(loop, [200, start], 3)
    loop.step()
    assert [call for call, _ in decoder.log] == ["begin"] * 4 + ["step"]
    done(loop)


def test_long_prompt_is_prefilled_in_chunks_between_decode_steps() -> None:
    decoder = Chunked()
    loop = make_scheduler(decoder, **DOUBLING)
    first, _ = added(loop, [99, 40], 30)
    loop.step()
    decoder.log.clear()
    long, _ = added(loop, LONG, 5)
    done(loop)
    assert (first.ids, long.ids) == ([*range(41, 71)], [*range(61, 66)])
    assert decoder.chunks == [2, 64, 128, 256, 152]
    assert decoder.reserved == [len(LONG)]
    # The running sequence goes on after each chunk.
    assert [call for call, _ in decoder.log[:8]] == ["begin", "step", *["extend", "step"] * 3]
    assert decoder.rows == {}


def test_short_prompts_take_turns_with_a_long_one() -> None:
    loop = make_scheduler(Chunked(slots=3), **DOUBLING)
    long, _ = added(loop, LONG, 5)
    loop.step()
    short = [added(loop, [99, start], 2)[0] for start in (40, 80)]
    for _ in range(4):
        loop.step()
    assert [row.ids for row in short] == [[41, 42], [81, 82]]
    assert long.ids == []
    assert loop.prefill_backlog == 152
    assert (loop.running, loop.decoding) == (1, 0)
    done(loop)
    assert long.ids == [*range(61, 66)]


def test_sequence_cancelled_or_failed_during_its_prefill_frees_its_slot() -> None:
    decoder = Chunked(slots=1)
    loop = make_scheduler(decoder, **DOUBLING)
    gone, _ = added(loop, LONG, 5)
    loop.step()
    gone.cancel()
    failed, _ = added(loop, LONG, 5)
    loop.step()
    decoder.fails_at = "extend"
    with pytest.raises(StageError):
        loop.step()
    assert failed.is_over
    assert (loop.is_idle, decoder.rows) == (True, {})


def test_prefill_is_whole_without_a_target_or_with_an_encoder() -> None:
    for spec, fields in (
        (DOUBLING["spec"], {}),
        (replace(SPEC, decoder_start_token_ids=(1,), max_context=1000), {"prefill_target_s": 1e9}),
    ):
        decoder = Chunked()
        tokenizer = tiny_decoders.ours(tiny_decoders.byte_level(), max_length=1000)
        loop = DecodeScheduler(decoder, spec, tokenizer, **fields)
        added(loop, LONG, 2)
        loop.step()
        assert decoder.chunks == [len(LONG)]


def test_prefill_chunk_follows_the_measured_speed() -> None:
    pace = PrefillPace(0.1)
    pace.record(10, 9.0)  # the rest of a prompt
    assert (pace.chunk_tokens, pace.max_tokens_per_s) == (64, 0)
    for _ in range(12):
        pace.record(pace.chunk_tokens, pace.chunk_tokens / 4000)
    assert (pace.chunk_tokens, pace.max_tokens_per_s) == (256, pytest.approx(4000))
    for _ in range(12):
        pace.record(pace.chunk_tokens, pace.chunk_tokens / 300)
    # The speed is an upper bound: one slow moment does not lower it.
    assert (pace.chunk_tokens, pace.max_tokens_per_s) == (16, pytest.approx(4000))
    # A chunk may take as long as two decode steps do.
    for _ in range(30):
        pace.record_decode(0.25)
        pace.record(pace.chunk_tokens, pace.chunk_tokens / 300)
    assert pace.chunk_tokens == 128


def test_single_token_needs_no_decode_step() -> None:
    decoder = Counting()
    loop = make_scheduler(decoder)
    row, deltas = added(loop, [99, 40], 1)
    done(loop)
    assert [call for call, _ in decoder.log] == ["begin", "end"]
    assert row.ids == [41]
    assert deltas[-1].finish is Finish.LENGTH


def test_cancelled_sequence_frees_its_slot_at_once() -> None:
    decoder = Counting(slots=1)
    loop = make_scheduler(decoder)
    leaving, deltas = added(loop, [99, 40], 20)
    waiting, _ = added(loop, [99, 60], 2)
    loop.step()
    loop.step()
    heard = len(deltas)
    leaving.cancel()
    decoder.log.clear()
    loop.step()
    # The slot was freed, and the next prompt read into it, before any other token was written.
    assert [call for call, _ in decoder.log] == ["end", "begin", "step", "end"]
    assert len(deltas) == heard
    assert leaving.finish is None
    assert waiting.finish is Finish.LENGTH


def test_sequence_cancelled_while_waiting_is_never_prefilled() -> None:
    decoder = Counting(slots=1)
    loop = make_scheduler(decoder)
    added(loop, [99, 40], 3)
    gone, deltas = added(loop, [99, 60], 3)
    last, _ = added(loop, [99, 80], 3)
    gone.cancel()
    done(loop)
    assert [call for call, _ in decoder.log].count("begin") == 2
    assert deltas == []
    assert last.ids == [81, 82, 83]


def test_sequence_may_be_cancelled_from_its_callback() -> None:
    decoder = Counting(slots=1)
    loop = make_scheduler(decoder)
    rows: list[TextSequence] = []

    def deltas(_: TextDelta) -> None:
        rows[0].cancel()

    rows.append(loop.new_sequence([99, 40], SamplingParams(9), deltas))
    loop.add(rows[0])
    loop.step()
    assert decoder.rows == {}
    assert loop.is_idle


def test_beams_wait_for_all_their_slots_and_are_not_overtaken() -> None:
    decoder = Counting(slots=3)
    loop = make_scheduler(decoder)
    first, _ = added(loop, [99, 40], 6)
    search, _ = added(loop, [99, 60], 4, num_beams=3)
    behind, _ = added(loop, [99, 80], 2)
    for _ in range(3):
        loop.step()
    assert first.ids == [41, 42, 43, 44]
    assert behind.ids == []
    done(loop)
    assert search.ids[:1] == [61]
    assert behind.ids == [81, 82]
    assert decoder.rows == {}


def test_failed_prefill_does_not_affect_other_sequences() -> None:
    decoder = Counting(slots=2)
    loop = make_scheduler(decoder)
    first, _ = added(loop, [99, 40], 6)
    loop.step()
    failed, _ = added(loop, [99, 60], 6)
    decoder.fails_at = "begin"
    with pytest.raises(StageError):
        loop.step()
    decoder.fails_at = None
    assert failed.is_over
    both = [added(loop, [99, 80], 3)[0], first]
    done(loop)
    assert [row.ids for row in both] == [[81, 82, 83], [*range(41, 47)]]
    assert decoder.rows == {}


def test_clear_cancels_all_sequences() -> None:
    decoder = Counting(slots=1)
    loop = make_scheduler(decoder)
    rows = [added(loop, [99, 40], 6)[0], added(loop, [99, 60], 6)[0]]
    loop.step()
    decoder.fails_at = "step"
    with pytest.raises(StageError):
        loop.step()
    loop.clear()
    assert loop.is_idle
    assert all(row.is_cancelled for row in rows)
    assert decoder.rows == {}
    decoder.fails_at = None
    after, _ = added(loop, [99, 60], 2)
    done(loop)
    assert after.ids == [61, 62]


def test_context_limits_prompt_and_answer() -> None:
    loop = make_scheduler(Counting(), replace(SPEC, max_context=8))
    row, _ = added(loop, [99, 50, 40], 1000)
    done(loop)
    assert len(row.ids) == 5
    with pytest.raises(InputError, match="the prompt has 8 tokens, and the model's context of 8 must hold the answer"):
        loop.new_sequence([1] * 8, SamplingParams(), lambda _: None)
    with pytest.raises(InputError, match="the prompt is empty"):
        loop.new_sequence([], SamplingParams(), lambda _: None)


def test_context_limits_only_the_answer_with_an_encoder() -> None:
    loop = make_scheduler(Counting(), replace(SPEC, max_context=8, decoder_start_token_ids=(1,)))
    assert loop.new_sequence([5] * 40, SamplingParams(1000), lambda _: None).sampling.max_tokens == 7


def test_partial_stop_string_at_the_limit_is_emitted() -> None:
    tokenizer = tiny_decoders.ours(tiny_decoders.byte_level())
    start = tokenizer.id_of("a")
    assert start is not None
    expected = "".join(tokenizer.token(start + index) for index in range(1, 4))
    loop = make_scheduler(Counting())
    _, deltas = added(loop, [299, start], 3, stop=(expected[-1] + "?",))
    done(loop)
    assert "".join(piece.text for piece in deltas) == expected
    _, deltas = added(loop, [299, start], 3, stop=(expected[1],))
    done(loop)
    assert deltas[-1].finish is Finish.STOP
    assert "".join(piece.text for piece in deltas) == expected[:1]
