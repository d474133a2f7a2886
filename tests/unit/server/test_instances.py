"""The number of sessions per model: how it is measured, cached and chosen."""

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
from hasten.core.system.hardware import Gpu, this_machine
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
from hasten.server.models import instances
from hasten.server.models.encoder_model import _limits
from hasten.server.models.instances import choose_instances, count_on_gpu
from hasten.server.scheduling.core_scheduler import CoreScheduler
from hasten.server.scheduling.queue import Limits
from hasten.server.settings import Settings

SIGNATURE = Signature(
    (TensorSpec("input_ids", DType.INT32, (BATCH, SEQUENCE)),), (TensorSpec("sum", DType.FLOAT32, (BATCH, 1)),), 512
)
SHAPE = Shape(8, 128)


class TimedSession(PaddedSession):
    def __init__(self, seconds: float) -> None:
        self.spec = SessionSpec(SIGNATURE, Layout.PADDED, "cpu", "fp32")
        self.is_closed = False
        self.seconds = seconds

    def run(self, batch: Batch) -> Outputs:
        time.sleep(self.seconds)
        return {"sum": np.zeros((len(batch), 1), np.float32)}

    def close(self) -> None:
        self.is_closed = True


class BucketedSession(TimedSession):
    max_batch_tokens = 1000

    def rounded(self, tokens: int) -> int:
        return -(-tokens // 16) * 16

    def samples(self, tokens: int, rows: int) -> list[Batch]:
        return []


class TimedBackend:
    """Runs take a given time per number of threads, however many sessions run, up to `max_sessions`."""

    name = "timed"

    def __init__(self, seconds: Callable[[int], float], kind: type[TimedSession], max_sessions: int) -> None:
        self._seconds, self._kind, self._max_sessions = seconds, kind, max_sessions
        self.opened: list[TimedSession] = []

    def probe(self, *_: object) -> Support:
        return Support.yes()

    def open(self, artifact: Artifact, options: RunOptions) -> TimedSession:
        if sum(not session.is_closed for session in self.opened) == self._max_sessions:
            raise StageError("there is no memory left")
        self.opened.append(self._kind(self._seconds(options.thread_count)))
        return self.opened[-1]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., TimedBackend]]:
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    # The choice is tested, not how precisely this machine sleeps: rates follow from the given times.
    monkeypatch.setattr(
        instances, "_rate", lambda sessions, batch: sum(len(batch) / session.seconds for session in sessions)
    )

    def make(
        seconds: Callable[[int], float], cores: int = 4, kind: type[TimedSession] = TimedSession, max_sessions: int = 8
    ) -> TimedBackend:
        monkeypatch.setattr(instances, "usable_cores", lambda: cores)
        backend: Any = TimedBackend(seconds, kind, max_sessions)
        BACKENDS.add("timed", backend)
        typed: TimedBackend = backend
        return typed

    yield make
    BACKENDS._loaded.pop("timed", None)


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    folder = tmp_path / "variant"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(b"weights")
    return Artifact(Variant.parse("timed-fp32"), SIGNATURE, folder, {"model": "model.onnx"})


def test_several_sessions_are_chosen_if_threads_do_not_help(
    timed: Callable[..., TimedBackend], artifact: Artifact
) -> None:
    backend = timed(lambda _: 0.005)
    assert choose_instances(artifact, "digest", SHAPE) == 4
    assert len(backend.opened) == 1 + 2 + 4
    assert all(session.is_closed for session in backend.opened)


def test_single_session_is_chosen_if_threads_scale(timed: Callable[..., TimedBackend], artifact: Artifact) -> None:
    timed(lambda threads: 0.05 / threads)
    assert choose_instances(artifact, "digest", SHAPE) == 1


def test_measuring_stops_when_more_sessions_are_slower(timed: Callable[..., TimedBackend], artifact: Artifact) -> None:
    backend = timed(lambda threads: 0.005 if threads == 8 else 0.05, cores=8)
    assert choose_instances(artifact, "digest", SHAPE) == 1
    assert len(backend.opened) == 1 + 2


