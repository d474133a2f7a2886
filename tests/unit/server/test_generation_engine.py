"""The generation engine: continuous batching, cancellation, deadlines, failures and overload."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from hasten.core.errors import (
    DeadlineError,
    HastenError,
    OverloadedError,
    StageError,
    TooLargeError,
    UnavailableError,
)
from hasten.core.generation_types import Finish, GenerationSpec, SamplingParams
from hasten.core.text.tokenizer import Tokenizer
from hasten.generation.prefill_pace import PrefillPace
from hasten.generation.prompts import Prompt
from hasten.generation.scheduler import DecodeScheduler
from hasten.generation.sequences import TextDelta
from hasten.server.request_records import RequestStats
from hasten.server.scheduling.core_scheduler import CoreScheduler
from hasten.server.scheduling.engine_lifecycle import RetiredError
from hasten.server.scheduling.generation_engine import (
    GenerationEngine,
    GenerationJob,
    GenerationObserver,
    GenerationRequest,
    GenerationResult,
)
from hasten.server.scheduling.queue import Limits
from support.wait import wait_until

# A sequence that fills the context takes a second, which leaves time to act meanwhile.
VOCABULARY, POISON, CONTEXT = 26, 25, 20_000


class CountingDecoder:
    """Predicts the next higher token, cyclically, and records which slots take a step together."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.in_use: set[int] = set()
        self.steps: list[tuple[int, ...]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False
        self.is_broken = False
        self.is_closed = False

    def prefill(self, slot: int, ids: Any) -> Any:
        self.gate.wait()
        if self.is_broken:
            raise RuntimeError("the device does not answer")
        if POISON in ids:
            raise StageError("this prompt cannot be read")
        assert slot not in self.in_use
        self.in_use.add(slot)
        return _next_logits(ids[-1:])[0]

    def decode(self, slots: Sequence[int], ids: Any) -> Any:
        self.gate.wait()
        assert set(slots) <= self.in_use
        self.steps.append(tuple(slots))
        if self.fails:
            self.fails = False
            raise RuntimeError("the runtime failed")
        return _next_logits(ids)

    def fork(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        raise AssertionError

    def free(self, slot: int) -> None:
        self.in_use.remove(slot)

    def close(self) -> None:
        self.is_closed = True


def _next_logits(ids: Any) -> Any:
    return np.eye(VOCABULARY, dtype=np.float32)[(np.asarray(ids) + 1) % (VOCABULARY - 1)]


class Submitted:
    """A submitted request, its text deltas and its outcome."""

    def __init__(
        self,
        engine: GenerationEngine,
        *prompts: Sequence[int],
        tokens: int = 5,
        sampling: SamplingParams | None = None,
        **options: Any,
    ) -> None:
        self.deltas: list[tuple[int, TextDelta]] = []
        self.outcomes: list[Sequence[GenerationResult] | HastenError] = []
        self.stats: RequestStats | None = None
        self.is_done = threading.Event()
        params = sampling or SamplingParams(max_tokens=tokens)
        jobs = [GenerationJob(Prompt(list(ids), list(ids), True), params) for ids in prompts]
        self.request = GenerationRequest(lambda: jobs, self._on_delta, self._on_done, **options)
        engine.submit(self.request)

    def _on_delta(self, index: int, delta: TextDelta) -> None:
        self.deltas.append((index, delta))

    def _on_done(self, outcome: Sequence[GenerationResult] | HastenError, stats: RequestStats | None) -> None:
        self.outcomes.append(outcome)
        self.stats = stats
        self.is_done.set()

    def wait(self) -> Any:
        assert self.is_done.wait(20)
        (outcome,) = self.outcomes
        return outcome

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for other, delta in self.deltas if other == index)


@pytest.fixture
def engines(tokenizer: Tokenizer) -> Iterator[Callable[..., tuple[GenerationEngine, CountingDecoder]]]:
    engines: list[tuple[GenerationEngine, CountingDecoder]] = []

    def make(slots: int = 4, observer: Any = None, cores: CoreScheduler | None = None, **limits: Any) -> Any:
        decoder = CountingDecoder(slots)
        spec = GenerationSpec(CONTEXT, VOCABULARY, ())
        share = cores.join() if cores is not None else None
        pair = (DecodeScheduler(decoder, spec, tokenizer), decoder)
        engines.append((GenerationEngine([pair], Limits(**limits), share=share, observer=observer), decoder))
        return engines[-1]

    yield make
    for engine, decoder in engines:
        decoder.gate.set()
        if not decoder.is_closed:
            engine.close()
        assert (decoder.is_closed, decoder.in_use) == (True, set())


def test_batched_sequences_equal_those_generated_alone(engines: Any) -> None:
    engine, decoder = engines(slots=8)
    alone = []
    for start in range(4, 12):
        request = Submitted(engine, [start], tokens=20 + start)
        (result,) = request.wait()
        assert (result.finish, result.prompt_tokens, result.tokens) == (Finish.LENGTH, 1, 20 + start)
        alone.append(request.text())
    assert len(set(alone)) == 8
    decoder.gate.clear()
    together = [Submitted(engine, [start], tokens=20 + start) for start in range(4, 12)]
    wait_until(lambda: engine.waiting + engine.running == 8)
    decoder.gate.set()
    for request in together:
        request.wait()
    assert [request.text() for request in together] == alone
    assert max(map(len, decoder.steps)) == 8
    assert (engine.waiting, engine.running) == (0, 0)


def test_request_of_several_prompts_ends_when_all_sequences_end(engines: Any) -> None:
    engine, _ = engines(slots=2)
    request = Submitted(engine, [4], [10, 11], [5], tokens=3)
    results = request.wait()
    assert [(result.prompt_tokens, result.tokens) for result in results] == [(1, 3), (2, 3), (1, 3)]
    alone = Submitted(engine, [10, 11], tokens=3)
    alone.wait()
    assert request.text(1) == alone.text()
    assert [delta.finish for index, delta in request.deltas if index == 1][-1] is Finish.LENGTH
    assert request.stats is not None
    assert (request.stats.rows, request.stats.tokens) == (3, 4 + 9)


def test_cancelled_request_frees_its_slot_for_a_queued_one(engines: Any) -> None:
    engine, decoder = engines(slots=1)
    cancelled = Submitted(engine, [4], tokens=CONTEXT - 10)
    wait_until(lambda: bool(cancelled.deltas))
    waiting = Submitted(engine, [5], tokens=2)
    wait_until(lambda: engine.waiting == 1)
    decoder.gate.clear()
    wait_until(lambda: engine.stalled_for_s(time.monotonic()) > 0.05)
    count = len(cancelled.deltas)
    engine.cancel(cancelled.request)
    decoder.gate.set()
    assert waiting.wait()[0].tokens == 2
    # One step was running; no further step included it.
    assert len(cancelled.deltas) <= count + 1
    assert cancelled.outcomes == []
    assert engine.drain(5)


def test_cancelled_lone_request_frees_its_slot(engines: Any) -> None:
    engine, decoder = engines(slots=2)
    cancelled = Submitted(engine, [4], tokens=CONTEXT - 10)
    wait_until(lambda: bool(cancelled.deltas))
    engine.cancel(cancelled.request)
    wait_until(lambda: not decoder.in_use)
    engine.cancel(cancelled.request)
    assert (engine.running, cancelled.outcomes) == (0, [])


def test_cancelled_queued_request_frees_its_room(engines: Any) -> None:
    engine, decoder = engines(slots=1, requests=2)
    decoder.gate.clear()
    first = Submitted(engine, [4], tokens=2)
    second = Submitted(engine, [5], tokens=2)
    with pytest.raises(OverloadedError, match="open requests: 2; the limit is 2"):
        Submitted(engine, [6])
    engine.cancel(second.request)
    third = Submitted(engine, [6], tokens=2)
    decoder.gate.set()
    assert (first.wait()[0].tokens, third.wait()[0].tokens, second.outcomes) == (2, 2, [])


def test_request_that_would_wait_too_long_is_rejected_with_retry_after(engines: Any) -> None:
    engine, decoder = engines(slots=1, wait_s=1.0)
    Submitted(engine, [4], tokens=2).wait()
    engine._admission._unloaded_s = 3.0  # the duration of recent sequences
    Submitted(engine, [4], tokens=2).wait()  # a slot is free
    engine._admission._unloaded_s = 3.0
    decoder.gate.clear()
    first = Submitted(engine, [4], tokens=2)
    wait_until(lambda: engine.running == 1)
    with pytest.raises(OverloadedError) as rejected:
        Submitted(engine, [5])
    assert rejected.value.retry_after_s == pytest.approx(3.0)
    decoder.gate.set()
    first.wait()


def test_deadline_applies_to_queued_and_running_requests_but_not_to_started_streams(engines: Any) -> None:
    engine, decoder = engines(slots=1)
    soon = time.monotonic() + 0.1
    decoder.gate.clear()
    running = Submitted(engine, [4], tokens=100, deadline=soon)
    wait_until(lambda: engine.running == 1)
    waiting = Submitted(engine, [5], deadline=soon)
    stream = Submitted(engine, [6], deadline=soon, is_stream=True)
    wait_until(lambda: engine.waiting >= 2 and time.monotonic() > soon)
    engine.expire(time.monotonic())  # as the event loop does while the decoder is busy
    assert isinstance(waiting.wait(), DeadlineError)
    assert isinstance(stream.wait(), DeadlineError)
    assert not running.is_done.is_set()
    decoder.gate.set()
    assert isinstance(running.wait(), DeadlineError)
    started = Submitted(engine, [7], tokens=20, deadline=time.monotonic() + 0.2, is_stream=True)
    wait_until(lambda: bool(started.deltas))
    decoder.gate.clear()
    wait_until(lambda: time.monotonic() > started.request.deadline)  # type: ignore[operator]
    decoder.gate.set()
    assert started.wait()[0].tokens == 20


def test_prompt_that_exceeds_its_deadline_is_rejected_before_it_takes_a_slot(engines: Any) -> None:
    engine, decoder = engines(slots=1)
    # A slow decoder is one whose prefill was measured at a token per second.
    engine._workers[0].scheduler._pace = PrefillPace(1000.0)
    engine._workers[0].scheduler._pace.record(640, 640.0)
    engine._workers[0].scheduler._pace.chunk_tokens = 640
    decoder.gate.clear()
    soon = time.monotonic() + 100
    assert isinstance(Submitted(engine, [4] * 200, deadline=soon).wait(), TooLargeError)
    first = Submitted(engine, [4] * 90, tokens=2, deadline=soon)
    wait_until(lambda: engine.running == 1)
    assert isinstance(Submitted(engine, [4] * 90, deadline=soon).wait(), OverloadedError)
    decoder.gate.set()
    assert first.wait()[0].tokens == 2


def test_failing_prefill_fails_only_its_request(engines: Any) -> None:
    engine, decoder = engines(slots=4)
    decoder.gate.clear()
    good = [Submitted(engine, [start], tokens=4) for start in (4, 5)]
    bad = Submitted(engine, [3], [POISON], tokens=4)
    good.append(Submitted(engine, [6], tokens=4))
    decoder.gate.set()
    assert isinstance(bad.wait(), StageError)
    assert [request.wait()[0].tokens for request in good] == [4, 4, 4]
    assert bad.outcomes == [bad.outcomes[0]]


def test_failing_step_fails_running_requests_but_not_queued_ones(engines: Any) -> None:
    engine, decoder = engines(slots=2)
    running = [Submitted(engine, [start], tokens=CONTEXT - 10) for start in (4, 5)]
    wait_until(lambda: all(request.deltas for request in running))
    waiting = Submitted(engine, [6], tokens=3)
    wait_until(lambda: engine.waiting == 1)
    decoder.fails = True
    for request in running:
        assert isinstance(request.wait(), StageError)
    assert waiting.wait()[0].tokens == 3


def test_sequence_without_allowed_token_fails_only_its_request(engines: Any) -> None:
    engine, decoder = engines(slots=2)
    other = Submitted(engine, [4], tokens=15_000)
    wait_until(lambda: bool(decoder.steps))
    banned = tuple((4, token) for token in range(VOCABULARY))
    failed = Submitted(engine, [3], sampling=SamplingParams(temperature=1.0, top_k=1, min_p=0.5, bad_words_ids=banned))
    assert isinstance(failed.wait(), StageError)
    assert not other.is_done.is_set()
    assert len(other.wait()) == 1
    wait_until(lambda: not decoder.in_use)


def test_failing_callback_fails_only_its_request(engines: Any) -> None:
    engine, decoder = engines(slots=2)
    decoder.gate.clear()
    good = Submitted(engine, [4], tokens=4)
    bad = Submitted(engine, [5], tokens=4)

    def fail(_index: int, _delta: TextDelta) -> None:
        raise ValueError("the callback failed")

    bad.request.on_text_delta = fail
    decoder.gate.set()
    assert isinstance(bad.wait(), StageError)
    assert good.wait()[0].tokens == 4


def test_invalid_prompts_are_rejected(engines: Any) -> None:
    engine, _ = engines(slots=1)
    request = Submitted(engine, list(range(3)) * 7000)
    outcome = request.wait()
    assert "the prompt has 21000 tokens, and the model's context of 20000" in str(outcome)
    assert "the prompt is empty" in str(Submitted(engine, []).wait())


def test_drain_finishes_open_requests_and_rejects_new_ones(engines: Any) -> None:
    engine, decoder = engines(slots=1)
    decoder.gate.clear()
    requests = [Submitted(engine, [4], tokens=5), Submitted(engine, [5], tokens=5)]
    assert not engine.drain(0.05)
    with pytest.raises(RetiredError):
        Submitted(engine, [6])
    decoder.gate.set()
    assert engine.drain(5)
    assert [request.wait()[0].tokens for request in requests] == [5, 5]


def test_close_fails_open_requests(engines: Any) -> None:
    engine, decoder = engines(slots=1)
    requests = [Submitted(engine, [start], tokens=CONTEXT - 10) for start in (4, 5)]
    wait_until(lambda: bool(requests[0].deltas))
    engine.close()
    assert all(isinstance(request.wait(), UnavailableError) for request in requests)
    assert decoder.is_closed


def test_stalled_decoder_is_detected(engines: Any) -> None:
    engine, decoder = engines(slots=1)
    assert engine.stalled_for_s(time.monotonic()) == 0
    decoder.gate.clear()
    request = Submitted(engine, [4])
    wait_until(lambda: engine.stalled_for_s(time.monotonic()) > 0.1)
    decoder.gate.set()
    request.wait()
    wait_until(lambda: engine.stalled_for_s(time.monotonic()) == 0)


def test_other_models_get_cores_between_steps(engines: Any) -> None:
    cores = CoreScheduler(1)
    other = cores.join()
    engine, decoder = engines(slots=1, cores=cores)
    request = Submitted(engine, [4], tokens=CONTEXT - 10)
    wait_until(lambda: bool(request.deltas))
    decoder.gate.clear()
    wait_until(lambda: engine.stalled_for_s(time.monotonic()) > 0.02)
    taken: list[int] = []

    def take() -> None:
        with other.turn(512):
            taken.append(len(decoder.steps))

    thread = threading.Thread(target=take)
    thread.start()
    wait_until(lambda: other.waiting == 1)
    before = len(decoder.steps)
    decoder.gate.set()
    thread.join(20)
    # After the one step that was running.
    assert taken[0] - before <= 1
    engine.cancel(request.request)


class RecordingObserver(GenerationObserver):
    def __init__(self) -> None:
        self.started: list[float] = []
        self.rows: list[int] = []
        self.ended: list[GenerationResult] = []

    def on_first_token(self, seconds: float) -> None:
        self.started.append(seconds)

    def on_decode_step(self, rows: int, seconds: float) -> None:
        self.rows.append(rows)

    def on_finish(self, result: GenerationResult, seconds: float) -> None:
        self.ended.append(result)
        raise ValueError("the observer failed")


def test_observer_sees_starts_steps_and_ends(engines: Any) -> None:
    observer = RecordingObserver()
    engine, _ = engines(slots=2, observer=observer)
    Submitted(engine, [4], [5, 6], tokens=4).wait()
    wait_until(lambda: len(observer.ended) == 2)
    assert len(observer.started) == 2
    assert [result.prompt_tokens for result in observer.ended] == [1, 2]
    assert set(observer.rows) <= {1, 2}


def test_broken_decoder_is_reported(engines: Any) -> None:
    engine, decoder = engines()
    decoder.is_broken = True
    assert isinstance(Submitted(engine, [4]).wait(), StageError)
    wait_until(lambda: engine.is_recovering)
    wait_until(lambda: engine.fault() == "every batch fails: the device does not answer")


def test_prompt_at_fault_does_not_make_its_engine_faulty(engines: Any) -> None:
    engine, _ = engines(slots=2)
    running = Submitted(engine, [4], tokens=CONTEXT // 20)
    for _ in range(5):
        assert isinstance(Submitted(engine, [POISON]).wait(), StageError)
    assert running.wait()[0].tokens == CONTEXT // 20
    assert (engine.fault(), engine.is_recovering) == (None, False)
