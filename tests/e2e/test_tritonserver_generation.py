"""A generative model on NVIDIA's tritonserver: whole texts, streams and concurrent requests."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.bundle import Bundle
from hasten.cli import convert_model, main
from hasten.core.progress import SilentProgress
from hasten.deploy.tritonserver import Options, Repository, write_repository
from hasten.deploy.tritonserver.check import CLIENTS, check
from hasten.deploy.tritonserver.client import Client
from hasten.deploy.tritonserver.server_binary import TritonServer
from support.fakes import triton_backend
from support.models import generation_bundles

PROMPTS = ("the cat sat on", "a dog", "she reads old books", "is this", "I", "what a wonderful film")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("generator")
    return generation_bundles.build(generation_bundles.save(folder / "model"), folder / "generator")


@pytest.fixture(scope="module")
def repository(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return write_repository(bundle, tmp_path_factory.mktemp("repository") / "models", Options(threads=1))


@pytest.fixture(scope="module")
def server(repository: Repository, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    server_binary = triton_backend.find_program(repository.packages)
    with TritonServer(server_binary, repository.directory, tmp_path_factory.mktemp("tritonserver")) as started:
        yield started


def post(server: TritonServer, endpoint: str, **body: Any) -> bytes:
    request = urllib.request.Request(
        f"{server.url}/v2/models/transformer_onnx_generate/{endpoint}", json.dumps(body).encode(), method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        content: bytes = response.read()
    return content


def test_whole_streamed_and_concurrent_texts_match_the_generator(server: TritonServer, bundle: Bundle) -> None:
    with hasten.load(bundle.path, threads=1) as generator:
        expected = [generator(prompt, max_tokens=40, return_full_text=False)[0]["generated_text"] for prompt in PROMPTS]
    options = json.dumps({"max_tokens": 40})

    def generate(prompt: str) -> str:
        return json.loads(post(server, "generate", text_input=prompt, sampling_parameters=options))["text_output"]

    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        assert list(clients.map(generate, PROMPTS)) == expected
    content = post(server, "generate_stream", text_input=PROMPTS[0], sampling_parameters=options, stream=True)
    deltas = [json.loads(event[6:])["text_output"] for event in content.decode().split("\n\n") if event]
    assert ("".join(deltas), len(deltas) > 10) == (expected[0], True)
    full = json.loads(
        post(
            server,
            "generate",
            text_input=PROMPTS[0],
            sampling_parameters=options,
            exclude_input_in_output=False,
        )
    )
    assert full["text_output"] == PROMPTS[0] + expected[0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"sampling_parameters": '{"max_tokens": 0}'}, "max_tokens is 0"),
        ({"sampling_parameters": '{"magic": 1}'}, "unknown option 'magic'"),
        ({"sampling_parameters": "[]"}, "not a JSON object"),
        ({"text_input": "a dog " * 3000}, "the model reads up to 2048"),
    ],
)
def test_invalid_request_is_rejected(server: TritonServer, body: dict[str, Any], message: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as error_info:
        post(server, "generate", **({"text_input": "a dog"} | body))
    with error_info.value as response:
        assert (response.code, message in response.read().decode()) == (400, True)


def test_converted_model_answers_transformer_deploys_clients(
    bundle: Bundle, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("converted")
    model, output = bundle.path.parent / "model", folder / "models"
    words = ["-m", str(model), "-o", str(output), "--task", "text-generation", "--generative-model", "gpt", "--quiet"]
    with generation_bundles.fake_generation_bench():
        assert convert_model.run([*words, "--json"]) == 0
    with hasten.load(bundle.path, threads=1) as generator:
        expected = generator("a dog", return_full_text=False)[0]["generated_text"]
    server_binary = triton_backend.find_program(["tokenizers", "msgspec", "onnxruntime"])
    with TritonServer(server_binary, output, folder) as server, Client(server.url) as client:
        outputs = client.infer("transformer_onnx_generate", {"TEXT": np.array(["a dog"], object)}, ["output"])
    assert outputs["output"].tolist() == [expected]


def test_check_passes_at_an_address_and_with_a_local_server(
    bundle: Bundle,
    server: TritonServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    environment = triton_backend.find_program().environment
    for number, location in enumerate((f"127.0.0.1:{server.port}", str(environment))):
        words = ["deploy", "tritonserver", str(bundle.path), "-o", str(tmp_path / str(number)), "--threads", "1"]
        code = main([*words, "--check", location, "--json", "-q"])
        result = json.loads(capsys.readouterr().out)["check"]
        assert code == 0, result
        assert result["ready"] == ["transformer_onnx_generate"]
        assert result["verdict"]["agreement"]["flips"] == 0
        assert result["same_answers"] == 1.0
        assert (result["load"]["clients"], result["load"]["failed"]) == (CLIENTS, 0)
        assert result["load"]["requests"] == result["load"]["rows"] > CLIENTS


def test_check_fails_for_another_model(server: TritonServer, repository: Repository, tmp_path: Path) -> None:
    """The server's model is ready, but generates other texts than the bundle."""
    model = generation_bundles.save(tmp_path / "model", seed=5)
    other = generation_bundles.build(model, tmp_path / "other")
    checked = check(other, repository, server.url, SilentProgress(), seconds=0.1)
    assert checked.verdict is not None
    assert checked.verdict.passed
    assert checked.same_answers is not None
    assert checked.same_answers < 0.5
    assert not checked.is_accurate


@pytest.mark.parametrize("client", ["client_requests.py", "client_grpc.py"])
def test_example_clients_run(server: TritonServer, repository: Repository, client: str) -> None:
    pytest.importorskip("tritonclient.grpc" if "grpc" in client else "requests")
    address = f"127.0.0.1:{server.grpc_port if 'grpc' in client else server.port}"
    command = [sys.executable, str(Path(repository.directory) / client), address]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (process.returncode, bool(process.stdout.strip())) == (0, True), process.stderr
