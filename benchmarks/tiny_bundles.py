"""Build bundles of tiny models with random weights, one of each kind that reads its files differently."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

_BENCH = ("--bench-budget", "1s", "--threads", "1", "--quiet", "--json")


def build_tiny_bundles(folder: Path) -> list[Path]:
    """Build a classifier for ONNX Runtime, a token classifier for OpenVINO, and a Llama with a chat template."""
    from support.models import generation_bundles, tiny_encoders

    tiny_encoders.save("bert", "ForSequenceClassification", folder / "bert-model")
    tiny_encoders.save("roberta", "ForTokenClassification", folder / "roberta-model")
    generation_bundles.save(folder / "llama-model")
    return [
        _build(folder / "bert-model", folder / "classifier", "onnxruntime-fp32"),
        _build(folder / "roberta-model", folder / "tagger", "openvino-fp32"),
        _build(folder / "llama-model", folder / "llama", "onnxruntime-fp32"),
    ]


def _build(model: Path, target: Path, variant: str) -> Path:
    command = [sys.executable, "-m", "hasten", "build", str(model), "-o", str(target), "--variants", variant, *_BENCH]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return target
