"""TensorRT inside ONNX Runtime: what it is asked for, and why it is not there. None of it needs TensorRT."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import onnxruntime
import pytest

from hasten.backends import MODEL, Artifact, RunOptions
from hasten.backends import onnxruntime_tensorrt as road
from hasten.backends.onnxruntime.session import CPU_PROVIDER, CUDA_PROVIDER, TENSORRT_PROVIDER
from hasten.backends.onnxruntime_tensorrt import BACKEND, ProviderSession, provider_options, whole
from hasten.backends.tensorrt.planning import Order, Place, Record
from hasten.core.errors import StageError
from hasten.core.execution import Trial
from hasten.core.hardware import Gpu, Machine, this_machine
from hasten.core.plan import Range, Shapes
from hasten.core.tensors import BATCH, SEQUENCE, DType, Shape, Signature, TensorSpec
from hasten.core.variant import Precision, Variant

SIZES = (BATCH, SEQUENCE)
SIGNATURE = Signature(
    tuple(TensorSpec(name, DType.INT64, SIZES) for name in ("input_ids", "attention_mask", "token_type_ids")),
    (TensorSpec("logits", DType.FLOAT32, (BATCH, 2)),),
    max_length=512,
)
PLACE = Place("NVIDIA H200", "9.0", "any")
HALF = Variant.parse("onnxruntime-tensorrt-fp16@cuda")


@pytest.mark.parametrize(
    ("asked", "limit", "expected"),
    [
        (((1, 8, 32), (16, 128, 256)), 512, (Shape(1, 1), Shape(8, 128), Shape(32, 512))),
        # A batch of 33 rows goes into a bucket of more.
        (((1, 8, 33), (16, 128, 256)), 512, (Shape(1, 1), Shape(8, 128), Shape(64, 512))),
        (((1, 1, 1), (16, 128, 256)), 64, (Shape(1, 1), Shape(1, 64), Shape(1, 64))),
    ],
)
def test_one_profile_takes_every_text(
    asked: tuple[tuple[int, int, int], tuple[int, int, int]], limit: int, expected: tuple[Shape, ...]
) -> None:
    batch, sequence = asked
    found = whole(Shapes(Range(*batch), Range(*sequence)), limit)
    assert (found.min, found.opt, found.max) == expected


def test_what_it_is_asked_for(tmp_path: Path) -> None:
    """Of inputs that were pruned nothing is said: it refuses a profile of what it does not know."""
    profile = whole(Shapes(Range(1, 8, 32), Range(16, 128, 256)), 512)
    inputs = dict.fromkeys(("input_ids", "attention_mask"), DType.INT64)
    record = Record(PLACE, Order((profile,)), Precision.FP16, inputs, {})
    folder = str(tmp_path)
    expected = {
        "trt_profile_min_shapes": "input_ids:1x1,attention_mask:1x1",
        "trt_profile_opt_shapes": "input_ids:8x128,attention_mask:8x128",
        "trt_profile_max_shapes": "input_ids:32x512,attention_mask:32x512",
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": folder,
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": folder,
    }
    assert provider_options(record, SIGNATURE, tmp_path) == expected
    limited = replace(record, order=Order((profile,), 2**30))
    assert provider_options(limited, SIGNATURE, tmp_path) == {**expected, "trt_max_workspace_size": "1073741824"}


@pytest.fixture
def without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA_PROVIDER, CPU_PROVIDER])


@pytest.mark.usefixtures("without_it")
def test_where_it_does_not_run_it_says_why() -> None:
    here = replace(this_machine(), gpus=())
    there = replace(here, gpus=(Gpu("NVIDIA H200", 2**37, "9.0", "580"),))
    assert BACKEND.probe(here, HALF).reason == "there is no NVIDIA GPU here"
    assert BACKEND.probe(there, replace(HALF, device="cpu")).reason == "it runs on 'cuda', not on 'cpu'"
    for variant in (None, HALF):
        found = BACKEND.probe(there, variant)
        assert found.reason.endswith("the ONNX Runtime that is installed was built without it")
        assert "onnxruntime-gpu" in found.hint


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An ONNX Runtime that lists it, and what is tried of it: nothing runs."""
    names: list[str] = []

    def trial(provider: str, _: Machine) -> Trial:
        names.append(provider)
        return Trial(provider, note="it does not start: libnvinfer.so.10 is not there")

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [TENSORRT_PROVIDER, CPU_PROVIDER])
    monkeypatch.setattr(road, "trial", trial)
    road._why_not_run.cache_clear()
    return names


