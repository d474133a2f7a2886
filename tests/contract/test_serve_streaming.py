"""Texts that are sent while they are written, and what happens meanwhile: clients leave, signals come, time is over."""

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
from serving import Server

openai = pytest.importorskip("openai", reason="the client of its protocol")
pytest.importorskip("uvloop", reason="serving needs hasten[serve]")
# Some seconds, on the machines this runs on.
LONG = {"model": "writer", "prompt": "the cat sat on", "max_tokens": 2000, "stream": True}


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, "it did not come to that"
        time.sleep(0.005)


class Reading:
    """A client of one stream, which reads when it is told to."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        self.connection = server.connect()
        self.connection.request("POST", "/v1/completions", json.dumps(body).encode())
        self.response: http.client.HTTPResponse | None = None
        self.content = b""

    def begin(self) -> Reading:
        """Until there is something of it."""
        self.response = self.connection.getresponse()
        assert self.response.status == 200, self.response.read()
        self.content += self.response.read1(100)
        assert self.content
        return self

    def rest(self) -> list[str]:
        """The events, to the end; what breaks off is an error of the client's."""
        assert self.response is not None
        self.content += self.response.read()
        return self.content.decode().split("\n\n")

    def leave(self) -> None:
        if self.response is not None:
            self.response.close()
        self.connection.close()


def text_in(events: list[str]) -> str:
    assert events[-2:] == ["data: [DONE]", ""], events[-3:]
    return "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2])


def metric(server: Server, name: str) -> float:
    text = server.ask("GET", "/metrics")[2].decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


@pytest.fixture
def read() -> Iterator[Callable[..., Reading]]:
    made: list[Reading] = []

    def ask(server: Server, **changes: Any) -> Reading:
        made.append(Reading(server, {**LONG, **changes}))
        return made[-1]

    yield ask
    for one in made:
        one.leave()


@pytest.fixture(scope="module")
def server(writer_bundle: Bundle) -> Iterator[Server]:
    started = Server(str(writer_bundle.path), "--threads", "1", "--no-grpc", "--slots", "2", "--log", "json")
    yield started
    code, errors = started.stop()
    assert code == 0, errors
    assert "Traceback" not in errors


@pytest.fixture
def servers(writer_bundle: Bundle) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(*words: str) -> Server:
        started.append(Server(str(writer_bundle.path), "--threads", "1", "--no-grpc", *words))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()


def test_who_leaves_in_the_middle_frees_its_slot_at_once(read: Callable[..., Reading], server: Server) -> None:
    # Both slots are taken, each for seconds; who waits gets the one that comes free.
    staying, leaving = read(server).begin(), read(server).begin()
    assert metric(server, "hasten_slots_taken") == 2
    before = metric(server, "hasten_written_tokens_total")
    waiting = read(server, max_tokens=5)
    until(lambda: metric(server, "hasten_waiting") == 1)
    leaving.leave()
    assert text_in(waiting.begin().rest())
    assert metric(server, "hasten_slots_taken") == 1
    # Not because the other had come to its end.
    assert metric(server, "hasten_written_tokens_total") - before == 5
    assert text_in(staying.rest())
    until(lambda: metric(server, "hasten_slots_taken") == 0)
    text = server.ask("GET", "/metrics")[2].decode()
    assert re.search(r'hasten_requests_total{model="writer",status="499"} 1\.0', text)
    assert re.search(r"hasten_first_token_seconds_count\S+ [1-9]", text)


def test_who_leaves_while_it_waits_is_not_written_for(read: Callable[..., Reading], server: Server) -> None:
    staying = [read(server).begin() for _ in range(2)]
    waiting = [read(server, stream=streams) for streams in (True, False)]
    until(lambda: metric(server, "hasten_waiting") == 2)
    for one in waiting:
        one.leave()
    until(lambda: metric(server, "hasten_waiting") == 0)
    for one in staying:
        one.leave()
    until(lambda: metric(server, "hasten_slots_taken") == 0)


def test_the_client_that_others_use_leaves(server: Server) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(**LONG)
        assert next(iter(stream)).choices
        stream.close()
        until(lambda: metric(server, "hasten_slots_taken") == 0)
        # On connections that are kept, one stream after the other.
        for _ in range(3):
            chunks = list(client.completions.create(**{**LONG, "max_tokens": 4}))
            assert chunks[-1].choices[0].finish_reason == "length"


def test_a_connection_is_kept_after_a_stream(server: Server) -> None:
    connection = server.connect()
    for _ in range(3):
        connection.request("POST", "/v1/completions", json.dumps({**LONG, "max_tokens": 4}).encode())
        assert text_in(connection.getresponse().read().decode().split("\n\n"))
        connection.request("GET", "/v2/health/ready")
        assert connection.getresponse().read() == b""
    connection.close()


