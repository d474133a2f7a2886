"""Texts on their way through the engine: slots that come free, requests that leave, fail, are late or too many."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from hasten.core.errors import DeadlineError, HastenError, OverloadedError, StageError, UnavailableError
from hasten.core.generation import Finish, GenerationSpec, Sampling
from hasten.core.tokenizer import Tokenizer
from hasten.generation.prompts import Prompt
from hasten.generation.rows import Piece
from hasten.generation.writing import Writer
from hasten.server.engine import Measured, RetiredError
from hasten.server.fairness import Turns
from hasten.server.queue import Limits
from hasten.server.writing import Asked, WritingEngine, WritingObserver, WritingRequest, Written

# A text that fills the context takes a second: long enough to do something meanwhile.
VOCABULARY, POISON, CONTEXT = 26, 25, 20_000


def until(condition: Callable[[], bool]) -> None:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < 20, "it did not come to that"
        time.sleep(0.002)


class Counting:
    """After a token comes the next one, after the last but one the first; which rows step together is written down."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.taken: set[int] = set()
        self.steps: list[tuple[int, ...]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False
        self.is_closed = False

    def begin(self, slot: int, ids: Any) -> Any:
        self.gate.wait()
        if POISON in ids:
            raise StageError("this prompt cannot be read")
        assert slot not in self.taken
        self.taken.add(slot)
        return _after(ids[-1:])[0]

    def step(self, slots: Sequence[int], ids: Any) -> Any:
        self.gate.wait()
        assert set(slots) <= self.taken
        self.steps.append(tuple(slots))
        if self.fails:
            self.fails = False
            raise RuntimeError("the runtime failed")
        return _after(ids)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        raise AssertionError

    def end(self, slot: int) -> None:
        self.taken.remove(slot)

    def close(self) -> None:
        self.is_closed = True


def _after(ids: Any) -> Any:
    return np.eye(VOCABULARY, dtype=np.float32)[(np.asarray(ids) + 1) % (VOCABULARY - 1)]


class Told:
    """What one request was told."""

    def __init__(
        self,
        engine: WritingEngine,
        *prompts: Sequence[int],
        tokens: int = 5,
        sampling: Sampling | None = None,
        **about: Any,
    ) -> None:
        self.pieces: list[tuple[int, Piece]] = []
        self.outcomes: list[Sequence[Written] | HastenError] = []
        self.measured: Measured | None = None
        self.is_done = threading.Event()
        how = sampling or Sampling(max_tokens=tokens)
        asked = [Asked(Prompt(list(ids), list(ids), True), how) for ids in prompts]
        self.request = WritingRequest(lambda: asked, self._piece, self._done, **about)
        engine.submit(self.request)

    def _piece(self, place: int, piece: Piece) -> None:
        self.pieces.append((place, piece))

    def _done(self, outcome: Sequence[Written] | HastenError, measured: Measured | None) -> None:
        self.outcomes.append(outcome)
        self.measured = measured
        self.is_done.set()

    def wait(self) -> Any:
        assert self.is_done.wait(20)
        (outcome,) = self.outcomes
        return outcome

    def text(self, place: int = 0) -> str:
        return "".join(piece.text for own, piece in self.pieces if own == place)


@pytest.fixture
def engines(tokenizer: Tokenizer) -> Iterator[Callable[..., tuple[WritingEngine, Counting]]]:
    made: list[tuple[WritingEngine, Counting]] = []

    def make(slots: int = 4, observer: Any = None, turns: Turns | None = None, **limits: Any) -> Any:
        decoder = Counting(slots)
        spec = GenerationSpec(CONTEXT, VOCABULARY, ())
        seat = turns.join() if turns is not None else None
        desk = (Writer(decoder, spec, tokenizer), decoder)
        made.append((WritingEngine([desk], Limits(**limits), seat=seat, observer=observer), decoder))
        return made[-1]

    yield make
    for engine, decoder in made:
        decoder.gate.set()
        if not decoder.is_closed:
            engine.close()
        assert (decoder.is_closed, decoder.taken) == (True, set())


def test_texts_are_written_together_and_each_as_if_alone(engines: Any) -> None:
    engine, decoder = engines(slots=8)
    alone = []
    for start in range(4, 12):
        told = Told(engine, [start], tokens=20 + start)
        (written,) = told.wait()
        assert (written.finish, written.prompt_tokens, written.tokens) == (Finish.LENGTH, 1, 20 + start)
        alone.append(told.text())
    assert len(set(alone)) == 8
    decoder.gate.clear()
    together = [Told(engine, [start], tokens=20 + start) for start in range(4, 12)]
    until(lambda: engine.waiting + engine.running == 8)
    decoder.gate.set()
    for told in together:
        told.wait()
    assert [told.text() for told in together] == alone
    assert max(map(len, decoder.steps)) == 8
    assert (engine.waiting, engine.running) == (0, 0)


def test_a_request_of_several_texts_is_done_when_all_are(engines: Any) -> None:
    engine, _ = engines(slots=2)
    told = Told(engine, [4], [10, 11], [5], tokens=3)
    written = told.wait()
    assert [(one.prompt_tokens, one.tokens) for one in written] == [(1, 3), (2, 3), (1, 3)]
    alone = Told(engine, [10, 11], tokens=3)
    alone.wait()
    assert told.text(1) == alone.text()
    assert [piece.finish for place, piece in told.pieces if place == 1][-1] is Finish.LENGTH
    assert told.measured is not None
    assert (told.measured.rows, told.measured.tokens) == (3, 4 + 9)


def test_who_leaves_frees_its_slot_for_who_waits(engines: Any) -> None:
    engine, decoder = engines(slots=1)
    leaving = Told(engine, [4], tokens=CONTEXT - 10)
    until(lambda: bool(leaving.pieces))
    waiting = Told(engine, [5], tokens=2)
    until(lambda: engine.waiting == 1)
    decoder.gate.clear()
    until(lambda: engine.hung_s(time.monotonic()) > 0.05)
    count = len(leaving.pieces)
    engine.cancel(leaving.request)
    decoder.gate.set()
    assert waiting.wait()[0].tokens == 2
    # One step was under way; none was taken for it after that.
    assert len(leaving.pieces) <= count + 1
    assert leaving.outcomes == []
    assert engine.drain(5)


def test_who_leaves_alone_leaves_nothing_behind(engines: Any) -> None:
    engine, decoder = engines(slots=2)
    leaving = Told(engine, [4], tokens=CONTEXT - 10)
    until(lambda: bool(leaving.pieces))
    engine.cancel(leaving.request)
    until(lambda: not decoder.taken)
    engine.cancel(leaving.request)
    assert (engine.running, leaving.outcomes) == (0, [])


def test_who_leaves_while_it_waits_makes_room(engines: Any) -> None:
    engine, decoder = engines(slots=1, requests=2)
    decoder.gate.clear()
    first = Told(engine, [4], tokens=2)
    second = Told(engine, [5], tokens=2)
    with pytest.raises(OverloadedError, match="2 requests are waiting"):
        Told(engine, [6])
    engine.cancel(second.request)
    third = Told(engine, [6], tokens=2)
    decoder.gate.set()
    assert (first.wait()[0].tokens, third.wait()[0].tokens, second.outcomes) == (2, 2, [])


def test_who_would_wait_too_long_is_told_when_to_come_again(engines: Any) -> None:
    engine, decoder = engines(slots=1, wait_s=1.0)
    Told(engine, [4], tokens=2).wait()
    engine._text_s = 3.0  # what a text has taken lately
    Told(engine, [4], tokens=2).wait()  # nobody is in its way
    engine._text_s = 3.0
    decoder.gate.clear()
    first = Told(engine, [4], tokens=2)
    until(lambda: engine.running == 1)
    with pytest.raises(OverloadedError) as refused:
        Told(engine, [5])
    assert refused.value.retry_after_s == pytest.approx(3.0)
    decoder.gate.set()
    first.wait()


def test_time_is_over_while_it_waits_while_it_runs_and_not_of_a_stream_that_has_begun(engines: Any) -> None:
    engine, decoder = engines(slots=1)
    soon = time.monotonic() + 0.1
    decoder.gate.clear()
    running = Told(engine, [4], tokens=100, deadline=soon)
    until(lambda: engine.hung_s(time.monotonic()) > 0)
    waiting = Told(engine, [5], deadline=soon)
    stream = Told(engine, [6], deadline=soon, is_stream=True)
    until(lambda: engine.waiting >= 2 and time.monotonic() > soon)
    engine.expire(time.monotonic())  # as the event loop does, whatever the decoder does
    assert isinstance(waiting.wait(), DeadlineError)
    assert isinstance(stream.wait(), DeadlineError)
    assert not running.is_done.is_set()
    decoder.gate.set()
    assert isinstance(running.wait(), DeadlineError)
    begun = Told(engine, [7], tokens=20, deadline=time.monotonic() + 0.2, is_stream=True)
    until(lambda: bool(begun.pieces))
    decoder.gate.clear()
    until(lambda: time.monotonic() > begun.request.deadline)  # type: ignore[operator]
    decoder.gate.set()
    assert begun.wait()[0].tokens == 20


def test_a_prompt_that_cannot_be_read_is_one_requests_own(engines: Any) -> None:
    engine, decoder = engines(slots=4)
    decoder.gate.clear()
    good = [Told(engine, [start], tokens=4) for start in (4, 5)]
    bad = Told(engine, [3], [POISON], tokens=4)
    good.append(Told(engine, [6], tokens=4))
    decoder.gate.set()
    assert isinstance(bad.wait(), StageError)
    assert [told.wait()[0].tokens for told in good] == [4, 4, 4]
    assert bad.outcomes == [bad.outcomes[0]]


def test_a_step_that_fails_takes_those_with_it_that_run_and_no_others(engines: Any) -> None:
    engine, decoder = engines(slots=2)
    running = [Told(engine, [start], tokens=CONTEXT - 10) for start in (4, 5)]
    until(lambda: all(told.pieces for told in running))
    waiting = Told(engine, [6], tokens=3)
    until(lambda: engine.waiting == 1)
    decoder.fails = True
    for told in running:
        assert isinstance(told.wait(), StageError)
    assert waiting.wait()[0].tokens == 3


def test_a_text_that_no_token_can_follow_is_one_requests_own(engines: Any) -> None:
    engine, decoder = engines(slots=2)
    other = Told(engine, [4], tokens=15_000)
    until(lambda: bool(decoder.steps))
    banned = tuple((4, token) for token in range(VOCABULARY))
    lost = Told(engine, [3], sampling=Sampling(temperature=1.0, top_k=1, min_p=0.5, bad_words_ids=banned))
    assert isinstance(lost.wait(), StageError)
    assert not other.is_done.is_set()
    assert len(other.wait()) == 1
    until(lambda: not decoder.taken)


def test_what_a_protocol_does_wrong_is_its_requests_own(engines: Any) -> None:
    engine, decoder = engines(slots=2)
    decoder.gate.clear()
    good = Told(engine, [4], tokens=4)
    bad = Told(engine, [5], tokens=4)

    def fail(_place: int, _piece: Piece) -> None:
        raise ValueError("it cannot be written down")

    bad.request.on_piece = fail
    decoder.gate.set()
    assert isinstance(bad.wait(), StageError)
    assert good.wait()[0].tokens == 4


def test_what_cannot_be_read_is_told(engines: Any) -> None:
    engine, _ = engines(slots=1)
    told = Told(engine, list(range(3)) * 7000)
    outcome = told.wait()
    assert "the prompt has 21000 tokens, and the model's context of 20000" in str(outcome)
    assert "the prompt is empty" in str(Told(engine, []).wait())


def test_draining_ends_what_was_begun_and_takes_no_more(engines: Any) -> None:
    engine, decoder = engines(slots=1)
    decoder.gate.clear()
    told = [Told(engine, [4], tokens=5), Told(engine, [5], tokens=5)]
    assert not engine.drain(0.05)
    with pytest.raises(RetiredError):
        Told(engine, [6])
    decoder.gate.set()
    assert engine.drain(5)
    assert [one.wait()[0].tokens for one in told] == [5, 5]


def test_closing_tells_those_it_leaves(engines: Any) -> None:
    engine, decoder = engines(slots=1)
    told = [Told(engine, [start], tokens=CONTEXT - 10) for start in (4, 5)]
    until(lambda: bool(told[0].pieces))
    engine.close()
    assert all(isinstance(one.wait(), UnavailableError) for one in told)
    assert decoder.is_closed


def test_a_model_that_hangs_is_seen(engines: Any) -> None:
    engine, decoder = engines(slots=1)
    assert engine.hung_s(time.monotonic()) == 0
    decoder.gate.clear()
    told = Told(engine, [4])
    until(lambda: engine.hung_s(time.monotonic()) > 0.1)
    decoder.gate.set()
    told.wait()
    until(lambda: engine.hung_s(time.monotonic()) == 0)


def test_another_model_gets_its_turns(engines: Any) -> None:
    turns = Turns(1)
    other = turns.join()
    engine, decoder = engines(slots=1, turns=turns)
    told = Told(engine, [4], tokens=CONTEXT - 10)
    until(lambda: bool(told.pieces))
    decoder.gate.clear()
    until(lambda: engine.hung_s(time.monotonic()) > 0.02)
    taken: list[int] = []

    def take() -> None:
        with other.turn(512):
            taken.append(len(decoder.steps))

    thread = threading.Thread(target=take)
    thread.start()
    until(lambda: other.waiting == 1)
    before = len(decoder.steps)
    decoder.gate.set()
    thread.join(20)
    # After the one step that was under way.
    assert taken[0] - before <= 1
    engine.cancel(told.request)


class Counts(WritingObserver):
    def __init__(self) -> None:
        self.begun: list[float] = []
        self.rows: list[int] = []
        self.ended: list[Written] = []

    def on_begin(self, seconds: float) -> None:
        self.begun.append(seconds)

    def on_step(self, rows: int, seconds: float) -> None:
        self.rows.append(rows)

    def on_end(self, written: Written, seconds: float) -> None:
        self.ended.append(written)
        raise ValueError("what counts fails, and nobody is worse for it")


def test_what_metrics_see(engines: Any) -> None:
    counts = Counts()
    engine, _ = engines(slots=2, observer=counts)
    Told(engine, [4], [5, 6], tokens=4).wait()
    until(lambda: len(counts.ended) == 2)
    assert len(counts.begun) == 2
    assert [one.prompt_tokens for one in counts.ended] == [1, 2]
    assert set(counts.rows) <= {1, 2}
