"""How many sessions are opened: what is measured, what is remembered, and how it is chosen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.backends import BACKENDS, Artifact, PaddedSession, RunOptions, run_until, uniform_batch
from hasten.core.errors import StageError
from hasten.core.hardware import Gpu, this_machine
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
from hasten.core.variant import Support, Variant
from hasten.server import instances
from hasten.server.fairness import Turns
from hasten.server.instances import choose_instances
from hasten.server.queue import Limits
from hasten.server.served import ModelSettings, _limits

SIGNATURE = Signature(
    (TensorSpec("input_ids", DType.INT32, (BATCH, SEQUENCE)),), (TensorSpec("sum", DType.FLOAT32, (BATCH, 1)),), 512
)
SHAPE = Shape(8, 128)


class Session(PaddedSession):
    def __init__(self, seconds: float) -> None:
        self.spec = SessionSpec(SIGNATURE, Layout.PADDED, "cpu", "fp32")
        self.is_closed = False
        self.seconds = seconds

    def run(self, batch: Batch) -> Outputs:
        time.sleep(self.seconds)
        return {"sum": np.zeros((len(batch), 1), np.float32)}

    def close(self) -> None:
        self.is_closed = True


class Sized(Session):
    most_tokens = 1000

    def rounded(self, tokens: int) -> int:
        return -(-tokens // 16) * 16

    def samples(self, tokens: int, rows: int) -> list[Batch]:
        return []


class Backend:
    """Takes as long as it is told for a number of threads, however many run beside it, up to so many."""

    name = "timed"

    def __init__(self, seconds: Callable[[int], float], kind: type[Session], most: int) -> None:
        self._seconds, self._kind, self._most = seconds, kind, most
        self.opened: list[Session] = []

    def probe(self, *_: object) -> Support:
        return Support.yes()

    def open(self, artifact: Artifact, options: RunOptions) -> Session:
        if sum(not session.is_closed for session in self.opened) == self._most:
            raise StageError("there is no memory left")
        self.opened.append(self._kind(self._seconds(options.thread_count)))
        return self.opened[-1]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Backend]]:
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    # What is chosen is tested, not how this machine sleeps: rates are those of the times that are told.
    monkeypatch.setattr(instances, "_rate", lambda sessions, batch: sum(len(batch) / one.seconds for one in sessions))

    def make(seconds: Callable[[int], float], cores: int = 4, kind: type[Session] = Session, most: int = 8) -> Backend:
        monkeypatch.setattr(instances, "usable_cores", lambda: cores)
        backend: Any = Backend(seconds, kind, most)
        BACKENDS.add("timed", backend)
        made: Backend = backend
        return made

    yield make
    BACKENDS._loaded.pop("timed", None)


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    folder = tmp_path / "variant"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(b"weights")
    return Artifact(Variant.parse("timed-fp32"), SIGNATURE, folder, {"model": "model.onnx"})


def test_more_sessions_where_threads_do_not_help(timed: Callable[..., Backend], artifact: Artifact) -> None:
    backend = timed(lambda _: 0.005)
    assert choose_instances(artifact, "digest", SHAPE) == 4
    assert len(backend.opened) == 1 + 2 + 4
    assert all(session.is_closed for session in backend.opened)


def test_one_session_where_threads_help_as_much(timed: Callable[..., Backend], artifact: Artifact) -> None:
    timed(lambda threads: 0.05 / threads)
    assert choose_instances(artifact, "digest", SHAPE) == 1


def test_it_stops_where_more_answer_less(timed: Callable[..., Backend], artifact: Artifact) -> None:
    backend = timed(lambda threads: 0.005 if threads == 8 else 0.05, cores=8)
    assert choose_instances(artifact, "digest", SHAPE) == 1
    assert len(backend.opened) == 1 + 2


def test_as_many_as_can_be_opened(timed: Callable[..., Backend], artifact: Artifact) -> None:
    backend = timed(lambda _: 0.005, most=3)
    assert choose_instances(artifact, "digest", SHAPE) == 2
    assert all(session.is_closed for session in backend.opened)
    timed(lambda _: 0.005, most=0)
    with pytest.raises(StageError, match="no memory left"):
        choose_instances(artifact, "of another bundle", SHAPE)


def test_rates_are_of_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "_MEASURE_S", 0.3)
    batch = uniform_batch(SHAPE, SIGNATURE)
    one, four = (instances._rate([Session(0.05) for _ in range(count)], batch) for count in (1, 4))
    assert one < 1.01 * len(batch) / 0.05
    assert four > 1.5 * one  # 4 on a machine with nothing else to do


def test_it_is_measured_once(timed: Callable[..., Backend], artifact: Artifact, tmp_path: Path) -> None:
    backend = timed(lambda _: 0.005, cores=2)
    assert choose_instances(artifact, "digest", SHAPE) == 2
    measured = len(backend.opened)
    assert choose_instances(artifact, "digest", SHAPE) == 2
    assert len(backend.opened) == measured
    choose_instances(artifact, "of another bundle", SHAPE)
    assert len(backend.opened) == 2 * measured
    for file in (tmp_path / "cache" / "instances").iterdir():
        for content in (b"{}", b"no JSON", b'{"1": "fast"}'):
            file.write_bytes(content)
            assert choose_instances(artifact, "digest", SHAPE) == 2


def test_nowhere_to_keep_it(
    timed: Callable[..., Backend], artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "file"))
    timed(lambda _: 0.005, cores=2)
    assert choose_instances(artifact, "digest", SHAPE) == 2


def test_nothing_to_choose_on_one_core(timed: Callable[..., Backend], artifact: Artifact) -> None:
    backend = timed(lambda _: 0.005, cores=1)
    assert choose_instances(artifact, "digest", SHAPE) == 1
    assert backend.opened == []


@pytest.mark.parametrize(
    ("cores", "model_gb", "memory_gb", "expected"),
    [
        (1, 1, 64, [1]),
        (2, 1, 64, [1, 2]),
        (6, 1, 64, [1, 2, 4]),
        (64, 1, 64, [1, 2, 4, 8]),
        (64, 10, 64, [1]),
        (8, 40, 64, [1]),
    ],
)
def test_as_many_as_have_cores_and_room(cores: int, model_gb: int, memory_gb: int, expected: Sequence[int]) -> None:
    assert instances._counts(cores, model_gb * 2**30, memory_gb * 2**30) == expected


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({1: 100.0}, 1),
        ({1: 100.0, 2: 110.0}, 1),
        ({1: 100.0, 2: 120.0}, 2),
        ({1: 100.0, 2: 110.0, 4: 121.0}, 4),
        ({1: 100.0, 2: 150.0, 4: 160.0}, 2),
    ],
)
def test_more_only_where_it_is_worth_it(rates: dict[int, float], expected: int) -> None:
    assert instances._best(rates) == expected


def test_those_that_share_the_cores_run_at_once() -> None:
    turns = Turns(2)
    narrow, wide = turns.join(1), turns.join(8)  # as many as there are
    order: list[str] = []

    def take() -> None:
        with wide.turn(1):
            order.append("wide")

    waiting = threading.Thread(target=take)
    with narrow.turn(1), narrow.turn(1):
        waiting.start()
        while not wide.waiting:
            time.sleep(0.001)
        order.append("narrow twice")
    waiting.join(60)
    assert order == ["narrow twice", "wide"]


@pytest.mark.parametrize(
    ("seconds", "kind", "expected", "opened"),
    [
        (lambda _: 0.005, Sized, 2, 1 + 2),
        (lambda threads: 0.2 / threads, Sized, 1, 1 + 2),
        (lambda _: 0.005, Session, 1, 1),
    ],
)
def test_one_or_two_on_a_gpu(
    timed: Callable[..., Backend],
    artifact: Artifact,
    monkeypatch: pytest.MonkeyPatch,
    seconds: Callable[[int], float],
    kind: type[Session],
    expected: int,
    opened: int,
) -> None:
    gpu = Gpu("one", 2**30, "9.0", "1")
    monkeypatch.setattr(instances, "this_machine", lambda: replace(this_machine(), gpus=(gpu,)))
    backend = timed(seconds, cores=8, kind=kind)
    on_gpu = replace(artifact, variant=Variant.parse("timed-fp32@cuda"))
    assert choose_instances(on_gpu, "digest", SHAPE) == expected
    assert len(backend.opened) == opened


def test_a_batch_on_a_gpu_is_as_large_as_the_sizes_that_are_made_ready() -> None:
    limits = _limits(Sized(0.0), 1, ModelSettings())
    assert limits.tokens_per_batch == 1008
    assert limits.rounded is not None
    assert limits.rounded(17) == 32
    assert _limits(Sized(0.0), 1, ModelSettings(batch_tokens=100)).tokens_per_batch == 112
    assert _limits(Session(0.0), 3, ModelSettings()) == Limits(tokens_per_batch=3 * 512)


def test_sizes_are_made_ready_as_far_as_there_is_time() -> None:
    batches = [uniform_batch(Shape(1, length), SIGNATURE) for length in (2, 3, 4)]
    assert run_until(Session(0.0), batches, time.monotonic() + 60) == 3
    assert run_until(Session(0.01), batches, time.monotonic() + 0.005) == 1
    assert run_until(Session(0.0), batches, time.monotonic() - 1) == 0