def test_the_time_and_the_status_of_a_stream_are_logged_at_its_end(
    read: Callable[..., Reading], servers: Callable[..., Server]
) -> None:
    started = servers("--log", "json")
    stream = read(started, max_tokens=500).begin()
    begin = time.monotonic()
    text_in(stream.rest())
    took_ms = (time.monotonic() - begin) * 1e3
    code, errors = started.stop()
    assert code == 0
    (line,) = [line for line in map(json.loads, errors.splitlines()) if line.get("model")]
    assert (line["status"], line["rows"]) == (200, 1)
    assert line["tokens"] > 500
    assert line["ms"] >= took_ms


def test_more_than_it_takes_is_refused(read: Callable[..., Reading], servers: Callable[..., Server]) -> None:
    started = servers("--slots", "1", "--max-queue", "2")
    running, waiting = read(started).begin(), read(started)
    until(lambda: metric(started, "hasten_waiting") == 1)
    status, headers, content = started.ask("POST", "/v1/completions", LONG)
    assert (status, json.loads(content)["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(headers["retry-after"]) >= 1
    running.leave()
    assert text_in(waiting.begin().rest())
    assert metric(started, "hasten_rejected_total") == 1
    assert started.stop()[0] == 0


def test_time_is_over(read: Callable[..., Reading], servers: Callable[..., Server]) -> None:
    started = servers("--slots", "1", "--timeout", "300ms")
    whole = {**LONG, "stream": False}
    begin = time.monotonic()
    status, _, content = started.ask("POST", "/v1/completions", whole)
    assert (status, "longer than it was given" in content.decode()) == (504, True)
    assert time.monotonic() - begin < 5
    # A stream that has begun goes on; one that has not has its time too.
    stream, waiting = read(started).begin(), read(started)
    answer = waiting.connection.getresponse()
    assert (answer.status, b"waited" in answer.read()) == (504, True)
    assert text_in(stream.rest())
    until(lambda: metric(started, "hasten_slots_taken") == 0)
    assert started.stop()[0] == 0


def test_a_signal_lets_streams_end(read: Callable[..., Reading], servers: Callable[..., Server]) -> None:
    started = servers()
    alone = text_in(read(started).begin().rest())
    streams = [read(started).begin() for _ in range(4)]
    begin = time.monotonic()
    started.process.send_signal(signal.SIGTERM)
    with pytest.raises(ConnectionError):  # nobody new is let in
        until(lambda: started.ask("GET", "/v2/health/ready")[0] == 0)
    assert [text_in(stream.rest()) for stream in streams] == [alone] * 4
    _, errors = started.process.communicate(timeout=30)
    assert (started.process.returncode, "not all were answered" in errors) == (0, False)
    assert time.monotonic() - begin < 30


def test_a_signal_does_not_wait_for_ever(read: Callable[..., Reading], servers: Callable[..., Server]) -> None:
    started = servers("--drain", "200ms")
    streams = [read(started).begin() for _ in range(4)]
    started.process.send_signal(signal.SIGTERM)
    broken: list[type[Exception]] = []

    def to_end(stream: Reading) -> None:
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
    # What is broken off does not look whole.
    assert (started.process.returncode, len(broken)) == (0, 4)
    assert "not all were answered" in errors
    assert "Traceback" not in errors


def test_a_model_that_is_replaced_ends_what_it_has_begun(
    read: Callable[..., Reading], servers: Callable[..., Server]
) -> None:
    started = servers()
    alone = text_in(read(started).begin().rest())
    streams = [read(started).begin() for _ in range(2)]
    status, _, content = started.ask("POST", "/v2/repository/models/writer/load", {})
    assert status == 200, content
    assert text_in(read(started).begin().rest()) == alone
    assert [text_in(stream.rest()) for stream in streams] == [alone] * 2
    assert started.stop()[0] == 0


def test_beside_a_model_that_answers(
    read: Callable[..., Reading], servers: Callable[..., Server], classifier_bundle: Bundle
) -> None:
    """A long text leaves the other its turns, and the other leaves it its own."""
    started = servers(str(classifier_bundle.path))
    alone = text_in(read(started).begin().rest())
    stream = read(started).begin()
    answered = 0
    while metric(started, "hasten_slots_taken"):
        body = {"model": "classifier", "inputs": ["one answer"] * 8}
        assert started.ask("POST", "/predict", body)[0] == 200
        answered += 1
    assert answered > 5
    assert text_in(stream.rest()) == alone
    assert started.stop()[0] == 0
