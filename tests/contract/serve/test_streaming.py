"""Streamed generation while clients disconnect, deadlines pass, models are replaced and the server stops."""

from __future__ import annotations

import http.client
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hasten.bundle import Bundle
from support.server_process import Server
from support.wait import wait_until

openai = pytest.importorskip("openai", reason="openai is not installed")
pytest.importorskip("uvloop", reason="serving needs hasten[serve]")
# Takes some seconds.
LONG = {"model": "generator", "prompt": "the cat sat on", "max_tokens": 2000, "stream": True}


class StreamReader:
    """A client of one stream."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        self.connection = server.connect()
        self.connection.request("POST", "/v1/completions", json.dumps(body).encode())
        self.response: http.client.HTTPResponse | None = None
        self.content = b""

    def start(self) -> StreamReader:
        """Wait for the first part."""
        self.response = self.connection.getresponse()
        assert self.response.status == 200, self.response.read()
        self.content += self.response.read1(100)
        assert self.content
        return self

    def rest(self) -> list[str]:
        """Return all events; an incomplete response raises."""
        assert self.response is not None
        self.content += self.response.read()
        return self.content.decode().split("\n\n")

    def disconnect(self) -> None:
        if self.response is not None:
            self.response.close()
        self.connection.close()


def joined_text(events: list[str]) -> str:
    assert events[-2:] == ["data: [DONE]", ""], events[-3:]
    return "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2])


def metric(server: Server, name: str) -> float:
    text = server.ask("GET", "/metrics")[2].decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


@pytest.fixture
def open_stream() -> Iterator[Callable[..., StreamReader]]:
    readers: list[StreamReader] = []

    def open_stream(server: Server, **changes: Any) -> StreamReader:
        readers.append(StreamReader(server, {**LONG, **changes}))
        return readers[-1]

    yield open_stream
    for reader in readers:
        reader.disconnect()


@pytest.fixture(scope="module")
def server(generator_bundle: Bundle) -> Iterator[Server]:
    started = Server(str(generator_bundle.path), "--threads", "1", "--no-grpc", "--slots", "2", "--log-format", "json")
    yield started
    code, errors = started.stop()
    assert code == 0, errors
    assert "Traceback" not in errors


@pytest.fixture
def servers(generator_bundle: Bundle) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(*words: str) -> Server:
        started.append(Server(str(generator_bundle.path), "--threads", "1", "--no-grpc", *words))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate()


def test_disconnect_frees_slot_at_once(open_stream: Callable[..., StreamReader], server: Server) -> None:
    # Both slots are in use for seconds; the waiting request gets the first free one.
    staying, leaving = open_stream(server).start(), open_stream(server).start()
    assert metric(server, "hasten_slots_in_use") == 2
    before = metric(server, "hasten_generation_tokens_total")
    waiting = open_stream(server, max_tokens=5)
    wait_until(lambda: metric(server, "hasten_queue_size") == 1)
    leaving.disconnect()
    assert joined_text(waiting.start().rest())
    assert metric(server, "hasten_slots_in_use") == 1
    # The other stream has not ended meanwhile.
    assert metric(server, "hasten_generation_tokens_total") - before == 5
    assert joined_text(staying.rest())
    wait_until(lambda: metric(server, "hasten_slots_in_use") == 0)
    text = server.ask("GET", "/metrics")[2].decode()
    assert re.search(r'hasten_requests_total{model="generator",status="499"} 1\.0', text)
    assert re.search(r"hasten_time_to_first_token_seconds_count\S+ [1-9]", text)


def test_queued_requests_of_disconnected_clients_are_dropped(
    open_stream: Callable[..., StreamReader], server: Server
) -> None:
    staying = [open_stream(server).start() for _ in range(2)]
    waiting = [open_stream(server, stream=streams) for streams in (True, False)]
    wait_until(lambda: metric(server, "hasten_queue_size") == 2)
    for stream in waiting:
        stream.disconnect()
    wait_until(lambda: metric(server, "hasten_queue_size") == 0)
    for stream in staying:
        stream.disconnect()
    wait_until(lambda: metric(server, "hasten_slots_in_use") == 0)


def test_openai_client_disconnect_frees_slot(server: Server) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(**LONG)
        assert next(iter(stream)).choices
        stream.close()
        wait_until(lambda: metric(server, "hasten_slots_in_use") == 0)
        # One stream after the other on the same connection.
        for _ in range(3):
            chunks = list(client.completions.create(**{**LONG, "max_tokens": 4}))
            assert chunks[-1].choices[0].finish_reason == "length"


def test_connection_stays_open_after_stream(server: Server) -> None:
    connection = server.connect()
    for _ in range(3):
        connection.request("POST", "/v1/completions", json.dumps({**LONG, "max_tokens": 4}).encode())
        assert joined_text(connection.getresponse().read().decode().split("\n\n"))
        connection.request("GET", "/v2/health/ready")
        assert connection.getresponse().read() == b""
    connection.close()


def test_stream_is_logged_with_time_and_status_at_its_end(
    open_stream: Callable[..., StreamReader], servers: Callable[..., Server]
) -> None:
    started = servers("--log-format", "json")
    stream = open_stream(started, max_tokens=500).start()
    begin = time.monotonic()
    joined_text(stream.rest())
    took_ms = (time.monotonic() - begin) * 1e3
    code, errors = started.stop()
    assert code == 0
    (line,) = [line for line in map(json.loads, errors.splitlines()) if line.get("model")]
    assert (line["status"], line["rows"]) == (200, 1)
    assert line["tokens"] > 500
    assert line["ms"] >= took_ms


def test_request_beyond_queue_limit_gets_429(
    open_stream: Callable[..., StreamReader], servers: Callable[..., Server]
) -> None:
    started = servers("--slots", "1", "--max-queue", "2")
    running, waiting = open_stream(started).start(), open_stream(started)
    wait_until(lambda: metric(started, "hasten_queue_size") == 1)
    status, headers, content = started.ask("POST", "/v1/completions", LONG)
    assert (status, json.loads(content)["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(headers["retry-after"]) >= 1
    running.disconnect()
    assert joined_text(waiting.start().rest())
    assert metric(started, "hasten_rejected_total") == 1
    assert started.stop()[0] == 0


def test_deadline_ends_requests_but_not_started_streams(
    open_stream: Callable[..., StreamReader], servers: Callable[..., Server]
) -> None:
    started = servers("--slots", "1", "--timeout", "300ms")
    whole = {**LONG, "stream": False}
    begin = time.monotonic()
    status, _, content = started.ask("POST", "/v1/completions", whole)
    assert (status, "deadline exceeded" in content.decode()) == (504, True)
    assert time.monotonic() - begin < 5
    # A stream that has begun goes on; one that has not exceeds its deadline.
    stream, waiting = open_stream(started).start(), open_stream(started)
    answer = waiting.connection.getresponse()
    assert (answer.status, b"deadline exceeded" in answer.read()) == (504, True)
    assert joined_text(stream.rest())
    wait_until(lambda: metric(started, "hasten_slots_in_use") == 0)
    assert started.stop()[0] == 0


def test_shutdown_completes_streams(open_stream: Callable[..., StreamReader], servers: Callable[..., Server]) -> None:
    started = servers()
    alone = joined_text(open_stream(started).start().rest())
    streams = [open_stream(started).start() for _ in range(4)]
    begin = time.monotonic()
    started.process.send_signal(signal.SIGTERM)
    with pytest.raises(ConnectionError):  # new connections are rejected
        wait_until(lambda: started.ask("GET", "/v2/health/ready")[0] == 0)
    assert [joined_text(stream.rest()) for stream in streams] == [alone] * 4
    _, errors = started.process.communicate(timeout=30)
    assert (started.process.returncode, "not all requests were answered" in errors) == (0, False)
    assert time.monotonic() - begin < 30


def test_shutdown_aborts_streams_after_drain_timeout(
    open_stream: Callable[..., StreamReader], servers: Callable[..., Server]
) -> None:
    started = servers("--drain-timeout", "200ms")
    streams = [open_stream(started).start() for _ in range(4)]
    started.process.send_signal(signal.SIGTERM)
    broken: list[type[Exception]] = []

    def to_end(stream: StreamReader) -> None:
        try:
            stream.rest()
        except (http.client.IncompleteRead, ConnectionError) as error:
            broken.append(type(error))

    readers = [threading.Thread(target=to_end, args=[stream]) for stream in streams]
    for reader in readers:
        reader.start()
    _, errors = started.process.communicate(timeout=20)
    for reader in readers:
        reader.join()
    # An aborted response is recognizably incomplete.
    assert (started.process.returncode, len(broken)) == (0, 4)
    assert "not all requests were answered" in errors
    assert "Traceback" not in errors


def test_replaced_model_completes_its_streams(
    open_stream: Callable[..., StreamReader], servers: Callable[..., Server]
) -> None:
    started = servers("--model-control")
    alone = joined_text(open_stream(started).start().rest())
    streams = [open_stream(started).start() for _ in range(2)]
    status, _, content = started.ask("POST", "/v2/repository/models/generator/load", {})
    assert status == 200, content
    assert joined_text(open_stream(started).start().rest()) == alone
    assert [joined_text(stream.rest()) for stream in streams] == [alone] * 2
    assert started.stop()[0] == 0


def test_generation_and_classification_share_the_server(
    open_stream: Callable[..., StreamReader], servers: Callable[..., Server], classifier_bundle: Bundle
) -> None:
    """Neither model starves the other."""
    started = servers(str(classifier_bundle.path))
    alone = joined_text(open_stream(started).start().rest())
    stream = open_stream(started).start()
    answered = 0
    while metric(started, "hasten_slots_in_use"):
        body = {"model": "classifier", "inputs": ["one answer"] * 8}
        assert started.ask("POST", "/predict", body)[0] == 200
        answered += 1
    assert answered > 5
    assert joined_text(stream.rest()) == alone
    assert started.stop()[0] == 0
