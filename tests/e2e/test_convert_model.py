"""Run convert_model on real weights in a separate process, and call the server like transformer-deploy's clients."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from hasten.deploy.tritonserver.client import Client
from hasten.deploy.tritonserver.server_binary import TritonServer
from support.fakes import triton_backend

SIZES = ["-s", "16", "64", "128", "-b", "1", "1", "8", "--nb-measures", "20", "--warmup", "2", "--bench-budget", "2s"]
TEXTS = ["a great film", "rain in the night, and rain all day", "word " * 600]


def _convert(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "hasten.cli.convert_model", *SIZES, *words]
    process = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_clients_of_transformer_deploy_are_answered(minilm: str, few_texts: Path, tmp_path: Path) -> None:
    """A real server takes texts of shape [n], truncates long ones, and agrees with sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    options = ["-m", minilm, "--task", "embedding", "--data", str(few_texts)]
    output = _convert(tmp_path, *options, "-n", "minilm", "-o", "here", "--runtime", "python")
    engines = re.findall(r"^\[(.+?)\] mean=", output, re.MULTILINE)
    assert engines == ["Pytorch (FP32)", "ONNX Runtime (FP32)", "ONNX Runtime (optimized)"]
    server_binary = triton_backend.find_program()
    with TritonServer(server_binary, tmp_path / "here", tmp_path) as server, Client(server.url) as client:
        vectors = client.infer("minilm_onnx_inference", {"TEXT": np.array(TEXTS, object)}, ["output"])["output"]
        repeated = client.infer("minilm_onnx_inference", {"TEXT": np.array(TEXTS[:1] * 50, object)}, ["output"])[
            "output"
        ]
    expected = SentenceTransformer(minilm, device="cpu").encode(TEXTS)
    assert np.abs(vectors - expected).max() < 1e-4
    assert repeated.shape == (50, 384)
    assert np.abs(repeated - expected[0]).max() < 1e-4
