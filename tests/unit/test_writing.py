"""The loop that writes: who waits, who is stepped together, who leaves, and what it costs the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import writers
from hasten.core.errors import InputError, StageError
from hasten.core.generation import Finish, GenerationSpec, Sampling
from hasten.generation.rows import Piece, Row
from hasten.generation.writing import Writer

VOCABULARY = 300
END = 2
SPEC = GenerationSpec(writers.CONTEXT, VOCABULARY, (END,))


class Counting:
    """After a token comes the next one; a row ends after the token its prompt begins with. Fulfils `Decoder`."""

    def __init__(self, slots: int = 2) -> None:
        self.slots = slots
        self.rows: dict[int, list[int]] = {}
        self.log: list[tuple[str, tuple[int, ...]]] = []
        self.fails_at: str | None = None

    def begin(self, slot: int, ids: Any) -> Any:
        self.log.append(("begin", (slot,)))
        self._may_fail("begin")
        assert slot not in self.rows
        self.rows[slot] = [int(token) for token in ids]
        return self._logits(slot)

    def step(self, slots: Sequence[int], ids: Any) -> Any:
        self.log.append(("step", tuple(slots)))
        self._may_fail("step")
        for slot, token in zip(slots, ids, strict=True):
            self.rows[slot].append(int(token))
        return np.stack([self._logits(slot) for slot in slots])

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        before = {slot: list(row) for slot, row in self.rows.items()}
        for source, target in zip(sources, targets, strict=True):
            self.rows[target] = before[source]

    def end(self, slot: int) -> None:
        self.log.append(("end", (slot,)))
        del self.rows[slot]

    def close(self) -> None:
        self.rows.clear()

    def _may_fail(self, what: str) -> None:
        if self.fails_at == what:
            raise StageError("the runtime failed")

    def _logits(self, slot: int) -> Any:
        logits = np.zeros(VOCABULARY, np.float32)
        last = self.rows[slot][-1]
        logits[END if last == self.rows[slot][0] and len(self.rows[slot]) > 1 else last + 1] = 9
        return logits


def writer(decoder: Counting, spec: GenerationSpec = SPEC, **about: Any) -> Writer:
    return Writer(decoder, spec, writers.ours(writers.byte_level()), **about)


def added(loop: Writer, prompt: Sequence[int], max_tokens: int = 5, **about: Any) -> tuple[Row, list[Piece]]:
    told: list[Piece] = []
    row = loop.row(prompt, Sampling(max_tokens, **about), told.append)
    loop.add(row)
    return row, told


def done(loop: Writer) -> None:
    while not loop.is_idle:
        loop.step()


def test_a_row_ends_with_its_token_or_at_its_limit() -> None:
    loop = writer(Counting())
    stopped, told = added(loop, [43, 40], 9)
    cut, _ = added(loop, [99, 40], 9)
    done(loop)
    assert (stopped.ids, stopped.finish) == ([41, 42, 43], Finish.STOP)
    assert (cut.ids, cut.finish) == ([*range(41, 50)], Finish.LENGTH)
    assert [piece.finish for piece in told] == [None, None, None, Finish.STOP]


def test_rows_are_stepped_together_and_slots_are_used_again() -> None:
    decoder = Counting(slots=2)
    loop = writer(decoder)
    rows = [added(loop, [99, start], tokens)[0] for start, tokens in ((40, 6), (60, 2), (80, 3))]
    assert (loop.waiting, loop.running) == (3, 0)
    loop.step()
    assert (loop.waiting, loop.running) == (2, 1)
    done(loop)
    assert [row.ids for row in rows] == [[*range(41, 47)], [61, 62], [81, 82, 83]]
    assert decoder.rows == {}
    assert max(len(slots) for what, slots in decoder.log if what == "step") == 2


def test_one_prompt_is_read_between_two_steps() -> None:
    """So that those in progress wait for one, however many come."""
    decoder = Counting(slots=4)
    loop = writer(decoder)
    added(loop, [99, 40], 12)
    loop.step()
    for start in (60, 80, 100):
        added(loop, [200, start], 9)
    decoder.log.clear()
    done(loop)
    assert [what for what, _ in decoder.log[:6]] == ["begin", "step"] * 3
    assert "begin" not in [what for what, _ in decoder.log[6:]]


def test_many_prompts_a_step_where_nobody_waits_for_words() -> None:
    decoder = Counting(slots=4)
    loop = writer(decoder, prompts_a_step=4)
    for start in (40, 60, 80, 100, 120):
        added(loop, [200, start], 3)
    loop.step()
    assert [what for what, _ in decoder.log] == ["begin"] * 4 + ["step"]
    done(loop)


def test_a_text_of_one_token_takes_no_step() -> None:
    decoder = Counting()
    loop = writer(decoder)
    row, told = added(loop, [99, 40], 1)
    done(loop)
    assert [what for what, _ in decoder.log] == ["begin", "end"]
    assert row.ids == [41]
    assert told[-1].finish is Finish.LENGTH


def test_whoever_leaves_frees_the_slot_at_once() -> None:
    decoder = Counting(slots=1)
    loop = writer(decoder)
    leaving, told = added(loop, [99, 40], 20)
    waiting, _ = added(loop, [99, 60], 2)
    loop.step()
    loop.step()
    heard = len(told)
    leaving.cancel()
    decoder.log.clear()
    loop.step()
    # The slot was freed, and the next prompt read into it, before any other token was written.
    assert [what for what, _ in decoder.log] == ["end", "begin", "step", "end"]
    assert len(told) == heard
    assert leaving.finish is None
    assert waiting.finish is Finish.LENGTH


def test_whoever_leaves_while_waiting_is_never_begun() -> None:
    decoder = Counting(slots=1)
    loop = writer(decoder)
    added(loop, [99, 40], 3)
    gone, told = added(loop, [99, 60], 3)
    last, _ = added(loop, [99, 80], 3)
    gone.cancel()
    done(loop)
    assert [what for what, _ in decoder.log].count("begin") == 2
    assert told == []
    assert last.ids == [81, 82, 83]


def test_leaving_from_within_a_piece() -> None:
    decoder = Counting(slots=1)
    loop = writer(decoder)
    rows: list[Row] = []

    def told(_: Piece) -> None:
        rows[0].cancel()

    rows.append(loop.row([99, 40], Sampling(9), told))
    loop.add(rows[0])
    loop.step()
    assert decoder.rows == {}
    assert loop.is_idle


def test_beams_wait_for_all_their_slots_and_are_not_overtaken() -> None:
    decoder = Counting(slots=3)
    loop = writer(decoder)
    first, _ = added(loop, [99, 40], 6)
    search, _ = added(loop, [99, 60], 4, beams=3)
    behind, _ = added(loop, [99, 80], 2)
    for _ in range(3):
        loop.step()
    assert first.ids == [41, 42, 43, 44]
    assert behind.ids == []
    done(loop)
    assert search.ids[:1] == [61]
    assert behind.ids == [81, 82]
    assert decoder.rows == {}


def test_a_prompt_that_fails_leaves_the_others_their_slots() -> None:
    decoder = Counting(slots=2)
    loop = writer(decoder)
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


def test_clearing_drops_everybody() -> None:
    decoder = Counting(slots=1)
    loop = writer(decoder)
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


def test_the_context_limits_prompt_and_answer() -> None:
    loop = writer(Counting(), replace(SPEC, context=8))
    row, _ = added(loop, [99, 50, 40], 1000)
    done(loop)
    assert len(row.ids) == 5
    with pytest.raises(InputError, match="the prompt has 8 tokens, and the model's context of 8 must hold the answer"):
        loop.row([1] * 8, Sampling(), lambda _: None)
    with pytest.raises(InputError, match="the prompt is empty"):
        loop.row([], Sampling(), lambda _: None)


def test_where_an_encoder_reads_the_prompt_the_context_is_the_answers_own() -> None:
    loop = writer(Counting(), replace(SPEC, context=8, start_ids=(1,)))
    assert loop.row([5] * 40, Sampling(1000), lambda _: None).sampling.max_tokens == 7


def test_half_a_stop_string_at_the_limit_is_told() -> None:
    tokenizer = writers.ours(writers.byte_level())
    start = tokenizer.id_of("a")
    assert start is not None
    expected = "".join(tokenizer.token(start + place) for place in range(1, 4))
    loop = writer(Counting())
    _, told = added(loop, [299, start], 3, stop=(expected[-1] + "?",))
    done(loop)
    assert "".join(piece.text for piece in told) == expected
    _, told = added(loop, [299, start], 3, stop=(expected[1],))
    done(loop)
    assert told[-1].finish is Finish.STOP
    assert "".join(piece.text for piece in told) == expected[:1]
