"""Compare the server with NVIDIA's tritonserver, request by request, on the same graph and tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hasten.bundle import Bundle
from hasten.deploy.tritonserver.server_binary import TritonServer
from support.fakes import triton_backend
from support.fakes.triton_backend import Tensor
from support.fakes.triton_backend.requests import BAD, CALLED, CALLED_DIFFERENT, DIFFERENT, GOOD, LENGTH, HttpResponse
from support.server_process import Server

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")


@pytest.fixture(scope="module")
def bundle(tiny_classifier: Any, quick_build: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    target = tmp_path_factory.mktemp("bundles") / "classifier"
    return quick_build(tiny_classifier("bert"), target, variants=["onnxruntime-fp32"], seq_len=16, batch_size=1)


@pytest.fixture(scope="module")
def theirs(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    server_binary = triton_backend.find_program()
    folder = tmp_path_factory.mktemp("tritonserver")
    parameters = {
        "graph": str(bundle.path / "graph" / "model.onnx"),
        "tokenizer": str(bundle.path / "tokenizer" / "tokenizer.json"),
        "labels": json.dumps(["bad", "fair", "good"]),
    }
    logits, answer = Tensor("logits", "FP32", [-1, 3]), Tensor("answer", "STRING", [-1])
    ids = [Tensor(name, "INT64", [-1, -1]) for name in ("input_ids", "attention_mask")]
    triton_backend.add_model(
        folder / "models", "classifier", [Tensor("text", "STRING", [-1])], [logits, answer], parameters
    )
    triton_backend.add_model(folder / "models", "tokens", ids, [logits], parameters)
    with TritonServer(server_binary, folder / "models", folder) as started:
        yield started


@pytest.fixture(scope="module")
def ours(bundle: Bundle) -> Iterator[Server]:
    # In hasten one model takes both inputs; it is served under two names, as in tritonserver.
    tokens = bundle.path.parent / "tokens"
    shutil.copytree(bundle.path, tokens)
    started = Server(str(bundle.path), str(tokens), "--threads", "1", "--instances", "1")
    yield started
    code, errors = started.stop()
    assert code == 0, errors


def json_types(value: Any) -> Any:
    """Return the keys and types of a JSON value, recursively; the entries of a list without their order."""
    if isinstance(value, dict):
        return {key: json_types(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return sorted({json.dumps(json_types(entry), sort_keys=True) for entry in value})
    return "number" if type(value) in (int, float) else type(value).__name__


def tensors(answer: HttpResponse) -> dict[str, tuple[str, list[int], Any]]:
    """Return the outputs by name, since their order differs between the servers."""
    outputs, tail = {}, answer.tail
    for output in answer.json["outputs"]:
        name, kind = output["name"], output["datatype"]
        size = output.get("parameters", {}).get("binary_data_size")
        data, tail = (output["data"], tail) if size is None else (tail[:size], tail[size:])
        outputs[name] = (kind, output["shape"], values(name, kind, data))
    assert tail == b""
    return outputs


def values(name: str, kind: str, data: bytes | list[Any]) -> list[Any]:
    """Decode values from a list or the binary format; `answer` is JSON, so that its spelling does not matter."""
    if isinstance(data, bytes) and kind == "FP32":
        return np.frombuffer(data, "<f4").tolist()
    if isinstance(data, bytes):
        texts = []
        while data:
            end = 4 + int.from_bytes(data[:4], "little")
            texts.append(data[4:end].decode())
            data = data[end:]
        data = texts
    return [json.loads(entry) for entry in data] if name == "answer" else data


def assert_same(actual: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key in expected:
            assert_same(actual[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for entry, expected_entry in zip(actual, expected, strict=True):
            assert_same(entry, expected_entry)
    else:
        assert actual == (pytest.approx(expected, abs=1e-4) if isinstance(expected, float) else expected)


@pytest.mark.parametrize("name", GOOD)
def test_valid_requests_are_answered_like_tritonserver(theirs: TritonServer, ours: Server, name: str) -> None:
    mine, other = GOOD[name].send(ours.port), GOOD[name].send(theirs.port)
    assert (mine.status, other.status) == (200, 200), (mine, other)
    if not other.content:
        assert not mine.content
        return
    assert mine.headers["content-type"] == other.headers["content-type"]
    assert (LENGTH.lower() in mine.headers) == (LENGTH.lower() in other.headers)
    assert json_types(mine.json) == json_types(other.json)
    if isinstance(mine.json, dict) and "model_name" in mine.json:
        actual, expected = tensors(mine), tensors(other)
        assert set(actual) == set(expected)
        for output in expected:
            assert_same(actual[output], expected[output])
        assert {**mine.json, "outputs": []} == {**other.json, "outputs": []}


def test_model_metadata_and_index_match_tritonserver(theirs: TritonServer, ours: Server) -> None:
    mine, other = (GOOD["a model"].send(port).json for port in (ours.port, theirs.port))
    assert {**mine, "platform": ""} == {**other, "platform": ""}
    mine, other = (GOOD["the index"].send(port).json for port in (ours.port, theirs.port))
    assert mine == other


@pytest.mark.parametrize("name", BAD)
def test_invalid_requests_are_rejected_like_tritonserver(theirs: TritonServer, ours: Server, name: str) -> None:
    mine, other = BAD[name].send(ours.port), BAD[name].send(theirs.port)
    expected = DIFFERENT.get(name, (other.status, other.status, ""))[:2]
    assert (other.status, mine.status) == expected, (other, mine)
    assert 400 <= mine.status < 500
    assert json_types(mine.json) == json_types(other.json) == {"error": "str"}


@pytest.mark.parametrize("name", CALLED)
def test_grpc_calls_are_answered_like_tritonserver(theirs: TritonServer, ours: Server, name: str) -> None:
    grpc, client = pytest.importorskip("grpc"), pytest.importorskip("tritonclient.grpc")
    method, arguments = CALLED[name]
    request = getattr(client.service_pb2, f"{method}Request")(**arguments)
    codes, answers = [], []
    for port in (theirs.grpc_port, ours.grpc_port):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = client.service_pb2_grpc.GRPCInferenceServiceStub(channel)
            try:
                answers.append(getattr(stub, method)(request, timeout=30))
                codes.append("OK")
            except grpc.RpcError as error:
                answers.append(error.details())
                codes.append(error.code().name)
    same = (codes[0], codes[0], "")
    assert tuple(codes) == CALLED_DIFFERENT.get(name, same)[:2], answers
    if codes == ["OK", "OK"]:
        other, mine = answers
        if method == "ModelInfer":
            assert_same(sorted(contents(mine)), sorted(contents(other)))
        elif method == "ModelMetadata":
            mine.platform = other.platform
        assert mine == other


def contents(answer: Any) -> list[tuple[Any, ...]]:
    """Remove the outputs from a response and return them."""
    pairs = zip(answer.outputs, answer.raw_output_contents, strict=True)
    outputs = [
        (output.name, output.datatype, list(output.shape), values(output.name, output.datatype, data))
        for output, data in pairs
    ]
    del answer.outputs[:], answer.raw_output_contents[:]
    return outputs
