"""A `hasten serve` process: responses in each protocol, API keys and shutdown."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openapi_spec_validator
import pytest

import hasten
from hasten.bundle import Bundle
from support.server_process import Server

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")
pytestmark = pytest.mark.usefixtures("workers")
TEXT = "one answer"


@pytest.fixture(scope="module")
def embedder(tiny_embedder: Any, quick_build: Any, tmp_path_factory: Any) -> Bundle:
    return quick_build(
        tiny_embedder(), tmp_path_factory.mktemp("serve") / "embedder", data=None, variants=["onnxruntime-fp32"]
    )


@pytest.fixture(scope="module")
def server(classifier: Bundle, embedder: Bundle, workers: int) -> Iterator[Server]:
    started = Server(str(classifier.path), str(embedder.path), "--threads", "1", "--workers", str(workers))
    yield started
    code, errors = started.stop()
    assert code == 0, errors
    assert "Traceback" not in errors


def flatten(answers: Any) -> list[Any]:
    return [entry for answer in answers for entry in (answer if isinstance(answer, list) else [answer])]


def test_predict_gives_same_answers_as_in_process(server: Server, classifier: Bundle) -> None:
    expected = hasten.load(classifier.path, threads=1)
    for inputs, parameters in ((TEXT, {}), ([TEXT, "another"], {"top_k": None})):
        body = {"inputs": inputs, "parameters": parameters, "model": "classifier"}
        ours, theirs = server.json("POST", "/predict", body), expected(inputs, **parameters)
        assert [entry["label"] for entry in flatten(ours)] == [entry["label"] for entry in flatten(theirs)]
        assert [entry["score"] for entry in flatten(ours)] == pytest.approx(
            [entry["score"] for entry in flatten(theirs)]
        )
    assert server.json("POST", "/models/classifier", {"inputs": TEXT}) == server.json(
        "POST", "/predict", {"inputs": TEXT, "model": "classifier"}
    )


def test_v2_json_and_binary_outputs_are_equal(server: Server, classifier: Bundle) -> None:
    texts = [TEXT, "ein Wort mit Ü"]
    tensor = {"name": "text", "datatype": "BYTES", "shape": [2], "data": texts}
    answer = server.json("POST", "/v2/models/classifier/infer", {"inputs": [tensor], "id": "7"})
    logits, decoded = answer["outputs"]
    assert (answer["id"], logits["name"], logits["datatype"], logits["shape"]) == ("7", "logits", "FP32", [2, 3])
    expected = hasten.load(classifier.path, threads=1)(texts)
    assert [json.loads(entry)["label"] for entry in decoded["data"]] == [entry["label"] for entry in expected]

    blob = b"".join(len(text.encode()).to_bytes(4, "little") + text.encode() for text in texts)
    head = json.dumps(
        {
            "inputs": [
                {"name": "text", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": len(blob)}}
            ],
            "outputs": [{"name": "logits", "parameters": {"binary_data": True}}],
        }
    ).encode()
    status, headers, content = server.ask(
        "POST", "/v2/models/classifier/infer", head + blob, Inference_Header_Content_Length=str(len(head))
    )
    assert status == 200, content
    length = int(headers["inference-header-content-length"])
    values = np.frombuffer(content[length:], "<f4").reshape(2, 3)
    np.testing.assert_allclose(values.ravel(), logits["data"], rtol=1e-6)


def test_v2_token_ids_get_same_logits_as_text(server: Server, classifier: Bundle) -> None:
    batch = classifier.tokenizer().encode([TEXT]).batch
    ids = batch.values["input_ids"].tolist()
    padded = [[*ids, 0, 0], [*ids[:3], *[0] * (len(ids) - 1)]]
    mask = [[1] * len(ids) + [0, 0], [1] * 3 + [0] * (len(ids) - 1)]
    shape = [2, len(ids) + 2]
    inputs = [
        {"name": "input_ids", "datatype": "INT64", "shape": shape, "data": padded},
        {"name": "attention_mask", "datatype": "INT64", "shape": shape, "data": mask},
    ]
    answer = server.json("POST", "/v2/models/classifier/infer", {"inputs": inputs})
    text = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [TEXT]}
    same = server.json("POST", "/v2/models/classifier/infer", {"inputs": [text]})
    assert answer["outputs"][0]["data"][:3] == pytest.approx(same["outputs"][0]["data"], abs=1e-5)


def test_openai_and_tei_embeddings_equal_in_process(server: Server, embedder: Bundle) -> None:
    expected = hasten.load(embedder.path, threads=1)([TEXT, "another"])
    body = {"input": [TEXT, "another"], "model": "embedder"}
    answer = server.json("POST", "/v1/embeddings", body)
    np.testing.assert_allclose([entry["embedding"] for entry in answer["data"]], expected, atol=1e-6)
    assert answer["usage"]["total_tokens"] > 4
    short = server.json("POST", "/v1/embeddings", {**body, "encoding_format": "base64", "dimensions": 4})
    vector = np.frombuffer(base64.b64decode(short["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(vector, expected[0][:4] / np.linalg.norm(expected[0][:4]), atol=1e-6)
    np.testing.assert_allclose(server.json("POST", "/embed", {"inputs": [TEXT, "another"]}), expected, atol=1e-6)
    assert {entry["id"] for entry in server.json("GET", "/v1/models")["data"]} == {"classifier", "embedder"}
    assert server.json("GET", "/v1/models/embedder")["id"] == "embedder"
    status, _, content = server.ask("GET", "/v1/models/missing")
    assert (status, json.loads(content)["error"]["code"]) == (404, "model_not_found")


def test_health_metadata_metrics_and_docs_are_served(server: Server) -> None:
    assert server.ask("GET", "/v2/health/live")[0] == server.ask("HEAD", "/v2/health/ready")[0] == 200
    metadata = server.json("GET", "/v2/models/embedder")
    assert [entry["name"] for entry in metadata["inputs"]] == ["text"]
    assert "hasten_batch_rows" in server.ask("GET", "/metrics")[2].decode()
    document = server.json("GET", "/openapi.json")
    assert "/v2/models/{model}/infer" in document["paths"]
    assert b"/v1/embeddings" in server.ask("GET", "/docs")[2]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/predict", {"inputs": TEXT}, 400, "more than one model"),
        ("/predict", {"inputs": 5, "model": "classifier"}, 400, "not a string"),
        ("/predict", {"inputs": "", "model": "classifier"}, 400, "empty"),
        ("/predict", {"inputs": TEXT, "model": "missing"}, 404, "model 'missing' not found"),
        ("/predict", {"inputs": TEXT, "model": "classifier", "parameters": {"topk": 1}}, 400, "top_k"),
        ("/predict", b"{", 400, "not JSON"),
        ("/predict", b"\xff\xfe", 400, "not JSON"),
        ("/v1/embeddings", {"input": TEXT, "model": "classifier"}, 400, "does not support embeddings"),
        ("/v1/embeddings", {"input": TEXT, "dimensions": 10**6}, 400, "dimensions"),
        ("/nothing", {}, 404, "no route for"),
        ("/metrics", {}, 405, "supported: GET"),
        ("/v2/models/classifier/infer", {"inputs": []}, 400, "missing"),
        (
            "/v2/models/classifier/infer",
            {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [2], "data": ["a"]}]},
            400,
            "1 values",
        ),
        (
            "/v2/models/classifier/infer",
            {"inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [1, 1], "data": [10**9]}]},
            400,
            "token id",
        ),
        (
            "/v2/models/classifier/infer",
            {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 9}}]},
            400,
            "9 bytes",
        ),
    ],
)
def test_invalid_requests_are_rejected_with_reason(
    server: Server, path: str, body: Any, status: int, message: str
) -> None:
    actual, _, content = server.ask("POST", path, body)
    assert (actual, message in str(json.loads(content)["error"])) == (status, True), content


def test_invalid_http_is_rejected_and_server_survives(server: Server) -> None:
    for sent in (b"\x16\x03\x01nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 400 + b"\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
            raw.sendall(sent)
            assert raw.recv(100).startswith(b"HTTP/1.1 4")
    assert server.ask("GET", "/v2/health/ready")[0] == 200


def test_too_large_body_is_rejected(classifier: Bundle) -> None:
    started = Server(str(classifier.path), "--max-body", "1KB", "--threads", "1")
    status, _, content = started.ask("POST", "/predict", {"inputs": "a" * 5000})
    assert (status, b"larger than" in content) == (413, True)
    assert started.stop()[0] == 0


def test_requests_need_a_known_api_key(classifier: Bundle, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\nfirst\n")
    started = Server(str(classifier.path), "--api-key-file", str(tmp_path / "keys"), HASTEN_API_KEYS="second")
    assert started.ask("GET", "/v2/health/ready")[0] == 200
    assert started.ask("POST", "/predict", {"inputs": TEXT})[0] == 401
    for key in ("first", "second"):
        assert started.ask("POST", "/predict", {"inputs": TEXT}, Authorization=f"Bearer {key}")[0] == 200
    assert started.ask("POST", "/predict", {"inputs": TEXT}, Authorization="Bearer other")[0] == 401
    # A large body of a client without a key is not read.
    for line, sent, status in (
        ("POST /predict", "content-length: 1000000", 401),
        ("POST /v1/embeddings", "transfer-encoding: chunked", 401),
        ("GET /health", "content-length: 1000000", 413),
        ("POST /nothing", "content-length: 1000000", 404),
    ):
        with socket.create_connection(("127.0.0.1", started.port), timeout=20) as raw:
            raw.sendall(f"{line} HTTP/1.1\r\nhost: x\r\n{sent}\r\n\r\n".encode())
            assert raw.recv(2**16).startswith(f"HTTP/1.1 {status}".encode()), line
    assert started.stop()[0] == 0


def test_unauthorized_answers_do_not_depend_on_models(classifier: Bundle) -> None:
    started = Server(str(classifier.path), "--no-grpc", HASTEN_API_KEYS="secret")
    document = json.loads(started.ask("GET", "/openapi.json", Authorization="Bearer secret")[2])
    assert document["components"]["securitySchemes"] == {"apiKey": {"type": "http", "scheme": "bearer"}}
    assert document["security"] == [{"apiKey": []}]
    openapi_spec_validator.validate(document)
    open_paths = set()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            answers = [
                (status, content)
                for model in (classifier.path.name, "absent")
                for body in (None, {"model": model}, {"model": model, "inputs": "a" * 100_000})
                for status, _, content in [
                    started.ask(
                        method.upper(), path.format(model=model, version="1"), body if method == "post" else None
                    )
                ]
            ]
            is_open = operation.get("security") == []
            open_paths |= {path} if is_open else set()
            assert {status for status, _ in answers} == ({200} if is_open else {401}), (method, path, answers)
            assert len(set(answers)) == 1, (method, path, answers)
    assert open_paths == {"/v2/health/live", "/v2/health/ready", "/health"}
    for path in ("/v2/models/classifier/nothing", "/v2/models/absent/nothing"):
        assert started.ask("GET", path)[0] == 404
    assert started.stop()[0] == 0


def test_accepted_requests_are_answered_when_server_stops(classifier: Bundle) -> None:
    started = Server(str(classifier.path), "--threads", "1")
    answered: list[int] = []
    disconnects: list[str] = []
    lock = threading.Lock()

    def client() -> None:
        connection = started.connect()
        while True:
            try:
                connection.request("POST", "/predict", json.dumps({"inputs": [TEXT] * 8}))
                status = connection.getresponse().read() and 200
            except (http.client.RemoteDisconnected, ConnectionError) as error:
                # Closed between two requests, or rejected: never after a request was accepted.
                with lock:
                    disconnects.append(type(error).__name__)
                return
            with lock:
                answered.append(status)

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    while len(answered) < 50:
        time.sleep(0.01)
    code, errors = started.stop()
    for thread in threads:
        thread.join(20)
    assert code == 0, errors
    assert set(answered) == {200}
    assert len(disconnects) == 8


def test_bundles_of_same_name_are_rejected(classifier: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    from hasten.cli import main

    assert main(["serve", str(classifier.path), str(classifier.path), "--port", "0"]) == 2
    assert "two bundles are named 'classifier'" in capsys.readouterr().err
