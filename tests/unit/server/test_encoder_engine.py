"""The encoder engine: answers, batching, deadlines, failures, fairness and shutdown."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from hasten.backends import PaddedSession
from hasten.core.errors import (
    DeadlineError,
    InputError,
    OverloadedError,
    StageError,
    TooLargeError,
    UnavailableError,
)
from hasten.core.tensors import (
    BATCH,
    SEQUENCE,
    Batch,
    DType,
    Layout,
    Outputs,
    SessionSpec,
    Shape,
    Signature,
    TensorSpec,
)
from hasten.server.scheduling import encoder_engine
from hasten.server.scheduling.core_scheduler import CoreScheduler
from hasten.server.scheduling.encoder_engine import EncoderRequest, Engine, EngineObserver
from hasten.server.scheduling.lost_session import ReconnectingSession, SessionLostError
from hasten.server.scheduling.queue import Limits
from hasten.tasks import Encoded
from support.wait import wait_until

SIGNATURE = Signature(
    (TensorSpec("input_ids", DType.INT32, (BATCH, SEQUENCE)),),
    (
        TensorSpec("sum", DType.FLOAT32, (BATCH, 1)),
        TensorSpec("each", DType.FLOAT32, (BATCH, SEQUENCE, 1)),
    ),
    512,
)
POISON = 666
# The row with this token exceeds the memory limit.
TOO_LARGE = 667


class SummingSession(PaddedSession):
    """Returns the sum of each row and its tokens; the token POISON makes it fail, and the gate makes it wait."""

    def __init__(self) -> None:
        self.spec = SessionSpec(SIGNATURE, Layout.PADDED, "cpu", "fp32")
        self.batches: list[int] = []
        self.is_in = False
        self.gate = threading.Event()
        self.gate.set()
        self.is_broken = False
        self.has_memory = True

    def warm(self, shapes: Sequence[Shape]) -> None:
        if self.is_broken:
            raise StageError("the device does not answer")

    def run(self, batch: Batch) -> Outputs:
        self.is_in = True
        self.gate.wait()
        self.batches.append(len(batch))
        ids = batch.values["input_ids"]
        if not self.has_memory:
            raise OverloadedError("too little memory", retry_after_s=1.0)
        if POISON in ids:
            raise StageError("this row cannot be run")
        if TOO_LARGE in ids:
            raise TooLargeError("this row needs more memory than there is")
        ends = np.cumsum(batch.lengths)
        sums = [[ids[end - length : end].sum()] for end, length in zip(ends, batch.lengths, strict=True)]
        return {"sum": np.array(sums, np.float32), "each": ids[:, None].astype(np.float32)}


def encoded(rows: Sequence[Sequence[int]]) -> Encoded:
    batch = Batch.from_rows({"input_ids": rows})
    return Encoded(batch, np.arange(len(rows)), len(rows), (), ())


def is_running(engine: Engine) -> bool:
    return engine.stalled_for_s(time.monotonic()) > 0


class Submitted:
    """A submitted request and its answer."""

    def __init__(
        self,
        engine: Engine,
        rows: Sequence[Sequence[int]],
        decode: Callable[[Outputs, Encoded], Any] = lambda outputs, _: {k: v.tolist() for k, v in outputs.items()},
        **options: Any,
    ) -> None:
        self._done = threading.Event()
        self.answer: Any = None
        self.call_count = 0
        self.request: EncoderRequest[Any] = EncoderRequest(lambda: encoded(rows), decode, self._on_done, **options)
        engine.submit(self.request)

    @classmethod
    def when_free(cls, engine: Engine, rows: Sequence[Sequence[int]]) -> Submitted:
        """Submit a request as soon as it is not rejected."""
        submitted: list[Submitted] = []

        def is_accepted() -> bool:
            with suppress(OverloadedError):
                submitted.append(cls(engine, rows))
            return bool(submitted)

        wait_until(is_accepted)
        return submitted[0]

    def _on_done(self, answer: Any, stats: Any) -> None:
        self.call_count += 1
        self.answer, self.stats = answer, stats
        self._done.set()

    def wait(self) -> Any:
        assert self._done.wait(10), "no answer"
        assert self.call_count == 1
        return self.answer


@pytest.fixture
def session() -> SummingSession:
    return SummingSession()


@pytest.fixture
def engine(session: SummingSession) -> Iterator[Engine]:
    engine = Engine([session], Limits(requests=50), encoders=1)
    yield engine
    session.gate.set()
    engine.close()


def test_request_is_answered_with_outputs_and_stats(engine: Engine) -> None:
    sent = Submitted(engine, [[1, 2, 3], [10]])
    assert sent.wait() == {"sum": [[6.0], [10.0]], "each": [[1.0], [2.0], [3.0], [10.0]]}
    assert (sent.stats.rows, sent.stats.tokens) == (2, 4)


def test_concurrent_requests_get_their_own_outputs(engine: Engine, session: SummingSession) -> None:
    """Rows of all lengths are split over batches and gathered again."""
    session.gate.clear()
    generator = np.random.default_rng(0)
    rows = [[generator.integers(1, 99, generator.integers(1, 60)).tolist() for _ in range(3)] for _ in range(40)]
    sent = [Submitted(engine, each) for each in rows]
    wait_until(lambda: engine.waiting >= 39)  # the first may be running already
    session.gate.set()
    for request, each in zip(sent, rows, strict=True):
        answer = request.wait()
        assert [value for (value,) in answer["sum"]] == [float(sum(row)) for row in each]
        assert [value for (value,) in answer["each"]] == [float(token) for row in each for token in row]
    assert max(session.batches) > 3


def test_short_requests_received_together_run_in_one_batch(
    session: SummingSession, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_engine, "_MIN_GATHERED", 1)
    scheduled: list[Callable[[], None]] = []
    sent = [Submitted(engine, [[number]], call_soon=scheduled.append) for number in range(1, 41)]
    assert (engine.waiting, session.batches, len(scheduled)) == (40, [], 1)
    scheduled.pop()()
    assert [request.wait()["sum"] for request in sent] == [[[float(number)]] for number in range(1, 41)]
    assert session.batches == [40]


def test_full_batch_starts_before_all_short_requests_are_received(
    session: SummingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_engine, "_MIN_GATHERED", 3)
    engine = Engine([session], Limits(tokens_per_batch=4), encoders=1)
    session.gate.clear()
    # With few requests open none waits, not even for a call of the event loop.
    alone = Submitted(engine, [[1]], call_soon=pytest.fail)
    wait_until(lambda: is_running(engine))
    others = [Submitted(engine, [[2, 2]], call_soon=scheduled) for scheduled in (pytest.fail, lambda _: None)]
    session.gate.set()
    assert [request.wait()["sum"] for request in (alone, *others)] == [[[1.0]], [[4.0]], [[4.0]]]
    engine.close()


def test_answers_of_a_batch_are_decoded_in_parallel(session: SummingSession) -> None:
    """While another batch waits, one answer that is slow to decode does not delay the others."""
    engine, is_slow = Engine([session], Limits(rows_per_batch=4), encoders=2), threading.Event()
    session.gate.clear()
    first = Submitted(engine, [[1]])
    wait_until(lambda: is_running(engine))
    slow = Submitted(engine, [[2]], decode=lambda *_: is_slow.wait(10))
    wait_until(lambda: engine.waiting == 1)
    others = [Submitted(engine, [[3]]) for _ in range(4)]
    wait_until(lambda: engine.waiting == 5 and engine._pool.idle_encoders == 2)
    session.gate.set()
    assert first.wait()["sum"] == [[1.0]]
    wait_until(lambda: sum(other.call_count for other in others) >= 3)
    assert slow.call_count == 0
    is_slow.set()
    assert (slow.wait(), [other.wait()["sum"] for other in others]) == (True, [[[3.0]]] * 4)
    engine.close()


def test_failing_row_fails_only_its_request(engine: Engine, session: SummingSession) -> None:
    session.gate.clear()
    first = Submitted(engine, [[5, 5]])
    wait_until(lambda: is_running(engine))
    fine, broken, also_fine = (Submitted(engine, [row]) for row in ([1, 2], [POISON, 1], [3, 4]))
    session.gate.set()
    assert first.wait()["sum"] == [[10.0]]
    assert (fine.wait()["sum"], also_fine.wait()["sum"]) == ([[3.0]], [[7.0]])
    assert isinstance(broken.wait(), StageError)
    assert Submitted(engine, [[7]]).wait()["sum"] == [[7.0]]


def test_row_beyond_the_memory_limit_does_not_make_the_session_suspect(
    engine: Engine, session: SummingSession, caplog: pytest.LogCaptureFixture
) -> None:
    session.gate.clear()
    first = Submitted(engine, [[5, 5]])
    wait_until(lambda: is_running(engine))
    fine, large = Submitted(engine, [[1, 2]]), Submitted(engine, [[TOO_LARGE, 1]])
    # A session that is tried again would fail.
    session.is_broken = True
    session.gate.set()
    assert first.wait()["sum"] == [[10.0]]
    assert fine.wait()["sum"] == [[3.0]]
    assert isinstance(large.wait(), TooLargeError)
    assert not engine.is_recovering
    assert not caplog.records


def test_batch_without_memory_for_now_fails_as_a_whole(engine: Engine, session: SummingSession) -> None:
    """Each part of it would wait as long again."""
    session.gate.clear()
    first = Submitted(engine, [[5, 5]])
    wait_until(lambda: is_running(engine))
    session.has_memory = False
    others = [Submitted(engine, [[number]]) for number in range(1, 9)]
    wait_until(lambda: engine.waiting == 8)
    session.gate.set()
    assert all(isinstance(sent.wait(), OverloadedError) for sent in (first, *others))
    assert session.batches == [1, 8]
    assert not engine.is_recovering


def test_encode_and_decode_errors_fail_only_their_request(engine: Engine) -> None:
    done = threading.Event()
    answers: list[Any] = []

    def take(answer: Any, _: Any) -> None:
        answers.append(answer)
        done.set()

    def reject(*_: Any) -> Any:
        raise InputError("no text")

    def crash(*_: Any) -> Any:
        raise ZeroDivisionError

    for encode, decode in ((reject, dict), (crash, dict), (lambda: encoded([[1]]), crash)):
        done.clear()
        engine.submit(EncoderRequest(encode, decode, take))
        assert done.wait(10)
    assert [type(answer) for answer in answers] == [InputError, StageError, StageError]
    assert Submitted(engine, [[7]]).wait()["sum"] == [[7.0]]


def test_requests_beyond_the_limit_are_rejected(engine: Engine, session: SummingSession) -> None:
    session.gate.clear()
    sent = [Submitted(engine, [[1]]) for _ in range(50)]
    with pytest.raises(OverloadedError):
        Submitted(engine, [[1]])
    session.gate.set()
    assert all(request.wait()["sum"] == [[1.0]] for request in sent)
    assert Submitted(engine, [[2]]).wait()["sum"] == [[2.0]]


def test_deadline_passes_in_the_queue(engine: Engine, session: SummingSession) -> None:
    session.gate.clear()
    first = Submitted(engine, [[1]])
    wait_until(lambda: is_running(engine))
    deadline = time.monotonic() + 0.01
    late = Submitted(engine, [[2]], deadline=deadline)
    wait_until(lambda: time.monotonic() > deadline)
    session.gate.set()
    assert first.wait()["sum"] == [[1.0]]
    assert isinstance(late.wait(), DeadlineError)


def test_deadline_is_enforced_while_no_session_is_free(engine: Engine, session: SummingSession) -> None:
    session.gate.clear()
    first = Submitted(engine, [[1]])
    wait_until(lambda: is_running(engine))
    deadline = time.monotonic() + 60
    late, later = (Submitted(engine, [[2]], deadline=deadline + more) for more in (0, 1))
    wait_until(lambda: engine.waiting == 2)
    engine.expire(deadline - 1)
    assert engine.waiting == 2
    engine.expire(deadline + 0.5)
    assert isinstance(late.wait(), DeadlineError)
    assert (engine.waiting, later.call_count, first.call_count) == (1, 0, 0)
    session.gate.set()
    assert (first.wait()["sum"], later.wait()["sum"]) == ([[1.0]], [[2.0]])


def test_cancelled_request_frees_its_room_at_once(session: SummingSession) -> None:
    engine = Engine([session], Limits(requests=2), encoders=1)
    session.gate.clear()
    first = Submitted(engine, [[1]])
    wait_until(lambda: is_running(engine))
    cancelled = Submitted(engine, [[2, 2]])
    wait_until(lambda: engine.waiting == 1)
    with pytest.raises(OverloadedError):
        Submitted(engine, [[3]])
    engine.cancel(cancelled.request)
    assert engine.waiting == 0
    third = Submitted(engine, [[3]])
    session.gate.set()
    assert (first.wait()["sum"], third.wait()["sum"], cancelled.call_count) == ([[1.0]], [[3.0]], 0)
    assert engine.drain(5)
    engine.close()


def test_cancelled_request_is_neither_run_nor_answered(engine: Engine, session: SummingSession) -> None:
    session.gate.clear()
    first = Submitted(engine, [[1]])
    wait_until(lambda: is_running(engine))
    cancelled = Submitted(engine, [[2, 2, 2]] * 5)
    wait_until(lambda: engine.waiting == 1)
    engine.cancel(cancelled.request)
    session.gate.set()
    first.wait()
    assert engine.drain(5)
    assert cancelled.answer is None
    assert session.batches == [1]


def test_stalled_session_is_detected(engine: Engine, session: SummingSession) -> None:
    assert engine.stalled_for_s(time.monotonic()) == 0.0
    session.gate.clear()
    sent = Submitted(engine, [[1]])
    wait_until(lambda: engine.stalled_for_s(time.monotonic()) > 0.05)
    session.gate.set()
    sent.wait()


def test_stall_of_a_long_batch_begins_after_the_time_of_its_tokens(engine: Engine, session: SummingSession) -> None:
    session.gate.clear()
    sent = Submitted(engine, [[1] * 20_000])
    began = wait_until(lambda: engine._workers[0].busy_since)
    assert engine.stalled_for_s(began + 600) == 0  # as long as 30 ms per token take
    assert engine.stalled_for_s(began + 60_000) > 0
    session.gate.set()
    sent.wait()
    # Once the speed is known, a session that hangs is found soon.
    wait_until(lambda: engine._timed_tokens > 0)
    session.gate.clear()
    sent = Submitted(engine, [[1] * 1000])
    began = wait_until(lambda: engine._workers[0].allowed_until and engine._workers[0].busy_since)
    assert engine.stalled_for_s(began + 600) > 0
    session.gate.set()
    sent.wait()


def test_batch_that_waits_for_the_cores_of_a_long_run_is_not_stalled(session: SummingSession) -> None:
    cores = CoreScheduler(1)
    other = cores.join()
    engine = Engine([session], Limits(), encoders=1, share=cores.join())
    now = time.monotonic()
    with other.turn(1000, allowed_s=600):
        sent = Submitted(engine, [[1]])
        wait_until(lambda: engine._workers[0].busy_since is not None)
        assert engine.stalled_for_s(now + 500) == 0
        assert engine.stalled_for_s(now + 700) > 0
    sent.wait()
    engine.close()


def test_drain_answers_open_requests_and_rejects_new_ones(engine: Engine, session: SummingSession) -> None:
    session.gate.clear()
    sent = [Submitted(engine, [[index]]) for index in range(20)]
    assert not engine.drain(0.05)
    with pytest.raises(UnavailableError):
        Submitted(engine, [[1]])
    session.gate.set()
    assert engine.drain(5)
    assert [request.wait()["sum"] for request in sent] == [[[float(index)]] for index in range(20)]


def test_batch_delay_fills_the_batch(session: SummingSession) -> None:
    engine = Engine([session], Limits(), encoders=1, max_batch_delay_s=1.0)
    sent = [Submitted(engine, [[index]]) for index in range(5)]
    assert [request.wait()["sum"] for request in sent] == [[[float(index)]] for index in range(5)]
    assert session.batches == [5]
    engine.close()


def test_least_served_model_runs_next() -> None:
    scheduler = CoreScheduler(1)
    greedy, modest = scheduler.join(), scheduler.join()
    order: list[str] = []
    gate = threading.Event()

    def take(name: str, tokens: int, share: Any) -> None:
        with share.turn(tokens):
            order.append(name)
            gate.wait(10)

    threads = [threading.Thread(target=take, args=["greedy", 1000, greedy]) for _ in range(4)]
    threads += [threading.Thread(target=take, args=["modest", 10, modest]) for _ in range(3)]
    threads[0].start()
    wait_until(lambda: order == ["greedy"])
    for thread in threads[1:]:
        thread.start()
    wait_until(lambda: greedy.waiting + modest.waiting == 6)
    gate.set()
    for thread in threads:
        thread.join()
    assert order == ["greedy", "modest", "modest", "modest", "greedy", "greedy", "greedy"]


def test_idle_model_earns_no_credit() -> None:
    scheduler = CoreScheduler(1)
    busy, idle = scheduler.join(), scheduler.join()
    order: list[str] = []
    for _ in range(100):
        with busy.turn(1000):
            pass
    gate = threading.Event()

    def take(name: str, share: Any) -> None:
        with share.turn(1000):
            order.append(name)
            gate.wait(10)

    threads = [threading.Thread(target=take, args=["busy", busy]) for _ in range(5)]
    threads += [threading.Thread(target=take, args=["idle", idle]) for _ in range(5)]
    threads[0].start()
    wait_until(lambda: order == ["busy"])
    for thread in threads[1:]:
        thread.start()
    wait_until(lambda: busy.waiting + idle.waiting == 9)
    gate.set()
    for thread in threads:
        thread.join()
    assert order[:6].count("busy") >= 3


def test_sessions_of_one_model_run_in_parallel() -> None:
    sessions = [SummingSession(), SummingSession()]
    for session in sessions:
        session.gate.clear()
    engine = Engine(sessions, Limits(tokens_per_batch=1), encoders=1, share=CoreScheduler(2).join())
    sent = [Submitted(engine, [[1]]), Submitted(engine, [[2]])]
    wait_until(lambda: all(session.is_in for session in sessions))
    for session in sessions:
        session.gate.set()
    assert [request.wait()["sum"] for request in sent] == [[[1.0]], [[2.0]]]
    engine.close()


@pytest.fixture
def narrow(session: SummingSession) -> Iterator[Engine]:
    """A batch holds one row of two tokens; one request at a time."""
    engine = Engine([session], Limits(requests=1, tokens_per_batch=2), encoders=1)
    yield engine
    session.gate.set()
    engine.close()


def test_partly_failed_request_is_answered_once(narrow: Engine, session: SummingSession) -> None:
    for token in range(3):
        rows = [[1, token], [POISON, 1], [2, 2], [POISON, 2], [3, 3]]
        sent = Submitted.when_free(narrow, rows)
        assert isinstance(sent.wait(), StageError)
        wait_until(lambda: narrow.waiting == 0)
        sent.wait()
    # Each was released once: there is room for exactly one request.
    session.gate.clear()
    sent = Submitted.when_free(narrow, [[7]])
    with pytest.raises(OverloadedError):
        Submitted(narrow, [[8]])
    session.gate.set()
    assert sent.wait()["sum"] == [[7.0]]
    assert narrow.drain(5)


def test_deadline_passes_between_two_batches_of_a_request(narrow: Engine, session: SummingSession) -> None:
    session.gate.clear()
    deadline = time.monotonic() + 0.05
    sent = Submitted(narrow, [[POISON, 1], [2, 2], [3, 3]], deadline=deadline)
    wait_until(lambda: is_running(narrow) and time.monotonic() > deadline)
    session.gate.set()
    assert isinstance(sent.wait(), StageError | DeadlineError)
    assert narrow.drain(5)
    assert session.batches == [1]


def test_request_is_cancelled_while_its_rows_run(narrow: Engine, session: SummingSession) -> None:
    session.gate.clear()
    cancelled = Submitted(narrow, [[1, 1], [2, 2], [3, 3]])
    wait_until(lambda: is_running(narrow))
    narrow.cancel(cancelled.request)
    session.gate.set()
    wait_until(lambda: narrow.waiting == 0)
    assert Submitted.when_free(narrow, [[7]]).wait()["sum"] == [[7.0]]
    assert (cancelled.answer, session.batches) == (None, [1, 1])


def test_request_is_cancelled_while_it_is_tokenized(engine: Engine, session: SummingSession) -> None:
    started, go_on = threading.Event(), threading.Event()
    answers: list[Any] = []

    def encode() -> Encoded:
        started.set()
        go_on.wait(10)
        return encoded([[1]])

    request: EncoderRequest[Any] = EncoderRequest(encode, lambda *_: None, lambda answer, _: answers.append(answer))
    engine.submit(request)
    assert started.wait(10)
    engine.cancel(request)
    go_on.set()
    assert engine.drain(5)
    assert (answers, session.batches) == ([], [])


def test_failed_batch_is_bisected(engine: Engine, session: SummingSession) -> None:
    session.gate.clear()
    first = Submitted(engine, [[5, 5]])
    wait_until(lambda: is_running(engine))
    rows = [[index, 1] for index in range(32)]
    rows[11] = [POISON, 1]
    sent = [Submitted(engine, [row]) for row in rows]
    wait_until(lambda: engine.waiting == 32)
    session.gate.set()
    first.wait()
    for row, request in zip(rows, sent, strict=True):
        answer = request.wait()
        assert isinstance(answer, StageError) if POISON in row else answer["sum"] == [[float(sum(row))]]
    # Bisection takes eleven batches; one by one it would take 33.
    assert len(session.batches) <= 14


class TruncatingSession(SummingSession):
    """Omits the last row of each output."""

    def run(self, batch: Batch) -> Outputs:
        return {name: value[:-1] for name, value in super().run(batch).items()}


def test_engine_survives_outputs_of_the_wrong_size() -> None:
    engine = Engine([TruncatingSession()], Limits(tokens_per_batch=2), encoders=1)
    for _ in range(3):
        assert isinstance(Submitted(engine, [[1, 1], [2, 2]]).wait(), StageError)
    assert engine.drain(5)
    engine.close()


def test_engine_survives_failing_callbacks_and_observers(session: SummingSession) -> None:
    class FailingObserver(EngineObserver):
        def on_batch(self, job: Any, seconds: float) -> None:
            raise ZeroDivisionError

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    engine = Engine([session], Limits(), encoders=1, observer=FailingObserver())
    for _ in range(3):
        engine.submit(EncoderRequest(lambda: encoded([[1]]), lambda *_: None, fail))
    assert Submitted(engine, [[7]]).wait()["sum"] == [[7.0]]
    assert engine.drain(5)
    engine.close()


@pytest.mark.parametrize("rows", [[], [[1], []]])
def test_input_without_tokens_is_rejected(engine: Engine, rows: list[list[int]]) -> None:
    assert isinstance(Submitted(engine, rows).wait(), InputError)
    assert engine.drain(5)


def test_broken_session_fails_its_batch_at_once_and_is_reported(engine: Engine, session: SummingSession) -> None:
    session.gate.clear()
    sent = [Submitted(engine, [[POISON]])]
    wait_until(lambda: session.is_in)
    sent += [Submitted(engine, [[POISON]]) for _ in range(8)]
    wait_until(lambda: engine.waiting >= 8)
    session.is_broken = True
    session.gate.set()
    assert all(isinstance(each.wait(), StageError) for each in sent)
    # The batch of eight was not split: no request is at fault.
    assert session.batches == [1, 8]
    wait_until(lambda: engine.fault() == "every batch fails: the device does not answer")
    assert engine.is_recovering


def test_request_at_fault_does_not_make_its_engine_faulty(engine: Engine) -> None:
    for _ in range(5):
        assert isinstance(Submitted(engine, [[POISON]]).wait(), StageError)
    assert engine.fault() is None
    assert not engine.is_recovering


class LosableSession(ReconnectingSession):
    """A session whose process ends while it runs the token POISON, and whenever `ends` is set."""

    def __init__(self) -> None:
        self.spec = SessionSpec(SIGNATURE, Layout.PADDED, "cpu", "fp32")
        self.inner = SummingSession()
        self.ran: list[tuple[list[int], bool]] = []
        self.is_lost = False
        self.is_reachable = True
        self.was_running = True

    @property
    def load(self) -> int:
        return 0

    def run(self, batch: Batch) -> Outputs:
        return self._run(batch, is_alone=False)

    def run_alone(self, batch: Batch) -> Outputs:
        return self._run(batch, is_alone=True)

    def reconnect(self) -> bool:
        self.is_lost = not self.is_reachable
        return self.is_reachable

    def _run(self, batch: Batch, *, is_alone: bool) -> Outputs:
        self.inner.gate.wait()
        self.ran.append((batch.values["input_ids"].tolist(), is_alone))
        if self.is_lost or POISON in batch.values["input_ids"]:
            was_running, self.is_lost = not self.is_lost and self.was_running, True
            raise SessionLostError("the process has ended", was_running=was_running)
        return self.inner.run(batch)


@pytest.fixture
def losable() -> LosableSession:
    return LosableSession()


@pytest.fixture
def remote_engine(losable: LosableSession) -> Iterator[Engine]:
    engine = Engine([losable], Limits(requests=50), encoders=1)
    yield engine
    losable.inner.gate.set()
    engine.close()


def test_request_that_ends_its_process_twice_fails_alone(remote_engine: Engine, losable: LosableSession) -> None:
    losable.inner.gate.clear()
    first = Submitted(remote_engine, [[5]])
    wait_until(lambda: remote_engine._workers[0].busy_since)
    sent = [Submitted(remote_engine, [row]) for row in ([1, 2], [POISON, 1], [3, 4])]
    wait_until(lambda: remote_engine.waiting == 3)
    losable.inner.gate.set()
    assert first.wait()["sum"] == [[5.0]]
    fine, poison, also_fine = sent
    assert (fine.wait()["sum"], also_fine.wait()["sum"]) == ([[3.0]], [[7.0]])
    assert isinstance(poison.wait(), StageError)
    assert losable.ran == [
        ([5], False),
        ([1, 2, POISON, 1, 3, 4], False),
        ([1, 2], True),
        ([POISON, 1], True),
        ([3, 4], True),
    ]
    wait_until(lambda: not remote_engine.is_recovering)


def test_batch_that_had_not_started_is_not_suspected(remote_engine: Engine, losable: LosableSession) -> None:
    for _ in range(3):
        losable.is_lost = True
        assert Submitted(remote_engine, [[1, 2]]).wait()["sum"] == [[3.0]]
    assert not any(is_alone for _, is_alone in losable.ran)


def test_lost_session_is_awaited_while_deadlines_pass(remote_engine: Engine, losable: LosableSession) -> None:
    losable.is_lost, losable.is_reachable = True, False
    deadline = time.monotonic() + 60
    late, later = (Submitted(remote_engine, [[2]], deadline=deadline + more) for more in (0, 100))
    wait_until(lambda: remote_engine.is_recovering and remote_engine.waiting == 2)
    assert (remote_engine.fault(), remote_engine.stalled_for_s(deadline)) == (None, 0.0)
    remote_engine.expire(deadline + 1)
    assert isinstance(late.wait(), DeadlineError)
    assert later.call_count == 0
    losable.is_reachable = True
    assert later.wait()["sum"] == [[2.0]]
    wait_until(lambda: not remote_engine.is_recovering)


def test_engine_with_a_lost_session_closes(losable: LosableSession) -> None:
    engine = Engine([losable], Limits(), encoders=1)
    losable.is_lost, losable.is_reachable = True, False
    sent = Submitted(engine, [[2]])
    wait_until(lambda: engine.is_recovering)
    assert not engine.drain(0.01)
    engine.close()
    assert isinstance(sent.wait(), UnavailableError)
    assert not engine._workers[0].thread.is_alive()


def test_session_lost_after_the_engine_was_closed_ends_its_requests(losable: LosableSession) -> None:
    engine = Engine([losable], Limits(), encoders=1)
    losable.inner.gate.clear()
    sent = Submitted(engine, [[2]])
    wait_until(lambda: engine._workers[0].busy_since)
    closing = threading.Thread(target=engine.close)
    closing.start()
    wait_until(lambda: engine._is_aborted)
    losable.is_lost, losable.is_reachable = True, False
    losable.inner.gate.set()
    assert isinstance(sent.wait(), UnavailableError)
    closing.join()
    wait_until(lambda: not engine._workers[0].thread.is_alive())
