"""Test benchmarks of more contenders than fit into memory: they run in heats whose timings are merged."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.backends import Artifact
from hasten.core.progress import SilentProgress
from hasten.core.tensors import Batch, Shape, Signature
from hasten.core.variant import Variant
from hasten.measure import bench as subject
from hasten.measure.bench import BenchWorker, bench

GIB = 2**30
SHAPES = [Shape(2, 4), Shape(1, 2)]


def artifact(folder: Path, name: str, size: int) -> Artifact:
    """Make an artifact with a sparse file of `size` bytes."""
    (folder / name).mkdir()
    with (folder / name / "model.onnx").open("wb") as stream:
        stream.truncate(size)
    return Artifact(Variant.parse(name), Signature((), (), 8), folder / name, {"model": "model.onnx"})


@pytest.mark.parametrize(
    ("available_bytes", "heats"),
    [
        (None, [["a", "b", "c", "d"]]),
        (100 * GIB, [["a", "b", "c", "d"]]),
        (8 * GIB, [["a", "b", "c"], ["a", "d"]]),
        (5 * GIB, [["a", "b"], ["a", "c"], ["a", "d"]]),
        (0, [["a", "b"], ["a", "c"], ["a", "d"]]),
    ],
)
def test_heats_have_as_many_contenders_as_fit_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available_bytes: int | None, heats: list[list[str]]
) -> None:
    monkeypatch.setattr(subject, "available_memory_bytes", lambda: available_bytes)
    contenders = [artifact(tmp_path, f"{name}-fp32", GIB) for name in "abcd"]
    assert [[each.variant.backend for each in heat] for heat in subject._heats(contenders)] == heats
    assert subject._heats(contenders[:1]) == [contenders[:1]]


@pytest.fixture(scope="module")
def contenders(tiny_classifier: Any, quick_build: Any) -> list[Artifact]:
    names = ["onnxruntime-fp32", "onnxruntime-int8", "openvino-fp32"]
    bundle = quick_build(tiny_classifier("bert"), variants=names, keep="all", min_agreement=0.0)
    return [bundle.graph(), *(bundle.artifact(bundle.entry(name)) for name in names)]


@pytest.mark.parametrize("finalists", [1, None])
def test_heats_are_merged_into_one_benchmark(
    contenders: list[Artifact], monkeypatch: pytest.MonkeyPatch, finalists: int | None
) -> None:
    running: set[str] = set()
    races: list[set[str]] = []

    class Counted(BenchWorker):
        def __enter__(self) -> Any:
            if not running:
                races.append(set())
            running.add(self.artifact.variant.name)
            races[-1].add(self.artifact.variant.name)
            return super().__enter__()

        def __exit__(self, *arguments: Any) -> None:
            running.remove(self.artifact.variant.name)
            super().__exit__(*arguments)

    monkeypatch.setattr(subject, "BenchWorker", Counted)
    monkeypatch.setattr(subject, "available_memory_bytes", lambda: 0)
    rows = Batch({name.name: np.ones(8, np.int32) for name in contenders[0].signature.inputs}, np.array([5, 3]))
    measured = bench(contenders, SHAPES, rows, budget_s=0.2, threads=1, finalists=finalists, progress=SilentProgress())
    names = [contender.variant.name for contender in contenders]
    assert races[:3] == [{names[0], name} for name in names[1:]]
    assert measured.baseline == names[0]
    assert set(measured.at(SHAPES[0])) == {footprint.variant for footprint in measured.footprints} == set(names)
    # Ordered by shape, the baseline first, each pair once.
    assert [timing.shape for timing in measured.timings] == sorted(
        (timing.shape for timing in measured.timings), key=SHAPES.index
    )
    assert measured.timings[0].variant == names[0]
    assert len({(timing.variant, timing.shape) for timing in measured.timings}) == len(measured.timings)
    # The p50 and the speed-up agree, also for contenders of different heats and those that were dropped early.
    for timing in measured.timings:
        baseline_ms = measured.at(timing.shape)[measured.baseline].p50_ms
        assert timing.p50_ms * timing.speedup.value == pytest.approx(baseline_ms)
    if finalists is None:
        assert len(races) == 3
        assert set(measured.at(SHAPES[1])) == set(names)
    else:
        assert len(races) == 4
        assert set(measured.at(SHAPES[1])) == races[3]
        assert names[0] in races[3]
        assert len(races[3]) == 2


COMPILES = """
import json, sys, time
def reply(**message):
    print(json.dumps(message), flush=True)
sys.stdin.readline()
reply(load_ms=1.0, precision="fp32")
first = iter([1.1, 0.3])
for line in sys.stdin:
    turn, times = json.loads(line), []
    for _ in range(turn["warmup_runs"] + turn["timed_runs"]):
        begin = time.perf_counter()
        time.sleep(next(first, 0.001))
        times.append((time.perf_counter() - begin) * 1e3)
    reply(ms=times[turn["warmup_runs"]:], peak_memory_bytes=0, cpu_s=0.0)
"""


def test_compilation_is_not_part_of_the_timings(tmp_path: Path) -> None:
    """Compilation can take seconds on a GPU; counting it would leave few runs, and those cold."""
    rows = Batch({"input_ids": np.ones(2, np.int32)}, np.array([2]))
    with BenchWorker(artifact(tmp_path, "onnxruntime-fp32", 0), None, [sys.executable, "-c", COMPILES]) as worker:
        worker.send(SHAPES[1], rows)
        times = worker.run_round(SHAPES[1], 0.25)
    assert len(times) > 10
    assert max(times) < 100