def test_sessions_are_limited_to_those_that_open(timed: Callable[..., TimedBackend], artifact: Artifact) -> None:
    backend = timed(lambda _: 0.005, max_sessions=3)
    assert choose_instances(artifact, "digest", SHAPE) == 2
    assert all(session.is_closed for session in backend.opened)
    timed(lambda _: 0.005, max_sessions=0)
    with pytest.raises(StageError, match="no memory left"):
        choose_instances(artifact, "another digest", SHAPE)


def test_rate_is_measured_with_all_sessions_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "_MEASURE_S", 0.3)
    batch = uniform_batch(SHAPE, SIGNATURE)
    single, four = (instances._rate([TimedSession(0.05) for _ in range(count)], batch) for count in (1, 4))
    assert single < 1.01 * len(batch) / 0.05
    assert four > 1.5 * single  # 4 on an idle machine


def test_measurement_is_cached(timed: Callable[..., TimedBackend], artifact: Artifact, tmp_path: Path) -> None:
    backend = timed(lambda _: 0.005, cores=2)
    assert choose_instances(artifact, "digest", SHAPE) == 2
    measured = len(backend.opened)
    assert choose_instances(artifact, "digest", SHAPE) == 2
    assert len(backend.opened) == measured
    choose_instances(artifact, "another digest", SHAPE)
    assert len(backend.opened) == 2 * measured
    for file in (tmp_path / "cache" / "instances").iterdir():
        for content in (b"{}", b"no JSON", b'{"1": "fast"}'):
            file.write_bytes(content)
            assert choose_instances(artifact, "digest", SHAPE) == 2


def test_choice_works_without_a_writable_cache(
    timed: Callable[..., TimedBackend], artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "file"))
    timed(lambda _: 0.005, cores=2)
    assert choose_instances(artifact, "digest", SHAPE) == 2


def test_single_core_is_not_measured(timed: Callable[..., TimedBackend], artifact: Artifact) -> None:
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
def test_session_counts_are_limited_by_cores_and_memory(
    cores: int, model_gb: int, memory_gb: int, expected: Sequence[int]
) -> None:
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
def test_more_sessions_need_a_minimum_gain(rates: dict[int, float], expected: int) -> None:
    assert instances._best(rates) == expected


def test_sessions_run_in_parallel_while_cores_are_free() -> None:
    scheduler = CoreScheduler(2)
    narrow, wide = scheduler.join(1), scheduler.join(8)  # capped at the cores there are
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
    ("kind", "cores", "memory_bytes", "expected"),
    [
        (BucketedSession, 8, 2**30, 2),
        (BucketedSession, 1, 2**30, 1),
        (BucketedSession, 8, 16, 1),
        (TimedSession, 8, 2**30, 1),
    ],
)
def test_gpu_runs_two_bucketed_sessions_if_they_fit(
    artifact: Artifact,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[TimedSession],
    cores: int,
    memory_bytes: int,
    expected: int,
) -> None:
    gpu = Gpu("gpu", memory_bytes, "9.0", "1")
    monkeypatch.setattr(instances, "this_machine", lambda: replace(this_machine(), gpus=(gpu,)))
    monkeypatch.setattr(instances, "usable_cores", lambda: cores)
    on_gpu = replace(artifact, variant=Variant.parse("timed-fp32@cuda"))
    assert count_on_gpu(on_gpu, kind(0.0)) == expected


def test_token_budget_of_a_batch_is_rounded_up_to_a_bucket() -> None:
    limits = _limits(BucketedSession(0.0), 1, Settings())
    assert limits.tokens_per_batch == 1008
    assert limits.round_up is not None
    assert limits.round_up(17) == 32
    assert _limits(BucketedSession(0.0), 1, Settings(max_batch_tokens=100)).tokens_per_batch == 112
    assert _limits(TimedSession(0.0), 3, Settings()) == Limits(tokens_per_batch=3 * 512)


def test_buckets_are_prepared_until_the_time_is_over() -> None:
    batches = [uniform_batch(Shape(1, length), SIGNATURE) for length in (2, 3, 4)]
    assert run_until(TimedSession(0.0), batches, time.monotonic() + 60) == 3
    assert run_until(TimedSession(0.01), batches, time.monotonic() + 0.005) == 1
    assert run_until(TimedSession(0.0), batches, time.monotonic() - 1) == 0
