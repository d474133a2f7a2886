"""A fine-tuned tagger on labelled data reaches its published entity F1."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hasten

# Published for sentences truncated to 128 tokens, without the truncated words. The model takes 512, and two sentences
# have more than 128 tokens: untruncated, F1 is 0.4557.
PUBLISHED = 0.4554
VARIANT = "onnxruntime-fp32"


@pytest.fixture(scope="module")
def bundle(real_models: Callable[[str], Path], quick_build: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("wnut17") / "texts.jsonl"
    file.write_text('{"text": "Ada lives in London"}\n', encoding="utf-8")
    return quick_build(real_models("wnut17"), variants=[VARIANT], data=file, threads=None).path


def test_verify_reproduces_the_published_f1(bundle: Path, real_data: Path) -> None:
    rows = real_data / "wnut17_test.jsonl"
    command = [sys.executable, "-m", "hasten", "verify", str(bundle), "--data", str(rows), "--json", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    verdicts = {entry["variant"]: entry["verdict"] for entry in json.loads(done.stdout) if entry["verdict"]}
    for metric in (verdicts[VARIANT]["metric"], verdicts[VARIANT]["reference_metric"]):
        assert metric["name"] == "entity F1"
        assert metric["value"] == pytest.approx(PUBLISHED, abs=5e-4)
        assert metric["rows"] == 1287
    assert verdicts[VARIANT]["agreement"]["flips"] == 0


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
def test_answers_equal_the_pipeline(
    bundle: Path, real_models: Callable[[str], Path], real_data: Path, strategy: str
) -> None:
    import transformers

    lines = (real_data / "wnut17_test.jsonl").read_text().split("\n")[:100]
    texts = [" ".join(json.loads(line)["tokens"]) for line in lines]
    pipeline = transformers.pipeline("token-classification", str(real_models("wnut17")), device="cpu")
    entities = 0
    with hasten.load(bundle, VARIANT) as tag:
        theirs = pipeline(texts, aggregation_strategy=strategy)
        for ours, others in zip(tag(texts, aggregation_strategy=strategy), theirs, strict=True):
            assert len(ours) == len(others)
            for mine, other in zip(ours, others, strict=True):
                assert mine["score"] == pytest.approx(float(other["score"]), abs=1e-4)
                assert {**mine, "score": 0} == {**other, "score": 0}
            entities += len(ours)
    assert entities > 25
