"""The benchmark where memory does not hold all contenders: in heats, really run, and put together again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.backends import Artifact
from hasten.core.progress import Silent
from hasten.core.tensors import Batch, Shape, Signature
from hasten.core.variant import Variant
from hasten.measure import bench as subject
from hasten.measure.bench import Lane, bench

GIB = 2**30
SHAPES = [Shape(2, 4), Shape(1, 2)]


def artifact(folder: Path, name: str, size: int) -> Artifact:
    """Of so many bytes, none of which are really there."""
    (folder / name).mkdir()
    with (folder / name / "model.onnx").open("wb") as stream:
        stream.truncate(size)
    return Artifact(Variant.parse(name), Signature((), (), 8), folder / name, {"model": "model.onnx"})


@pytest.mark.parametrize(
    ("left", "heats"),
    [
        (None, [["a", "b", "c", "d"]]),
        (100 * GIB, [["a", "b", "c", "d"]]),
        (8 * GIB, [["a", "b", "c"], ["a", "d"]]),
        (5 * GIB, [["a", "b"], ["a", "c"], ["a", "d"]]),
        (0, [["a", "b"], ["a", "c"], ["a", "d"]]),
    ],
)
def test_as_many_at_a_time_as_memory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int | None, heats: list[list[str]]
) -> None:
    monkeypatch.setattr(subject, "available_memory_bytes", lambda: left)
    contenders = [artifact(tmp_path, f"{name}-fp32", GIB) for name in "abcd"]
    assert [[each.variant.backend for each in heat] for heat in subject._heats(contenders)] == heats
    assert subject._heats(contenders[:1]) == [contenders[:1]]


@pytest.fixture(scope="module")
def contenders(tiny_classifier: Any, quick_build: Any) -> list[Artifact]:
    names = ["onnxruntime-fp32", "onnxruntime-int8", "openvino-fp32"]
    bundle = quick_build(tiny_classifier("bert"), variants=names, keep="all", min_agreement=0.0)
    return [bundle.graph(), *(bundle.artifact(bundle.entry(name)) for name in names)]


@pytest.mark.parametrize("finalists", [1, None])
def test_heats_make_one_benchmark(
    contenders: list[Artifact], monkeypatch: pytest.MonkeyPatch, finalists: int | None
) -> None:
    running: set[str] = set()
    races: list[set[str]] = []

    class Counted(Lane):
        def __enter__(self) -> Any:
            if not running:
                races.append(set())
            running.add(self.artifact.variant.name)
            races[-1].add(self.artifact.variant.name)
            return super().__enter__()

        def __exit__(self, *given: Any) -> None:
            running.remove(self.artifact.variant.name)
            super().__exit__(*given)

    monkeypatch.setattr(subject, "Lane", Counted)
    monkeypatch.setattr(subject, "available_memory_bytes", lambda: 0)
    rows = Batch({name.name: np.ones(8, np.int32) for name in contenders[0].signature.inputs}, np.array([5, 3]))
    measured = bench(contenders, SHAPES, rows, budget_s=0.2, threads=1, finalists=finalists, progress=Silent())
    names = [contender.variant.name for contender in contenders]
    assert races[:3] == [{names[0], name} for name in names[1:]]
    assert measured.baseline == names[0]
    assert set(measured.at(SHAPES[0])) == {footprint.variant for footprint in measured.footprints} == set(names)
    # Shape by shape, the baseline first, each once.
    assert [timing.shape for timing in measured.timings] == sorted(
        (timing.shape for timing in measured.timings), key=SHAPES.index
    )
    assert measured.timings[0].variant == names[0]
    assert len({(timing.variant, timing.shape) for timing in measured.timings}) == len(measured.timings)
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
    for _ in range(turn["warm"] + turn["count"]):
        begin = time.perf_counter()
        time.sleep(next(first, 0.001))
        times.append((time.perf_counter() - begin) * 1e3)
    reply(ms=times[turn["warm"]:], peak_memory_bytes=0, cpu_s=0.0)
"""


def test_a_contender_that_compiles_for_a_shape_is_not_taken_for_a_slow_one(tmp_path: Path) -> None:
    """Not even where that takes seconds, as on a GPU: it would be timed by few runs, and those cold."""
    rows = Batch({"input_ids": np.ones(2, np.int32)}, np.array([2]))
    with Lane(artifact(tmp_path, "onnxruntime-fp32", 0), None, [sys.executable, "-c", COMPILES]) as lane:
        lane.send(SHAPES[1], rows)
        times = lane.turn(SHAPES[1], 0.25)
    assert len(times) > 10
    assert max(times) < 100
