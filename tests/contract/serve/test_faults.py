"""Faults around a `hasten serve` process: bad clients, invalid requests, overload, signals, endurance."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hasten.bundle import Bundle
from support.server_process import Server
from support.wait import wait_until

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")
pytestmark = pytest.mark.usefixtures("workers")
TEXT = "one answer"
INFER = "/v2/models/classifier/infer"


@pytest.fixture(scope="module")
def server(classifier: Bundle, workers: int) -> Iterator[Server]:
    words = ("--threads", "1", "--no-grpc", "--read-timeout", "2s", "--workers", str(workers))
    started = Server(str(classifier.path), *words)
    yield started
    code, errors = started.stop()
    assert code == 0, errors
    assert "Traceback" not in errors


def request(body: Any, path: str = "/predict", *headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(data)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def receive_all(client_socket: socket.socket) -> bytes:
    received = b""
    while data := client_socket.recv(2**16):
        received += data
    return received


def count(server: Server, metric: str) -> float:
    text = server.ask("GET", "/metrics")[2].decode()
    return sum(float(value) for value in re.findall(rf"^{metric}{{.*}} (\S+)$", text, re.MULTILINE))


# Clients that are slow, disconnect, or half-close


def test_request_sent_byte_by_byte_is_answered(server: Server) -> None:
    with connect(server) as client_socket:
        client_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in request({"inputs": TEXT}, "/predict", "connection: close"):
            client_socket.sendall(bytes([byte]))
        assert b'"label"' in receive_all(client_socket)


@pytest.mark.parametrize("partial", [b"POST /predict HTT", request({"inputs": TEXT})[:-1]])
def test_incomplete_request_gets_408(server: Server, partial: bytes) -> None:
    with connect(server) as client_socket:
        client_socket.sendall(partial)
        assert server.ask("POST", "/predict", {"inputs": TEXT})[0] == 200
        begin = time.monotonic()
        received = receive_all(client_socket)
    assert received.startswith(b"HTTP/1.1 408 ")
    assert 1 < time.monotonic() - begin < 30


def test_half_closed_client_is_answered(server: Server) -> None:
    with connect(server) as client_socket:
        client_socket.sendall(request({"inputs": [TEXT] * 500}))
        client_socket.shutdown(socket.SHUT_WR)
        received = receive_all(client_socket)
    final = received[received.rindex(b"HTTP/1.1") :]
    head, _, body = final.partition(b"\r\n\r\n")
    assert (head.split()[1], len(json.loads(body))) == (b"200", 500)


def test_work_of_disconnected_clients_is_cancelled(classifier: Bundle) -> None:
    words = ("--threads", "1", "--instances", "1", "--no-grpc", "--max-queue-time", "10m")
    started = Server(str(classifier.path), *words)
    large = {"inputs": [" ".join([TEXT] * 12)] * 1000}
    assert started.ask("POST", "/predict", large)[0] == 200
    before = count(started, "hasten_prompt_tokens_total")
    clients = [connect(started) for _ in range(40)]
    for client in clients:
        client.sendall(request(large))
    for client in clients:
        client.close()
    assert started.ask("POST", "/predict", {"inputs": TEXT})[0] == 200
    computed = count(started, "hasten_prompt_tokens_total") - before
    assert computed < 0.7 * 40 * before
    assert started.stop()[0] == 0


# Invalid requests


def tensor(name: str = "text", datatype: str = "BYTES", shape: Any = (1,), **fields: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape), **fields}


def binary_tensor(size: Any, **fields: Any) -> dict[str, Any]:
    return tensor(parameters={"binary_data_size": size}, **fields)


def ids(**fields: Any) -> list[dict[str, Any]]:
    return [tensor("input_ids", "INT64", (1, 2), data=[2, 3]), tensor(**fields)]


@pytest.mark.parametrize(
    ("length", "inputs", "tail", "message"),
    [
        ("0", [], b"", "not JSON"),
        ("-1", [], b"", "the body has"),
        ("1e3", [], b"", "the body has"),
        ("999999", [], b"", "the body has"),
        ("9" * 5000, [], b"", "the body has"),
        (None, [binary_tensor(4)], b"\0\0\0\0", "not JSON"),
        ("=", [binary_tensor(4)], b"\xff\xff\xff\xff", "in the middle of a string"),
        ("=", [binary_tensor(3)], b"\0\0\0", "in the middle of a string"),
        ("=", [binary_tensor(6)], b"\2\0\0\0\xff\xfe", "not UTF-8"),
        ("=", [binary_tensor(10**9)], b"\0\0\0\0", "but the rest of the body has"),
        ("=", [binary_tensor(-4)], b"\0\0\0\0", "but the rest of the body has"),
        ("=", [binary_tensor("4")], b"\0\0\0\0", "but the rest of the body has"),
        ("=", [binary_tensor(5)], b"\1\0\0\0aEXTRA", "do not belong to an input"),
        ("=", [binary_tensor(7, name="input_ids", datatype="INT64")], b"\0" * 7, "has 7 bytes"),
        ("=", [binary_tensor(8, name="input_ids", datatype="INT64", shape=[2**40, 2**40])], b"\0" * 8, "invalid shape"),
    ],
)
def test_malformed_binary_tensors_are_rejected(
    server: Server, length: str | None, inputs: Any, tail: bytes, message: str
) -> None:
    head = json.dumps({"inputs": inputs}).encode()
    headers = {} if length is None else {"Inference_Header_Content_Length": str(len(head)) if length == "=" else length}
    status, _, content = server.ask("POST", INFER, head + tail, **headers)
    assert (status, message in json.loads(content)["error"]) == (400, True), content


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([tensor(shape=[1] * 70, data=[TEXT])], "invalid shape"),
        ([tensor(shape=[0, 2**70], data=[])], "invalid shape"),
        ([tensor(shape=[-1], data=[TEXT])], "invalid shape"),
        ([tensor(shape=[2, 2], data=[TEXT] * 4)], "[n] or [n, 1]"),
        ([tensor(shape=[0], data=[])], "empty"),
        ([tensor(data=[5])], "not all of its values are strings"),
        ([tensor(datatype="INT32", data=[5])], "must be BYTES"),
        ([tensor(datatype="TEXT", data=[TEXT])], "supported: BYTES"),
        ([tensor(name="texts", data=[TEXT])], "no input 'texts'"),
        ([tensor(data=[TEXT]), tensor(data=[TEXT])], "occurs twice"),
        ([tensor(data=[TEXT]), tensor(name="text_pair", shape=[2], data=[TEXT] * 2)], "different numbers"),
        ([tensor(data=json.loads("[" * 50 + "]" * 50))], "nested too deeply"),
        ([tensor(name="input_ids", datatype="FP32", shape=[1, 2], data=[2, 3])], "must be integers"),
        ([tensor(name="input_ids", datatype="INT64", shape=[2], data=[2, 3])], "must be integers"),
        ([tensor(name="input_ids", datatype="INT64", shape=[1, 1], data=[10**30])], "not valid INT64"),
        ([tensor(name="input_ids", datatype="UINT8", shape=[1, 1], data=[-1])], "not valid UINT8"),
        ([tensor(name="input_ids", datatype="INT64", shape=[1, 1], data=[{"a": 1}])], "is INT64, but not all"),
        ([tensor(name="input_ids", datatype="INT64", shape=[0, 0], data=[])], "empty"),
        (ids(name="attention_mask", datatype="INT64", shape=[1, 2], data=[0, 1]), "ones, then zeros"),
        (ids(name="attention_mask", datatype="INT64", shape=[1, 2], data=[0, 0]), "ones, then zeros"),
        (ids(name="attention_mask", datatype="INT64", shape=[2, 1], data=[1, 1]), "same shape"),
        (ids(name="token_type_ids", datatype="INT64", shape=[1, 2], data=[0, 10**6]), "token type"),
        (ids(name="token_type_ids", datatype="INT64", shape=[1, 2], data=[-1, 0]), "token type"),
        ([tensor(name="input_ids", datatype="INT64", shape=[1, 5000], data=[2] * 5000)], "tokens, but the model"),
    ],
)
def test_invalid_tensors_are_rejected(server: Server, inputs: Any, message: str) -> None:
    status, _, content = server.ask("POST", INFER, {"inputs": inputs})
    assert (status, message in json.loads(content)["error"]) == (400, True), content


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (INFER, {"inputs": [tensor(data=[TEXT])], "parameters": {"timeout": 10**400}}, 400),
        (INFER, {"inputs": [tensor(data=[TEXT])], "parameters": {"priority": 10**400}}, 400),
        (INFER, {"inputs": [tensor(data=[TEXT])], "parameters": {"timeout": "soon"}}, 400),
        (INFER, {"inputs": [tensor(data=[TEXT]), tensor("text_pair", data=["[" * 9000])]}, 200),
        (INFER, {"inputs": [tensor(data=[TEXT])], "outputs": [{"name": "nothing"}]}, 400),
        ("/predict", b'{"inputs": "\\ud800"}', 400),
        ("/predict", b'{"inputs": ' + b"[" * 10_000, 400),
        ("/predict", b'{"inputs": ' + b"[" * 100_000, 413),
        ("/predict", b'{"inputs": "\\u0000"}', 200),
        ("/predict", {"inputs": "a " * 10**5}, 200),
        ("/predict", {"inputs": ["a " * 10**6, {"text": "a " * 10**6}]}, 413),
        ("/predict", {"inputs": [TEXT] * 1025}, 413),
        ("/predict", {"inputs": TEXT, "parameters": {"top_k": 10**400}}, 200),
        ("/models/none", {"inputs": TEXT}, 404),
        ("/models/class%69fier", {"inputs": TEXT}, 200),
        ("/models/%FF%00%2F", {"inputs": TEXT}, 404),
        ("/v2/models/classifier/versions/2/infer", {"inputs": [tensor(data=[TEXT])]}, 404),
        ("/v2/models/classifier", {}, 405),
        ("/v2/repository/models/none/load", {}, 403),
        ("/v2/repository/models/classifier/unload", {}, 403),
        ("/v2/repository/index", {}, 200),
    ],
)
def test_status_of_odd_requests(server: Server, path: str, body: Any, status: int) -> None:
    actual, headers, content = server.ask("POST", path, body)
    assert actual == status, content[:300]
    assert ("allow" in headers) == (status == 405)


# Overload


def test_overload_is_rejected_with_429(classifier: Bundle) -> None:
    limit = 16
    words = ("--threads", "1", "--no-grpc", "--max-queue", str(limit))
    started = Server(str(classifier.path), *words)
    whole = request({"inputs": [TEXT] * 100}, "/predict", "connection: close")
    clients = [connect(started) for _ in range(10 * limit)]
    for client in clients:
        client.sendall(whole)
    answers = []
    for client in clients:
        with client:
            answers.append(receive_all(client))
    rejected = [answer for answer in answers if answer.startswith(b"HTTP/1.1 429 ")]
    accepted = [answer for answer in answers if answer.startswith(b"HTTP/1.1 200 ")]
    assert len(rejected) + len(accepted) == len(answers)
    assert len(accepted) >= limit
    assert rejected
    for answer in rejected:
        waiting = int(re.search(rb"open requests: (\d+)", answer)[1])
        assert waiting <= limit
        assert b"retry-after: " in answer
    assert all(answer.count(b'"label"') == 100 for answer in accepted)
    assert started.ask("POST", "/predict", {"inputs": TEXT})[0] == 200
    assert count(started, "hasten_rejected_total") == len(rejected)
    code, errors = started.stop()
    assert (code, "Traceback" in errors) == (0, False)


def test_large_body_does_not_delay_health_checks(classifier: Bundle) -> None:
    """Half a million numbers in JSON take a good part of a second to parse."""
    started = Server(str(classifier.path), "--threads", "1", "--no-grpc")
    rows, length = 1000, 500
    data = [2] * (rows * length)
    large = request({"inputs": [tensor("input_ids", "INT64", (rows, length), data=data)]}, INFER)
    answers: list[bytes] = []
    is_done = threading.Event()

    def send_large_bodies() -> None:
        with connect(started) as client_socket:
            while not is_done.is_set():
                client_socket.sendall(large)
                answers.append(client_socket.recv(2**16))

    thread = threading.Thread(target=send_large_bodies)
    thread.start()
    longest = 0.0
    try:
        wait_until(lambda: bool(answers), "the answer to a large body")
        for _ in range(20):
            begin = time.monotonic()
            assert started.ask("GET", "/health")[0] == 200
            longest = max(longest, time.monotonic() - begin)
    finally:
        is_done.set()
        thread.join()
    # Its rows are longer than the model supports, which is known once it is parsed.
    assert {answer[:12] for answer in answers} == {b"HTTP/1.1 400"}
    assert longest < 5
    assert started.stop()[0] == 0


# Shutdown


def test_every_recorded_response_arrives_during_shutdown(classifier: Bundle) -> None:
    started = Server(str(classifier.path), "--threads", "1", "--no-grpc", "--log-format", "json")
    answers: list[int] = []
    lock = threading.Lock()

    def client() -> None:
        with connect(started) as client_socket:
            while True:
                try:
                    client_socket.sendall(request({"inputs": [TEXT] * 20}) * 3)
                    received = b""
                    while received.count(b"HTTP/1.1") < 3 or not received.endswith(b"]"):
                        data = client_socket.recv(2**16)
                        received += data
                        if not data:
                            break
                except ConnectionError:
                    received = b""
                statuses = [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]]
                with lock:
                    answers.extend(statuses)
                if len(statuses) < 3 or b"connection: close" in received:
                    return

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(answers) > 60)
    code, errors = started.stop()
    for thread in threads:
        thread.join(60)
    assert code == 0, errors
    answered = [entry for line in errors.splitlines() if "status" in (entry := json.loads(line))]
    assert {entry["status"] for entry in answered} == {200}
    assert answers == [200] * len(answered)


def test_server_restarts_on_same_port_after_kill(classifier: Bundle) -> None:
    words = (str(classifier.path), "--threads", "1", "--no-grpc")
    first = Server(*words)
    with connect(first) as client_socket:
        client_socket.sendall(request({"inputs": TEXT}))
        assert client_socket.recv(2**16).startswith(b"HTTP/1.1 200 ")
        first.process.send_signal(signal.SIGKILL)
        first.process.communicate(timeout=30)
        assert first.process.returncode == -signal.SIGKILL
        with pytest.raises(ConnectionRefusedError):
            connect(first)
        second = Server(*words, "--port", str(first.port))
        assert second.port == first.port
        assert second.ask("POST", "/predict", {"inputs": TEXT})[0] == 200
    assert second.stop()[0] == 0


# Endurance


def memory_bytes(server: Server) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_does_not_grow(classifier: Bundle) -> None:
    started = Server(str(classifier.path), "--threads", "1", "--no-grpc")
    ahead = 50
    many = request({"inputs": TEXT}) * ahead

    def ask(times: int) -> None:
        with connect(started) as client_socket:
            for _ in range(times // ahead):
                client_socket.sendall(many)
                received = b""
                while received.count(b"HTTP/1.1 200") < ahead or not received.endswith(b"]"):
                    received += client_socket.recv(2**16)

    def disconnect(times: int) -> None:
        for index in range(times):
            with connect(started) as client_socket:
                client_socket.sendall(many[: len(many) // (1 + index % 3)])

    ask(2_000)
    disconnect(200)
    before = memory_bytes(started)
    ask(20_000)
    disconnect(2_000)
    ask(ahead)
    wait_until(lambda: started.ask("GET", "/health")[0] == 200)
    assert memory_bytes(started) - before < 48 * 2**20
    code, errors = started.stop()
    assert (code, "Traceback" in errors) == (0, False)
