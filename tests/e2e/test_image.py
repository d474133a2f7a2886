"""Run the steps of docker/Dockerfile in a folder, without Docker, and start the installed server."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from support.server_operations import Running
from support.wait import wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, in order."""
    text = (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def instructions(steps: list[tuple[str, str]], word: str) -> list[str]:
    return [rest for name, rest in steps if name == word]


@pytest.fixture(scope="module")
def installed(steps: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The virtual environment that the first stage creates, in a folder instead of at the root."""
    folder = tmp_path_factory.mktemp("image")
    for name in ("src", "opt", "wheels"):
        (folder / name).mkdir()

    def relocate(text: str) -> str:
        return re.sub(r"(?<![\w.])/(src|opt|wheels)\b", lambda match: f"{folder}/{match[1]}", text)

    first = steps[: [index for index, (word, _) in enumerate(steps) if word == "FROM"][1]]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    for word, rest in first:
        if word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                copy(ROOT / source, folder / "src" / (target if target != "./" else source))
        elif word == "RUN":
            command = relocate(rest).replace("pip wheel", f"{sys.executable} -m pip wheel", 1)
            process = subprocess.run(
                ["sh", "-ec", command], cwd=folder / "src", capture_output=True, text=True, env=environment, check=False
            )
            if "No matching distribution" in process.stderr or "Connection" in process.stderr:
                pytest.skip("no package index can be reached")
            assert process.returncode == 0, process.stderr
    return folder / "opt" / "hasten"


def test_image_copies_only_allowed_files_and_runs_unprivileged(steps: list[tuple[str, str]]) -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        name for rest in instructions(steps, "COPY") if not rest.startswith("--from") for name in rest.split()[:-1]
    }
    assert copied == allowed
    assert instructions(steps, "USER") == ["10001:10001"]
    assert steps.index(("USER", "10001:10001")) > max(index for index, (word, _) in enumerate(steps) if word == "RUN")


def test_gpu_image_installs_the_fused_extra() -> None:
    """The packages are not installed here: they are gigabytes, and need a GPU."""
    text = (ROOT / "docker" / "gpu.Dockerfile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needed = {re.split(r"[<>=;]", package)[0] for package in extras["fused"]}
    (packages,) = re.findall(r"pip install --no-cache-dir (.+)", text)
    assert set(shlex.split(packages)) == {*needed, "onnxruntime-gpu[cuda,cudnn]"}
    assert text.index("pip uninstall --yes onnxruntime\n") < text.index("pip install")
    assert text.rstrip().endswith("USER 10001:10001")


def test_image_has_no_pytorch(installed: Path) -> None:
    listed = subprocess.run(
        [installed / "bin" / "pip", "list", "--format", "json"], capture_output=True, check=True, env={}
    )
    names = {entry["name"].lower() for entry in json.loads(listed.stdout)}
    assert {"hasten", "onnxruntime", "openvino", "uvloop", "grpcio"} <= names
    assert not names & {"torch", "transformers", "onnx"}


def test_server_of_the_image_answers_and_passes_its_health_check(
    installed: Path, steps: list[tuple[str, str]], tiny_embedder: Any, tmp_path: Path
) -> None:
    import hasten

    hasten.build(
        tiny_embedder(), tmp_path / "models" / "embedder", variants=["onnxruntime-fp32"], bench_budget_s=0.5, threads=1
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environment = {"PATH": f"{installed}/bin", "HASTEN_CACHE": str(tmp_path / "cache"), "HASTEN_PORT": port}
    check = json.loads(instructions(steps, "HEALTHCHECK")[0].split("CMD", 1)[1])
    entry = [
        *json.loads(instructions(steps, "ENTRYPOINT")[0]),
        str(tmp_path / json.loads(instructions(steps, "CMD")[0])[0].lstrip("/")),
    ]
    assert subprocess.run(check, env=environment, capture_output=True, check=False, cwd=tmp_path).returncode != 0
    server = subprocess.Popen([*entry, "--grpc-port", "0"], env=environment, cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        wait_until(
            lambda: subprocess.run(check, env=environment, capture_output=True, check=False).returncode == 0, "health"
        )
        body = json.dumps({"input": "one text"}).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/embeddings", body, timeout=60) as response:
            assert len(json.load(response)["data"][0]["embedding"]) == 32
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def test_model_is_built_once_and_rebuilt_after_a_change(tmp_path: Path, tiny_classifier: Any) -> None:
    model = shutil.copytree(tiny_classifier("bert"), tmp_path / "model")
    words = (str(model), "--port", "0", "--no-grpc")
    environment = {"HASTEN_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    with Running(tmp_path, *words, **environment) as server:
        server.said("building ")
        wait_until(
            lambda: server.process.poll() is not None or "listening on" in server.log, "the build", timeout_s=600
        )
        assert server.ready().ask("/predict", {"inputs": "one text"})[0] == 200
        assert server.stop() == 0
    with Running(tmp_path, *words, **environment) as server:
        assert server.ready().ask("/predict", {"inputs": "one text"})[0] == 200
        assert "building " not in server.log
        assert server.stop() == 0
    (model / "config.json").write_text((model / "config.json").read_text().replace('"fair"', '"middling"'))
    with Running(tmp_path, *words, **environment) as server:
        server.said("building ")
        server.signal(signal.SIGTERM)
        assert server.end() in (0, 128 + signal.SIGTERM)
