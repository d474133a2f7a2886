"""The v2 protocol, request by request, against NVIDIA's own tritonserver with the same graph and tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tritonserver
from hasten.bundle import Bundle
from hasten.deploy.tritonserver.program import TritonServer
from serving import Server
from tritonserver import Tensor
from tritonserver.requests import BAD, CALLED, CALLED_DIFFERENT, DIFFERENT, GOOD, LENGTH, Answered

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")


@pytest.fixture(scope="module")
def bundle(tiny_classifier: Any, quick_build: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    target = tmp_path_factory.mktemp("bundles") / "classifier"
    return quick_build(tiny_classifier("bert"), target, variants=["onnxruntime-fp32"], seq_len=16, batch_size=1)


@pytest.fixture(scope="module")
def theirs(
    bundle: Bundle, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    program = tritonserver.find_program(pytestconfig)
    place = tmp_path_factory.mktemp("tritonserver")
    about = {
        "graph": str(bundle.path / "graph" / "model.onnx"),
        "tokenizer": str(bundle.path / "tokenizer" / "tokenizer.json"),
        "labels": json.dumps(["bad", "fair", "good"]),
    }
    logits, answer = Tensor("logits", "FP32", [-1, 3]), Tensor("answer", "STRING", [-1])
    ids = [Tensor(name, "INT64", [-1, -1]) for name in ("input_ids", "attention_mask")]
    tritonserver.add_model(place / "models", "classifier", [Tensor("text", "STRING", [-1])], [logits, answer], about)
    tritonserver.add_model(place / "models", "tokens", ids, [logits], about)
    with TritonServer(program, place / "models", place) as started:
        yield started


@pytest.fixture(scope="module")
def ours(bundle: Bundle) -> Iterator[Server]:
    # For us one model takes both; here it has two names, as it has there.
    tokens = bundle.path.parent / "tokens"
    shutil.copytree(bundle.path, tokens)
    started = Server(str(bundle.path), str(tokens), "--threads", "1", "--instances", "1")
    yield started
    code, errors = started.stop()
    assert code == 0, errors


def kinds(value: Any) -> Any:
    """Keys and types, all the way down; of a list those of its entries, whatever their order."""
    if isinstance(value, dict):
        return {key: kinds(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return sorted({json.dumps(kinds(entry), sort_keys=True) for entry in value})
    return "number" if type(value) in (int, float) else type(value).__name__


def tensors(answer: Answered) -> dict[str, tuple[str, list[int], Any]]:
    """By name: there is no order that both would keep."""
    found, tail = {}, answer.tail
    for output in answer.json["outputs"]:
        name, kind = output["name"], output["datatype"]
        size = output.get("parameters", {}).get("binary_data_size")
        data, tail = (output["data"], tail) if size is None else (tail[:size], tail[size:])
        found[name] = (kind, output["shape"], values(name, kind, data))
    assert tail == b""
    return found


def values(name: str, kind: str, data: bytes | list[Any]) -> list[Any]:
    """From a list, or from the binary form; `answer` is JSON, which has more than one way to be written."""
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


def assert_same(mine: Any, other: Any) -> None:
    if isinstance(other, dict):
        assert list(mine) == list(other)
        for key in other:
            assert_same(mine[key], other[key])
    elif isinstance(other, list | tuple):
        assert len(mine) == len(other)
        for one, another in zip(mine, other, strict=True):
            assert_same(one, another)
    else:
        assert mine == (pytest.approx(other, abs=1e-4) if isinstance(other, float) else other)


@pytest.mark.parametrize("name", GOOD)
def test_good_requests(theirs: TritonServer, ours: Server, name: str) -> None:
    mine, other = GOOD[name].send(ours.port), GOOD[name].send(theirs.port)
    assert (mine.status, other.status) == (200, 200), (mine, other)
    if not other.content:
        assert not mine.content
        return
    assert mine.headers["content-type"] == other.headers["content-type"]
    assert (LENGTH.lower() in mine.headers) == (LENGTH.lower() in other.headers)
    assert kinds(mine.json) == kinds(other.json)
    if isinstance(mine.json, dict) and "model_name" in mine.json:
        found, expected = tensors(mine), tensors(other)
        assert set(found) == set(expected)
        for output in expected:
            assert_same(found[output], expected[output])
        assert {**mine.json, "outputs": []} == {**other.json, "outputs": []}


def test_what_a_model_says_about_itself(theirs: TritonServer, ours: Server) -> None:
    mine, other = (GOOD["a model"].send(port).json for port in (ours.port, theirs.port))
    assert {**mine, "platform": ""} == {**other, "platform": ""}
    mine, other = (GOOD["the index"].send(port).json for port in (ours.port, theirs.port))
    assert mine == other


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(theirs: TritonServer, ours: Server, name: str) -> None:
    mine, other = BAD[name].send(ours.port), BAD[name].send(theirs.port)
    expected = DIFFERENT.get(name, (other.status, other.status, ""))[:2]
    assert (other.status, mine.status) == expected, (other, mine)
    assert 400 <= mine.status < 500
    assert kinds(mine.json) == kinds(other.json) == {"error": "str"}


@pytest.mark.parametrize("name", CALLED)
def test_calls(theirs: TritonServer, ours: Server, name: str) -> None:
    grpc, client = pytest.importorskip("grpc"), pytest.importorskip("tritonclient.grpc")
    method, about = CALLED[name]
    request = getattr(client.service_pb2, f"{method}Request")(**about)
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
    """Of an answer, taken out of it."""
    pairs = zip(answer.outputs, answer.raw_output_contents, strict=True)
    found = [(one.name, one.datatype, list(one.shape), values(one.name, one.datatype, data)) for one, data in pairs]
    del answer.outputs[:], answer.raw_output_contents[:]
    return found
