"""Test builds for a GPU: the variants, the report, and the behaviour on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hasten.backends import BACKENDS, Artifact
from hasten.backends.onnxruntime import stored_precision
from hasten.bundle import Bundle
from hasten.cli import main
from hasten.core.system.hardware import this_machine
from hasten.core.variant import Precision, Variant
from hasten.onnx_graph import operators
from hasten.predictor import first_runnable_variant
from support.fakes.cuda_driver import driver

FP16 = Variant.parse("onnxruntime-fp16@cuda")
HAS_GPU = BACKENDS.get("onnxruntime").probe(this_machine(), FP16).ok


def test_gpu_bundle_has_fp16_and_fp32_variants(gpu_bundle: Bundle) -> None:
    assert [entry.name for entry in gpu_bundle.manifest.variants] == ["onnxruntime-fp16@cuda", "onnxruntime-fp32@cuda"]
    assert {entry.device for entry in gpu_bundle.manifest.variants} == {"cuda"}
    graphs = {entry.precision: gpu_bundle.artifact(entry).path() for entry in gpu_bundle.manifest.variants}
    assert {precision: stored_precision(graph) for precision, graph in graphs.items()} == {
        Precision.FP16: Precision.FP16,
        Precision.FP32: Precision.FP32,
    }
    # Norms are fused with the additions before them, which is faster on GPUs.
    assert all(operators(graph)["SkipLayerNormalization"] for graph in graphs.values())


def test_report_lists_the_passes_and_the_baseline(gpu_bundle: Bundle) -> None:
    passes = {step.name: step.variants for step in gpu_bundle.report.passes}
    assert passes["fp16"] == ("onnxruntime-fp16@cuda",)
    assert passes["fuse"] == ("onnxruntime-fp16@cuda", "onnxruntime-fp32@cuda")
    on_gpu = Variant.parse("torch-fp32@cuda")
    has_torch_gpu = BACKENDS.get("torch").probe(this_machine(), on_gpu).ok
    assert gpu_bundle.report.bench.baseline == (on_gpu.name if has_torch_gpu else "torch-fp32")


@pytest.mark.skipif(HAS_GPU, reason="there is a device to run it")
def test_graph_is_used_on_a_machine_without_gpu(gpu_bundle: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    artifact: Artifact = first_runnable_variant(gpu_bundle)
    assert artifact.variant.name == "graph-fp32"
    assert "skipping onnxruntime-fp16@cuda, which does not run here" in caplog.text


@pytest.mark.skipif(bool(this_machine().gpus), reason="there is a device to build for")
def test_gpu_build_is_rejected_without_a_gpu(
    tiny_classifier: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        (["--device", "cuda"], "--device cuda needs an NVIDIA GPU, and this machine has none hint: --device cpu"),
        (["--variants", FP16.name], "onnxruntime-fp16@cuda does not run here: there is no NVIDIA GPU here"),
    ):
        assert main(["build", str(tiny_classifier("bert")), "-o", str(tmp_path / "b"), *words]) == 3
        assert message in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "b").exists()


@pytest.mark.skipif(bool(this_machine().gpus), reason="there is a device to build for")
def test_build_reports_a_driver_that_fails(
    tiny_classifier: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(driver(tmp_path, "A")))
    monkeypatch.setenv("FAILS", "999")
    failure = "the CUDA driver fails: cuInit returns CUDA_ERROR_UNKNOWN (999)"
    model, words = str(tiny_classifier("bert")), ["-o", str(tmp_path / "b"), "--dry-run"]
    this_machine.cache_clear()
    try:
        assert main(["build", model, *words]) == 0
        assert f"built for the CPU, since {failure}" in " ".join("".join(capsys.readouterr()).split())
        assert main(["build", model, *words, "--device", "cuda"]) == 3
        assert failure in " ".join(capsys.readouterr().err.split())
    finally:
        this_machine.cache_clear()
