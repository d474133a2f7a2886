"""A build for a GPU: what is made for it, what is stored, and what happens to it where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hasten.backends import BACKENDS, Artifact
from hasten.backends.onnxruntime import stored_precision
from hasten.backends.onnxruntime.cuda import CudaSession
from hasten.bundle import Bundle
from hasten.cli import main
from hasten.core.errors import UnsupportedError
from hasten.core.hardware import this_machine
from hasten.core.variant import Precision, Support, Variant
from hasten.deploy.tritonserver.options import Options, choose
from hasten.graph import operators
from hasten.predictor import runnable

HALF = Variant.parse("onnxruntime-fp16@cuda")
HAS_GPU = BACKENDS.get("onnxruntime").probe(this_machine(), HALF).ok


@pytest.fixture(scope="module")
def gpu() -> Callable[[], AbstractContextManager[pytest.MonkeyPatch]]:
    """Where there is none, the session for it runs on the CPU, and nobody looks what landed there."""

    @contextmanager
    def use() -> Iterator[pytest.MonkeyPatch]:
        with pytest.MonkeyPatch.context() as patch:
            if not HAS_GPU:
                patch.setattr("hasten.backends.onnxruntime.probe_provider", lambda _: Support.yes())
                patch.setattr("hasten.backends.onnxruntime.check_placements", lambda _: None)
                patch.setattr("hasten.backends.onnxruntime.CudaSession", partial(CudaSession, device="cpu"))
            yield patch

    return use


@pytest.fixture(scope="module")
def bundle(tiny_classifier: Any, quick_build: Any, gpu: Any) -> Bundle:
    with gpu():
        names = ["onnxruntime-fp16@cuda", "onnxruntime-fp32@cuda"]
        return quick_build(tiny_classifier("bert"), variants=names, speeds={"onnxruntime-fp32@cuda": 2.0})


def test_it_holds_both(bundle: Bundle) -> None:
    assert [entry.name for entry in bundle.manifest.variants] == ["onnxruntime-fp16@cuda", "onnxruntime-fp32@cuda"]
    assert {entry.device for entry in bundle.manifest.variants} == {"cuda"}
    found = {entry.precision: bundle.artifact(entry).path() for entry in bundle.manifest.variants}
    assert {precision: stored_precision(graph) for precision, graph in found.items()} == {
        Precision.FP16: Precision.FP16,
        Precision.FP32: Precision.FP32,
    }
    # Norms in one with the additions before them, as GPUs want them.
    assert all(operators(graph)["SkipLayerNormalization"] for graph in found.values())


def test_its_report_tells_what_was_done(bundle: Bundle) -> None:
    passes = {done.name: done.variants for done in bundle.report.passes}
    assert passes["halve"] == ("onnxruntime-fp16@cuda",)
    assert passes["fuse"] == ("onnxruntime-fp16@cuda", "onnxruntime-fp32@cuda")
    moved = Variant.parse("torch-fp32@cuda")
    is_there = BACKENDS.get("torch").probe(this_machine(), moved).ok
    assert bundle.report.bench.baseline == (moved.name if is_there else "torch-fp32")


@pytest.mark.skipif(HAS_GPU, reason="there is a device to run it")
def test_elsewhere_the_graph_answers(bundle: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    artifact: Artifact = runnable(bundle)
    assert artifact.variant.name == "graph-fp32"
    assert "passing over onnxruntime-fp16@cuda, which does not run here" in caplog.text


def test_tritonserver_gets_it_for_a_gpu_alone(bundle: Bundle) -> None:
    assert choose(bundle, Options(device="cuda")).variant == HALF
    assert choose(bundle, Options(device="cpu")).variant.name == "graph-fp32"
    assert choose(bundle, Options()).variant.name == "graph-fp32"
    with pytest.raises(UnsupportedError, match="it is for GPUs: --device cuda"):
        choose(bundle, Options(variant=HALF.name))


def test_convert_model_writes_it(
    bundle: Bundle, gpu: Any, tiny_classifier: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hasten.cli.convert_model import run

    words = ["-m", str(tiny_classifier("bert")), "-o", str(tmp_path / "models"), "-d", "cuda"]
    with gpu() as patch:
        patch.setattr("hasten.deploy.convert.build", lambda *_, **__: bundle)
        assert run([*words, "--nb-measures", "2", "--warmup", "1", "--quiet"]) == 0
    assert "[ONNX Runtime (optimized)] mean=" in capsys.readouterr().out
    configs = {file.parent.name: file.read_text() for file in (tmp_path / "models").glob("*/config.pbtxt")}
    assert [name for name, config in configs.items() if "KIND_GPU" in config] == ["transformer_onnx_model"]
    assert stored_precision(tmp_path / "models" / "model.onnx") is Precision.FP16


@pytest.mark.skipif(bool(this_machine().gpus), reason="there is a device to build for")
def test_without_a_gpu_it_is_refused_at_once(
    tiny_classifier: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, told in (
        (["--device", "cuda"], "--device cuda needs an NVIDIA GPU, and there is none here hint: --device cpu"),
        (["--variants", HALF.name], "onnxruntime-fp16@cuda does not run here: there is no NVIDIA GPU here"),
    ):
        assert main(["build", str(tiny_classifier("bert")), "-o", str(tmp_path / "b"), *words]) == 3
        assert told in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "b").exists()