def test_only_who_asks_for_a_variant_waits_for_a_trial(tried: list[str]) -> None:
    there = replace(this_machine(), gpus=(Gpu("NVIDIA T4", 2**34, "7.5", "580"),))
    assert BACKEND.probe(there).ok
    assert BACKEND.probe(there, replace(HALF, precision=Precision.FP32)).reason == "it does not compute in fp32"
    assert "compute capability 8.0" in BACKEND.probe(there, replace(HALF, precision=Precision.BF16)).reason
    assert tried == []
    assert BACKEND.probe(there, HALF).reason.endswith("it does not start: libnvinfer.so.10 is not there")
    assert tried == [TENSORRT_PROVIDER]
    road._why_not_run.cache_clear()


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Artifact:
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(road, "this_place", lambda: PLACE)
    (tmp_path / "model.onnx").write_bytes(b"a graph")
    profile = whole(Shapes(Range(1, 8, 32), Range(16, 128, 256)), 512)
    record = Record(PLACE, Order((profile,)), Precision.FP32, {"input_ids": DType.INT64}, {})
    (tmp_path / "model.json").write_bytes(msgspec.json.encode(record))
    return Artifact(HALF, SIGNATURE, tmp_path, {MODEL: "model.onnx"})


class Opened:
    """ONNX Runtime where TensorRT is: what sessions are opened with, and what becomes of them."""

    def __init__(self, outcomes: list[Any]) -> None:
        self.outcomes = outcomes
        self.asked: list[tuple[Any, Any]] = []

    def __call__(self, graph: str, options: Any, providers: list[Any], enable_fallback: int) -> Any:
        self.asked.append((options, providers))
        outcome = self.outcomes[len(self.asked) - 1]
        if isinstance(outcome, Exception):
            raise outcome
        return SimpleNamespace(get_providers=lambda: outcome)


STARTED = [TENSORRT_PROVIDER, CUDA_PROVIDER, CPU_PROVIDER]


def engines(cache: Path) -> Path:
    (folder,) = (cache / road.FOLDER).iterdir()
    return folder


def test_it_is_asked_first_for_the_graph_as_it_is(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "InferenceSession", opened := Opened([STARTED]))
    session = ProviderSession(artifact, RunOptions(1))
    # As its record says, whatever the variant is called after.
    assert session.spec.precision is Precision.FP32
    ((options, (first, second, last)),) = opened.asked
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert (first[0], second[0], last) == (TENSORRT_PROVIDER, CUDA_PROVIDER, CPU_PROVIDER)
    assert first[1]["trt_engine_cache_path"] == str(engines(tmp_path / "cache"))


def test_an_engine_that_fails_is_built_again(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = [STARTED, RuntimeError("of another TensorRT"), STARTED]
    monkeypatch.setattr(onnxruntime, "InferenceSession", Opened(outcomes))
    ProviderSession(artifact, RunOptions(1))
    folder = engines(tmp_path / "cache")
    (folder / "model.engine").write_bytes(b"half of it")
    ProviderSession(artifact, RunOptions(1))
    assert not list(folder.iterdir())
    assert "building its engine anew" in caplog.text
    assert "of another TensorRT" in caplog.text


@pytest.mark.parametrize(
    ("outcome", "told"),
    [(RuntimeError("no engine"), "no engine"), ([CUDA_PROVIDER, CPU_PROVIDER], "does not start here")],
)
def test_what_does_not_open_is_told(
    outcome: Any, told: str, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "InferenceSession", Opened([outcome]))
    with pytest.raises(StageError, match=told):
        ProviderSession(artifact, RunOptions(1))
