"""The engine's threads: who is answered with what, alone and in a crowd, and when something goes wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from hasten.backends import PaddedSession
from hasten.core.errors import DeadlineError, InputError, OverloadedError, StageError, UnavailableError
from hasten.core.tensors import BATCH, SEQUENCE, Batch, DType, Layout, Outputs, SessionSpec, Signature, TensorSpec
from hasten.server.engine import Engine, Observer, Request
from hasten.server.fairness import Turns
from hasten.server.queue import Limits
from hasten.tasks import Encoded

SIGNATURE = Signature(
    (TensorSpec("input_ids", DType.INT32, (BATCH, SEQUENCE)),),
    (
        TensorSpec("sum", DType.FLOAT32, (BATCH, 1)),
        TensorSpec("each", DType.FLOAT32, (BATCH, SEQUENCE, 1)),
    ),
    512,
)
POISON = 666


class Adding(PaddedSession):
    """Gives the sum of a row and its tokens back; one token makes it fail, another makes it slow."""

    def __init__(self) -> None:
        self.spec = SessionSpec(SIGNATURE, Layout.PADDED, "cpu", "fp32")
        self.batches: list[int] = []
        self.is_in = False
        self.gate = threading.Event()
        self.gate.set()

    def run(self, batch: Batch) -> Outputs:
        self.is_in = True
        self.gate.wait()
        self.batches.append(len(batch))
        ids = batch.values["input_ids"]
        if POISON in ids:
            raise StageError("this row cannot be run")
        ends = np.cumsum(batch.lengths)
        sums = [[ids[end - length : end].sum()] for end, length in zip(ends, batch.lengths, strict=True)]
        return {"sum": np.array(sums, np.float32), "each": ids[:, None].astype(np.float32)}


def encoded(rows: Sequence[Sequence[int]]) -> Encoded:
    batch = Batch.from_rows({"input_ids": rows})
    return Encoded(batch, np.arange(len(rows)), len(rows), (), ())


def until(condition: Callable[[], bool]) -> None:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < 10, "it did not come to that"
        time.sleep(0.001)


def is_running(engine: Engine) -> bool:
    return engine.hung_s(time.monotonic()) > 0


class Asked:
    """A request that waits for its answer."""

    def __init__(
        self,
        engine: Engine,
        rows: Sequence[Sequence[int]],
        decode: Callable[[Outputs, Encoded], Any] = lambda outputs, _: {k: v.tolist() for k, v in outputs.items()},
        **about: Any,
    ) -> None:
        self._done = threading.Event()
        self.answer: Any = None
        self.times = 0
        self.request: Request[Any] = Request(lambda: encoded(rows), decode, self._take, **about)
        engine.submit(self.request)

    @classmethod
    def when_free(cls, engine: Engine, rows: Sequence[Sequence[int]]) -> Asked:
        """As soon as it is not refused any more."""
        made: list[Asked] = []

        def is_taken() -> bool:
            with suppress(OverloadedError):
                made.append(cls(engine, rows))
            return bool(made)

        until(is_taken)
        return made[0]

    def _take(self, answer: Any, measured: Any) -> None:
        self.times += 1
        self.answer, self.measured = answer, measured
        self._done.set()

    def wait(self) -> Any:
        assert self._done.wait(10), "no answer"
        assert self.times == 1
        return self.answer


@pytest.fixture
def session() -> Adding:
    return Adding()


@pytest.fixture
def engine(session: Adding) -> Iterator[Engine]:
    made = Engine([session], Limits(requests=50), encoders=1)
    yield made
    session.gate.set()
    made.close()


def test_one_request(engine: Engine) -> None:
    asked = Asked(engine, [[1, 2, 3], [10]])
    assert asked.wait() == {"sum": [[6.0], [10.0]], "each": [[1.0], [2.0], [3.0], [10.0]]}
    assert (asked.measured.rows, asked.measured.tokens) == (2, 4)


def test_many_at_once_get_their_own(engine: Engine, session: Adding) -> None:
    """Rows of all lengths, split over batches and put together again."""
    session.gate.clear()
    generator = np.random.default_rng(0)
    rows = [[generator.integers(1, 99, generator.integers(1, 60)).tolist() for _ in range(3)] for _ in range(40)]
    asked = [Asked(engine, each) for each in rows]
    until(lambda: engine.waiting >= 39)  # the first may be running already
    session.gate.set()
    for own, each in zip(asked, rows, strict=True):
        answer = own.wait()
        assert [value for (value,) in answer["sum"]] == [float(sum(row)) for row in each]
        assert [value for (value,) in answer["each"]] == [float(token) for row in each for token in row]
    assert max(session.batches) > 3


def test_answers_of_a_batch_are_shared_out(session: Adding) -> None:
    """While more is to be run: not all of them wait for one that is slow to decode."""
    engine, is_slow = Engine([session], Limits(rows_per_batch=4), encoders=2), threading.Event()
    session.gate.clear()
    first = Asked(engine, [[1]])
    until(lambda: is_running(engine))
    slow = Asked(engine, [[2]], decode=lambda *_: is_slow.wait(10))
    until(lambda: engine.waiting == 1)
    others = [Asked(engine, [[3]]) for _ in range(4)]
    until(lambda: engine.waiting == 5 and engine._crew.idle_encoders == 2)
    session.gate.set()
    assert first.wait()["sum"] == [[1.0]]
    until(lambda: sum(other.times for other in others) >= 3)
    assert slow.times == 0
    is_slow.set()
    assert (slow.wait(), [other.wait()["sum"] for other in others]) == (True, [[[3.0]]] * 4)
    engine.close()


def test_a_row_that_fails_takes_nobody_with_it(engine: Engine, session: Adding) -> None:
    session.gate.clear()
    first = Asked(engine, [[5, 5]])
    until(lambda: is_running(engine))
    fine, broken, also_fine = (Asked(engine, [row]) for row in ([1, 2], [POISON, 1], [3, 4]))
    session.gate.set()
    assert first.wait()["sum"] == [[10.0]]
    assert (fine.wait()["sum"], also_fine.wait()["sum"]) == ([[3.0]], [[7.0]])
    assert isinstance(broken.wait(), StageError)
    assert Asked(engine, [[7]]).wait()["sum"] == [[7.0]]


def test_what_cannot_be_encoded_or_decoded_is_the_askers_own(engine: Engine) -> None:
    done = threading.Event()
    answers: list[Any] = []

    def take(answer: Any, _: Any) -> None:
        answers.append(answer)
        done.set()

    def refuse(*_: Any) -> Any:
        raise InputError("no text")

    def break_down(*_: Any) -> Any:
        raise ZeroDivisionError

    for encode, decode in ((refuse, dict), (break_down, dict), (lambda: encoded([[1]]), break_down)):
        done.clear()
        engine.submit(Request(encode, decode, take))
        assert done.wait(10)
    assert [type(answer) for answer in answers] == [InputError, StageError, StageError]
    assert Asked(engine, [[7]]).wait()["sum"] == [[7.0]]


def test_too_many_are_refused(engine: Engine, session: Adding) -> None:
    session.gate.clear()
    asked = [Asked(engine, [[1]]) for _ in range(50)]
    with pytest.raises(OverloadedError):
        Asked(engine, [[1]])
    session.gate.set()
    assert all(own.wait()["sum"] == [[1.0]] for own in asked)
    assert Asked(engine, [[2]]).wait()["sum"] == [[2.0]]


def test_a_deadline(engine: Engine, session: Adding) -> None:
    session.gate.clear()
    first = Asked(engine, [[1]])
    until(lambda: is_running(engine))
    deadline = time.monotonic() + 0.01
    late = Asked(engine, [[2]], deadline=deadline)
    until(lambda: time.monotonic() > deadline)
    session.gate.set()
    assert first.wait()["sum"] == [[1.0]]
    assert isinstance(late.wait(), DeadlineError)


def test_a_deadline_is_told_while_no_session_is_free(engine: Engine, session: Adding) -> None:
    session.gate.clear()
    first = Asked(engine, [[1]])
    until(lambda: is_running(engine))
    deadline = time.monotonic() + 60
    late, later = (Asked(engine, [[2]], deadline=deadline + more) for more in (0, 1))
    until(lambda: engine.waiting == 2)
    engine.expire(deadline - 1)
    assert engine.waiting == 2
    engine.expire(deadline + 0.5)
    assert isinstance(late.wait(), DeadlineError)
    assert (engine.waiting, later.times, first.times) == (1, 0, 0)
    session.gate.set()
    assert (first.wait()["sum"], later.wait()["sum"]) == ([[1.0]], [[2.0]])


def test_who_leaves_makes_room_at_once(session: Adding) -> None:
    engine = Engine([session], Limits(requests=2), encoders=1)
    session.gate.clear()
    first = Asked(engine, [[1]])
    until(lambda: is_running(engine))
    gone = Asked(engine, [[2, 2]])
    until(lambda: engine.waiting == 1)
    with pytest.raises(OverloadedError):
        Asked(engine, [[3]])
    engine.cancel(gone.request)
    assert engine.waiting == 0
    third = Asked(engine, [[3]])
    session.gate.set()
    assert (first.wait()["sum"], third.wait()["sum"], gone.times) == ([[1.0]], [[3.0]], 0)
    assert engine.drain(5)
    engine.close()


def test_who_leaves_is_not_answered_and_not_run(engine: Engine, session: Adding) -> None:
    session.gate.clear()
    first = Asked(engine, [[1]])
    until(lambda: is_running(engine))
    gone = Asked(engine, [[2, 2, 2]] * 5)
    until(lambda: engine.waiting == 1)
    engine.cancel(gone.request)
    session.gate.set()
    first.wait()
    assert engine.drain(5)
    assert gone.answer is None
    assert session.batches == [1]


def test_a_session_that_hangs_is_seen(engine: Engine, session: Adding) -> None:
    assert engine.hung_s(time.monotonic()) == 0.0
    session.gate.clear()
    asked = Asked(engine, [[1]])
    until(lambda: engine.hung_s(time.monotonic()) > 0.05)
    session.gate.set()
    asked.wait()


def test_draining_answers_all_and_takes_no_more(engine: Engine, session: Adding) -> None:
    session.gate.clear()
    asked = [Asked(engine, [[place]]) for place in range(20)]
    assert not engine.drain(0.05)
    with pytest.raises(UnavailableError):
        Asked(engine, [[1]])
    session.gate.set()
    assert engine.drain(5)
    assert [own.wait()["sum"] for own in asked] == [[[float(place)]] for place in range(20)]


def test_waiting_for_company(session: Adding) -> None:
    engine = Engine([session], Limits(), encoders=1, max_wait_s=1.0)
    asked = [Asked(engine, [[place]]) for place in range(5)]
    assert [own.wait()["sum"] for own in asked] == [[[float(place)]] for place in range(5)]
    assert session.batches == [5]
    engine.close()


def test_whoever_has_had_least_goes_next() -> None:
    turns = Turns(1)
    greedy, modest = turns.join(), turns.join()
    order: list[str] = []
    gate = threading.Event()

    def take(name: str, tokens: int, seat: Any) -> None:
        with seat.turn(tokens):
            order.append(name)
            gate.wait(10)

    threads = [threading.Thread(target=take, args=["greedy", 1000, greedy]) for _ in range(4)]
    threads += [threading.Thread(target=take, args=["modest", 10, modest]) for _ in range(3)]
    threads[0].start()
    until(lambda: order == ["greedy"])
    for thread in threads[1:]:
        thread.start()
    until(lambda: greedy.waiting + modest.waiting == 6)
    gate.set()
    for thread in threads:
        thread.join()
    assert order == ["greedy", "modest", "modest", "modest", "greedy", "greedy", "greedy"]


def test_whoever_was_idle_has_no_claim_on_what_it_did_not_want() -> None:
    turns = Turns(1)
    busy, idle = turns.join(), turns.join()
    order: list[str] = []
    for _ in range(100):
        with busy.turn(1000):
            pass
    gate = threading.Event()

    def take(name: str, seat: Any) -> None:
        with seat.turn(1000):
            order.append(name)
            gate.wait(10)

    threads = [threading.Thread(target=take, args=["busy", busy]) for _ in range(5)]
    threads += [threading.Thread(target=take, args=["idle", idle]) for _ in range(5)]
    threads[0].start()
    until(lambda: order == ["busy"])
    for thread in threads[1:]:
        thread.start()
    until(lambda: busy.waiting + idle.waiting == 9)
    gate.set()
    for thread in threads:
        thread.join()
    assert order[:6].count("busy") >= 3


def test_sessions_of_one_model_run_beside_each_other() -> None:
    sessions = [Adding(), Adding()]
    for session in sessions:
        session.gate.clear()
    engine = Engine(sessions, Limits(tokens_per_batch=1), encoders=1, seat=Turns(2).join())
    asked = [Asked(engine, [[1]]), Asked(engine, [[2]])]
    until(lambda: all(session.is_in for session in sessions))
    for session in sessions:
        session.gate.set()
    assert [own.wait()["sum"] for own in asked] == [[[1.0]], [[2.0]]]
    engine.close()


@pytest.fixture
def narrow(session: Adding) -> Iterator[Engine]:
    """A batch holds one row of two tokens; one request at a time."""
    made = Engine([session], Limits(requests=1, tokens_per_batch=2), encoders=1)
    yield made
    session.gate.set()
    made.close()


def test_a_request_that_fails_in_part_is_answered_once(narrow: Engine, session: Adding) -> None:
    for place in range(3):
        rows = [[1, place], [POISON, 1], [2, 2], [POISON, 2], [3, 3]]
        asked = Asked.when_free(narrow, rows)
        assert isinstance(asked.wait(), StageError)
        until(lambda: narrow.waiting == 0)
        asked.wait()
    # Counted down once each: there is room for one, and only for one.
    session.gate.clear()
    asked = Asked.when_free(narrow, [[7]])
    with pytest.raises(OverloadedError):
        Asked(narrow, [[8]])
    session.gate.set()
    assert asked.wait()["sum"] == [[7.0]]
    assert narrow.drain(5)


def test_a_deadline_between_two_batches_of_a_request(narrow: Engine, session: Adding) -> None:
    session.gate.clear()
    deadline = time.monotonic() + 0.05
    asked = Asked(narrow, [[POISON, 1], [2, 2], [3, 3]], deadline=deadline)
    until(lambda: is_running(narrow) and time.monotonic() > deadline)
    session.gate.set()
    assert isinstance(asked.wait(), StageError | DeadlineError)
    assert narrow.drain(5)
    assert session.batches == [1]


def test_a_client_that_leaves_while_its_rows_run(narrow: Engine, session: Adding) -> None:
    session.gate.clear()
    gone = Asked(narrow, [[1, 1], [2, 2], [3, 3]])
    until(lambda: is_running(narrow))
    narrow.cancel(gone.request)
    session.gate.set()
    until(lambda: narrow.waiting == 0)
    assert Asked.when_free(narrow, [[7]]).wait()["sum"] == [[7.0]]
    assert (gone.answer, session.batches) == (None, [1, 1])


def test_a_client_that_leaves_while_it_is_encoded(engine: Engine, session: Adding) -> None:
    begun, go_on = threading.Event(), threading.Event()
    answers: list[Any] = []

    def encode() -> Encoded:
        begun.set()
        go_on.wait(10)
        return encoded([[1]])

    request: Request[Any] = Request(encode, lambda *_: None, lambda answer, _: answers.append(answer))
    engine.submit(request)
    assert begun.wait(10)
    engine.cancel(request)
    go_on.set()
    assert engine.drain(5)
    assert (answers, session.batches) == ([], [])


def test_half_of_the_others_is_run_again_with_one_at_fault(engine: Engine, session: Adding) -> None:
    session.gate.clear()
    first = Asked(engine, [[5, 5]])
    until(lambda: is_running(engine))
    rows = [[place, 1] for place in range(32)]
    rows[11] = [POISON, 1]
    asked = [Asked(engine, [row]) for row in rows]
    until(lambda: engine.waiting == 32)
    session.gate.set()
    first.wait()
    for row, own in zip(rows, asked, strict=True):
        assert isinstance(own.wait(), StageError) if POISON in row else own.wait()["sum"] == [[float(sum(row))]]
    # By halves it takes eleven, one by one it would take 33.
    assert len(session.batches) <= 14


class Misfit(Adding):
    """Forgets a row."""

    def run(self, batch: Batch) -> Outputs:
        return {name: value[:-1] for name, value in super().run(batch).items()}


def test_outputs_that_do_not_fit_stop_nobody() -> None:
    engine = Engine([Misfit()], Limits(tokens_per_batch=2), encoders=1)
    for _ in range(3):
        assert isinstance(Asked(engine, [[1, 1], [2, 2]]).wait(), StageError)
    assert engine.drain(5)
    engine.close()


def test_those_who_watch_or_take_answers_may_fail(session: Adding) -> None:
    class Broken(Observer):
        def on_batch(self, job: Any, seconds: float) -> None:
            raise ZeroDivisionError

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    engine = Engine([session], Limits(), encoders=1, observer=Broken())
    for _ in range(3):
        engine.submit(Request(lambda: encoded([[1]]), lambda *_: None, fail))
    assert Asked(engine, [[7]]).wait()["sum"] == [[7.0]]
    assert engine.drain(5)
    engine.close()


@pytest.mark.parametrize("rows", [[], [[1], []]])
def test_nothing_to_run(engine: Engine, rows: list[list[int]]) -> None:
    assert isinstance(Asked(engine, rows).wait(), InputError)
    assert engine.drain(5)
