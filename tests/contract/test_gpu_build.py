"""A build for a GPU: what is made for it, what is stored, and what happens to it where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hasten.backends import BACKENDS, Artifact
from hasten.backends.onnxruntime import stored_precision
from hasten.bundle import Bundle
from hasten.cli import main
from hasten.core.hardware import this_machine
from hasten.core.variant import Precision, Variant
from hasten.graph import operators
from hasten.predictor import runnable

HALF = Variant.parse("onnxruntime-fp16@cuda")
HAS_GPU = BACKENDS.get("onnxruntime").probe(this_machine(), HALF).ok


def test_it_holds_both(gpu_bundle: Bundle) -> None:
    assert [entry.name for entry in gpu_bundle.manifest.variants] == ["onnxruntime-fp16@cuda", "onnxruntime-fp32@cuda"]
    assert {entry.device for entry in gpu_bundle.manifest.variants} == {"cuda"}
    found = {entry.precision: gpu_bundle.artifact(entry).path() for entry in gpu_bundle.manifest.variants}
    assert {precision: stored_precision(graph) for precision, graph in found.items()} == {
        Precision.FP16: Precision.FP16,
        Precision.FP32: Precision.FP32,
    }
    # Norms in one with the additions before them, as GPUs want them.
    assert all(operators(graph)["SkipLayerNormalization"] for graph in found.values())


def test_its_report_tells_what_was_done(gpu_bundle: Bundle) -> None:
    passes = {done.name: done.variants for done in gpu_bundle.report.passes}
    assert passes["halve"] == ("onnxruntime-fp16@cuda",)
    assert passes["fuse"] == ("onnxruntime-fp16@cuda", "onnxruntime-fp32@cuda")
    moved = Variant.parse("torch-fp32@cuda")
    is_there = BACKENDS.get("torch").probe(this_machine(), moved).ok
    assert gpu_bundle.report.bench.baseline == (moved.name if is_there else "torch-fp32")


@pytest.mark.skipif(HAS_GPU, reason="there is a device to run it")
def test_elsewhere_the_graph_answers(gpu_bundle: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    artifact: Artifact = runnable(gpu_bundle)
    assert artifact.variant.name == "graph-fp32"
    assert "passing over onnxruntime-fp16@cuda, which does not run here" in caplog.text


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
