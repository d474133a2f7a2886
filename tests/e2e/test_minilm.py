"""Build, run, verify and bench MiniLM on the command line, as in the README."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hasten.backends import RunOptions
from hasten.bundle import open_bundle
from hasten.predictor import Predictor, open_session

TEXTS = ["How do I reset my password?", "I forgot my login, help!", "The weather is lovely today."]


def hasten(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hasten", *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="session")
def bundle(minilm: str, few_texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("e2e") / "minilm"
    quick = ("--search-budget", "20s", "--bench-budget", "4s", "-b", "1", "2", "4", "-s", "16", "32", "64")
    built = hasten("build", minilm, "-o", target, "--data", few_texts, *quick)
    assert built.returncode == 0, built.stderr
    return target


def vectors(bundle: Path, texts: Sequence[str]) -> np.ndarray:
    answered = hasten("run", bundle, *texts, "--json")
    assert answered.returncode == 0, answered.stderr
    return np.asarray(json.loads(answered.stdout), np.float32)


def test_embeddings_agree_with_sentence_transformers(bundle: Path, minilm: str, few_texts: Path) -> None:
    from sentence_transformers import SentenceTransformer

    texts = [json.loads(line)["text"] for line in few_texts.read_text().splitlines()]
    expected = SentenceTransformer(minilm, device="cpu").encode(texts)
    ours = vectors(bundle, texts)
    assert ours.shape == (len(texts), 384)
    # The gate bounds the mean; a single text may differ more. Some of these texts were set aside for calibration.
    cosines = (ours * expected).sum(axis=1)
    assert cosines.mean() >= 0.9988
    assert cosines.min() >= 0.99
    # The portable graph, from which all variants are made, is exact.
    opened = open_bundle(bundle)
    session = open_session(opened.graph(), RunOptions(1))
    with Predictor(opened.manifest.task, opened.tokenizer(), session) as exact:
        assert (exact(texts) * expected).sum(axis=1).min() >= 0.99999


def test_report_gives_a_reason_for_every_candidate(bundle: Path) -> None:
    report = json.loads((bundle / "report.json").read_text())
    status = {candidate["variant"]: candidate["status"] for candidate in report["candidates"]}
    assert status["torch-fp32"] == "baseline"
    assert list(status.values()).count("chosen") == 1
    assert all(candidate["reason"] for candidate in report["candidates"])
    # The commonly recommended dynamic int8 ruins these embeddings, so the gate rejects it.
    assert status["onnxruntime-int8"] == "inaccurate"
    timed = {timing["variant"] for timing in report["bench"]["timings"]}
    assert "onnxruntime-int8" not in timed


def test_bundle_passes_verification(bundle: Path) -> None:
    verified = hasten("verify", bundle, "--json")
    assert verified.returncode == 0, verified.stderr
    assert all(candidate["verdict"]["passed"] for candidate in json.loads(verified.stdout) if candidate["verdict"])


def test_bench_compares_with_the_baseline(bundle: Path) -> None:
    timed = hasten("bench", bundle, "--bench-budget", "3s", "-b", "1", "-s", "16", "--json")
    assert timed.returncode == 0, timed.stderr
    document = json.loads(timed.stdout)
    assert document["bench"]["baseline"] == "torch-fp32"
    assert {timing["shape"]["sequence"] for timing in document["bench"]["timings"]} == {16}


def test_prediction_imports_neither_torch_nor_transformers(bundle: Path) -> None:
    program = (
        "import sys, hasten; v = hasten.load(sys.argv[1])(['a text']); "
        "print(v.shape, [m for m in ('torch', 'transformers', 'onnx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, str(bundle)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(1, 384) []"


def test_bundle_with_modified_weights_is_rejected(bundle: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    largest = max((copy / "variants").rglob("*"), key=lambda file: file.stat().st_size if file.is_file() else 0)
    with largest.open("r+b") as stream:
        stream.seek(largest.stat().st_size // 2)
        stream.write(b"\xff" * 16)
    name = largest.relative_to(copy / "variants").parts[0]
    rejected = hasten("run", copy, "text", "--variant", name)
    assert rejected.returncode == 6
    assert "does not match its hash" in rejected.stderr
    assert "Traceback" not in rejected.stderr
