"""convert_model on real weights, in a process of its own, as people type it; the server asked as they have always."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tritonserver
from hasten.deploy.tritonserver.client import Client
from hasten.deploy.tritonserver.program import TritonServer

SIZES = ["-s", "16", "64", "128", "-b", "1", "1", "8", "--nb-measures", "20", "--warmup", "2", "--bench-budget", "2s"]
TEXTS = ["a great film", "rain in the night, and nobody outside", "word " * 600]


def _convert(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "hasten.cli.convert_model", *SIZES, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_clients_of_transformer_deploy_are_answered(
    minilm: str, few_texts: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """By a real server: any number of texts of shape [n], long ones cut, vectors as sentence-transformers has them."""
    from sentence_transformers import SentenceTransformer

    about = ["-m", minilm, "--task", "embedding", "--data", str(few_texts)]
    shown = _convert(tmp_path, *about, "-n", "minilm", "-o", "here", "--runtime", "python")
    engines = re.findall(r"^\[(.+?)\] mean=", shown, re.MULTILINE)
    assert engines == ["Pytorch (FP32)", "ONNX Runtime (FP32)", "ONNX Runtime (optimized)"]
    program = tritonserver.find_program(pytestconfig)
    with TritonServer(program, tmp_path / "here", tmp_path) as server, Client(server.url) as client:
        ours = client.infer("minilm_onnx_inference", {"TEXT": np.array(TEXTS, object)}, ["output"])["output"]
        many = client.infer("minilm_onnx_inference", {"TEXT": np.array(TEXTS[:1] * 50, object)}, ["output"])["output"]
    theirs = SentenceTransformer(minilm, device="cpu").encode(TEXTS)
    assert np.abs(ours - theirs).max() < 1e-4
    assert many.shape == (50, 384)
    assert np.abs(many - theirs[0]).max() < 1e-4
