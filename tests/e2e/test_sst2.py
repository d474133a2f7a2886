"""A real fine-tuned classifier with labelled data: the accuracy is the published one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import hasten

PUBLISHED = 0.9105504587155964


@pytest.fixture(scope="session")
def bundle(real_models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("sst2") / "bundle"
    sizes = {"batch_size": 1, "seq_len": (16, 32, 64)}
    hasten.build(real_models("sst2"), target, bench_budget_s=3, budget_s=10, keep="all", **sizes)
    return target


def test_verify_reproduces_the_published_accuracy(bundle: Path, real_data: Path) -> None:
    rows = real_data / "sst2_validation.jsonl"
    command = [sys.executable, "-m", "hasten", "verify", str(bundle), "--data", str(rows), "--json", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    verdicts = {entry["variant"]: entry["verdict"] for entry in json.loads(done.stdout) if entry["verdict"]}
    assert verdicts["onnxruntime-fp32"]["metric"]["value"] == pytest.approx(PUBLISHED, abs=1e-9)
    assert verdicts["onnxruntime-fp32"]["reference_metric"]["value"] == pytest.approx(PUBLISHED, abs=1e-9)
    assert verdicts["onnxruntime-fp32"]["agreement"]["flips"] == 0


def test_answers_equal_the_pipeline(bundle: Path, real_models: Callable[[str], Path], real_data: Path) -> None:
    import transformers

    lines = (real_data / "sst2_validation.jsonl").read_text().splitlines()[:200]
    texts = [json.loads(line)["text"] for line in lines]
    pipeline = transformers.pipeline("text-classification", str(real_models("sst2")), device="cpu")
    with hasten.load(bundle, "onnxruntime-fp32") as classify:
        for ours, theirs in zip(classify(texts, top_k=None), pipeline(texts, top_k=None), strict=True):
            assert [entry["label"] for entry in ours] == [entry["label"] for entry in theirs]
            for mine, other in zip(ours, theirs, strict=True):
                assert mine["score"] == pytest.approx(other["score"], abs=1e-4)


def test_the_gate_decides_on_labelled_data(real_models: Callable[[str], Path], real_data: Path, tmp_path: Path) -> None:
    """The usual dynamic int8 flips some of these 872 answers: refused where none may flip, and nothing is left behind.

    What is taken where some may be lost, and what it lost: test_precision.py."""
    about = {"variants": "onnxruntime-int8", "data": real_data / "sst2_validation.jsonl", "bench_budget_s": 1}
    with pytest.raises(hasten.AccuracyError) as refused:
        hasten.build(real_models("sst2"), tmp_path / "strict", min_agreement=1.0, **about)
    assert "same label" in refused.value.candidates[0].reason
    assert list(tmp_path.iterdir()) == []
