"""A model that writes on NVIDIA's own tritonserver: whole and in pieces, many at once, as in process."""

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
import tritonserver
import writer_bundles
from hasten.bundle import Bundle
from hasten.cli import convert_model, main
from hasten.core.progress import Silent
from hasten.deploy.tritonserver import Options, Repository, write_repository
from hasten.deploy.tritonserver.check import CLIENTS, check
from hasten.deploy.tritonserver.client import Client
from hasten.deploy.tritonserver.program import TritonServer

PROMPTS = ("the cat sat on", "a dog", "she reads old books", "is this", "I", "what a wonderful film")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("writer")
    return writer_bundles.build(writer_bundles.save(folder / "model"), folder / "writer")


@pytest.fixture(scope="module")
def repository(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return write_repository(bundle, tmp_path_factory.mktemp("repository") / "models", Options(threads=1))


@pytest.fixture(scope="module")
def server(
    repository: Repository, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    program = tritonserver.find_program(pytestconfig, repository.packages)
    with TritonServer(program, repository.directory, tmp_path_factory.mktemp("tritonserver")) as started:
        yield started


def ask(server: TritonServer, way: str, **body: Any) -> bytes:
    request = urllib.request.Request(
        f"{server.url}/v2/models/transformer_onnx_generate/{way}", json.dumps(body).encode(), method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: bytes = answer.read()
    return content


def test_whole_in_pieces_and_many_at_once(server: TritonServer, bundle: Bundle) -> None:
    with hasten.load(bundle.path, threads=1) as here:
        expected = [here(prompt, max_tokens=40, return_full_text=False)[0]["generated_text"] for prompt in PROMPTS]
    options = json.dumps({"max_tokens": 40})

    def whole(prompt: str) -> str:
        return json.loads(ask(server, "generate", text_input=prompt, sampling_parameters=options))["text_output"]

    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        assert list(clients.map(whole, PROMPTS)) == expected
    content = ask(server, "generate_stream", text_input=PROMPTS[0], sampling_parameters=options, stream=True)
    pieces = [json.loads(event[6:])["text_output"] for event in content.decode().split("\n\n") if event]
    assert ("".join(pieces), len(pieces) > 10) == (expected[0], True)
    full = json.loads(
        ask(
            server,
            "generate",
            text_input=PROMPTS[0],
            sampling_parameters=options,
            exclude_input_in_output=False,
        )
    )
    assert full["text_output"] == PROMPTS[0] + expected[0]


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({"sampling_parameters": '{"max_tokens": 0}'}, "max_tokens is 0"),
        ({"sampling_parameters": '{"magic": 1}'}, "no option 'magic'"),
        ({"sampling_parameters": "[]"}, "not a JSON object"),
        ({"text_input": "a dog " * 3000}, "the model reads up to 2048"),
    ],
)
def test_what_cannot_be_written(server: TritonServer, body: dict[str, Any], what: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(server, "generate", **({"text_input": "a dog"} | body))
    with refused.value as answer:
        assert (answer.code, what in answer.read().decode()) == (400, True)


def test_converted_as_transformer_deploy_would_have_it(
    bundle: Bundle, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("converted")
    model, output = bundle.path.parent / "model", place / "models"
    words = ["-m", str(model), "-o", str(output), "--task", "text-generation", "--generative-model", "gpt", "--quiet"]
    with writer_bundles.timed_at_once():
        assert convert_model.run([*words, "--json"]) == 0
    with hasten.load(bundle.path, threads=1) as here:
        expected = here("a dog", return_full_text=False)[0]["generated_text"]
    program = tritonserver.find_program(pytestconfig, ["tokenizers", "msgspec", "onnxruntime"])
    with TritonServer(program, output, place) as server, Client(server.url) as client:
        found = client.infer("transformer_onnx_generate", {"TEXT": np.array(["a dog"], object)}, ["output"])
    assert found["output"].tolist() == [expected]


def test_check(
    bundle: Bundle,
    server: TritonServer,
    pytestconfig: pytest.Config,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As `--check` does: at an address, and on a server of its own."""
    environment = tritonserver.find_program(pytestconfig).environment
    for place, where in enumerate((f"127.0.0.1:{server.port}", str(environment))):
        words = ["deploy", "tritonserver", str(bundle.path), "-o", str(tmp_path / str(place)), "--threads", "1"]
        code = main([*words, "--check", where, "--json", "-q"])
        told = json.loads(capsys.readouterr().out)["check"]
        assert code == 0, told
        assert told["ready"] == ["transformer_onnx_generate"]
        assert told["verdict"]["agreement"]["flips"] == 0
        assert told["same_answers"] == 1.0
        assert (told["load"]["clients"], told["load"]["failed"]) == (CLIENTS, 0)
        assert told["load"]["requests"] == told["load"]["rows"] > CLIENTS


def test_check_of_another_model(server: TritonServer, repository: Repository, tmp_path: Path) -> None:
    """It is ready, and right in itself; but it writes something else than this bundle does."""
    model = writer_bundles.save(tmp_path / "model", seed=5)
    other = writer_bundles.build(model, tmp_path / "other")
    checked = check(other, repository, server.url, Silent(), seconds=0.1)
    assert checked.verdict is not None
    assert checked.verdict.passed
    assert checked.same_answers is not None
    assert checked.same_answers < 0.5
    assert not checked.is_right


@pytest.mark.parametrize("client", ["client_requests.py", "client_grpc.py"])
def test_the_clients_beside_it(server: TritonServer, repository: Repository, client: str) -> None:
    pytest.importorskip("tritonclient.grpc" if "grpc" in client else "requests")
    address = f"127.0.0.1:{server.grpc_port if 'grpc' in client else server.port}"
    command = [sys.executable, str(Path(repository.directory) / client), address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, bool(done.stdout.strip())) == (0, True), done.stderr
