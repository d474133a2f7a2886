"""A fine-tuned classifier on labelled data reaches its published accuracy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hasten

PUBLISHED = 0.9105504587155964
VARIANT = "onnxruntime-fp32"


@pytest.fixture(scope="module")
def bundle(real_models: Callable[[str], Path], quick_build: Any) -> Path:
    """A bundle of one variant; test_minilm.py covers the automatic search."""
    return quick_build(real_models("sst2"), variants=[VARIANT], threads=None).path


def test_verify_reproduces_the_published_accuracy(bundle: Path, real_data: Path) -> None:
    rows = real_data / "sst2_validation.jsonl"
    command = [sys.executable, "-m", "hasten", "verify", str(bundle), "--data", str(rows), "--json", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    verdicts = {entry["variant"]: entry["verdict"] for entry in json.loads(done.stdout) if entry["verdict"]}
    assert verdicts[VARIANT]["metric"]["value"] == pytest.approx(PUBLISHED, abs=1e-9)
    assert verdicts[VARIANT]["reference_metric"]["value"] == pytest.approx(PUBLISHED, abs=1e-9)
    assert verdicts[VARIANT]["agreement"]["flips"] == 0


def test_answers_equal_the_pipeline(bundle: Path, real_models: Callable[[str], Path], real_data: Path) -> None:
    import transformers

    lines = (real_data / "sst2_validation.jsonl").read_text().splitlines()[:200]
    texts = [json.loads(line)["text"] for line in lines]
    pipeline = transformers.pipeline("text-classification", str(real_models("sst2")), device="cpu")
    with hasten.load(bundle, VARIANT) as classify:
        for ours, theirs in zip(classify(texts, top_k=None), pipeline(texts, top_k=None), strict=True):
            assert [entry["label"] for entry in ours] == [entry["label"] for entry in theirs]
            for mine, other in zip(ours, theirs, strict=True):
                assert mine["score"] == pytest.approx(other["score"], abs=1e-4)


def test_int8_is_rejected_on_labelled_data_when_labels_flip(
    real_models: Callable[[str], Path], real_data: Path, tmp_path: Path
) -> None:
    """Plain dynamic int8 flips some of these 250 labels; the failed build leaves no files behind."""
    rows, output = tmp_path / "rows.jsonl", tmp_path / "output"
    rows.write_text("".join((real_data / "sst2_validation.jsonl").read_text().splitlines(keepends=True)[:250]))
    output.mkdir()
    with pytest.raises(hasten.AccuracyError) as rejected:
        hasten.build(real_models("sst2"), output / "strict", variants="onnxruntime-int8", data=rows, min_agreement=1.0)
    assert "same label" in rejected.value.candidates[0].reason
    assert list(output.iterdir()) == []
