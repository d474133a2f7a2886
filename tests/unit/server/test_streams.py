"""Streamed responses over a connection or ASGI, with clients that are slow, speak HTTP/1.0 or disconnect."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from hasten.server.asgi import Asgi
from hasten.server.http.exchange import Exchange, Response
from hasten.server.http.stream import EVENTS, Stream
from support.http_server import ControlledServer, blocked_loop, get, receive_all, statuses
from support.wait import wait_until

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")
pytest.importorskip("httptools", reason="serving needs hasten[serve]")
HEAD = Response(200, b"", EVENTS)


def held_exchange(http_server: ControlledServer, count: int = 1) -> Exchange:
    wait_until(lambda: len(http_server.exchanges) >= count)
    exchange = http_server.exchanges[count - 1]
    exchange.watch = http_server.records.append
    return exchange


def decode_chunks(received: bytes) -> bytes:
    """Return the body of one chunked response."""
    head, _, rest = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head, head
    assert b"content-length" not in head
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if int(size, 16) == 0:
            assert rest == b"\r\n", rest
            return body
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]


def receive(client: socket.socket, expected: bytes, received: bytes = b"") -> bytes:
    """Receive until the expected bytes have arrived."""
    while expected not in received:
        data = client.recv(2**16)
        assert data, received
        received += data
    return received


def test_parts_arrive_as_they_are_written(http_server: ControlledServer) -> None:
    with http_server.connect() as client:
        client.sendall(get("/held"))
        stream = held_exchange(http_server).stream(HEAD)
        received = receive(client, b"\r\n\r\n")
        assert b"content-type: text/event-stream\r\n" in received
        for part in (b"one ", b"two ", b"three"):
            stream.write(part)
            received = receive(client, part + b"\r\n", received)
        assert not http_server.records
        stream.end()
        received = receive(client, b"\r\n0\r\n\r\n", received)
        assert decode_chunks(received) == b"one two three"
        wait_until(lambda: bool(http_server.records))
        # The connection stays open.
        client.sendall(get("/after", "connection: close"))
        assert statuses(receive_all(client)) == [200]
    assert [(record.status, record.operation) for record in http_server.records] == [(200, "GET /held")]


def test_parts_written_while_loop_is_blocked_are_one_chunk(http_server: ControlledServer) -> None:
    with http_server.connect() as client:
        client.sendall(get("/held", "connection: close"))
        exchange = held_exchange(http_server)
        with blocked_loop(http_server):
            stream = exchange.stream(HEAD)
            stream.write(b"")  # would be the last chunk
            for _ in range(1000):
                stream.write(b"x" * 10)
            stream.end()
            stream.write(b"too late")
            stream.end(500)
        received = receive_all(client)
    assert b"connection: close\r\n" in received
    assert decode_chunks(received) == b"x" * 10_000
    assert [record.status for record in http_server.records] == [200]


def test_concurrent_streams_of_many_threads_are_not_mixed(http_server: ControlledServer) -> None:
    def serve(exchange: Exchange) -> None:
        stream = exchange.stream(HEAD)
        for index in range(200):
            stream.write(b"%s %d\n" % (exchange.path.encode(), index))
        stream.end()

    received: dict[int, bytes] = {}

    def ask(number: int) -> None:
        with http_server.connect() as client:
            client.sendall(get(f"/held/{number}", "connection: close"))
            received[number] = receive_all(client)

    clients = [threading.Thread(target=ask, args=[number]) for number in range(16)]
    for client in clients:
        client.start()
    held_exchange(http_server, 16)
    writers = [threading.Thread(target=serve, args=[exchange]) for exchange in http_server.exchanges]
    for thread in (*writers, *clients):
        thread.start() if thread in writers else thread.join()
    for number in range(16):
        assert decode_chunks(received[number]).splitlines() == [
            b"/held/%d %d" % (number, index) for index in range(200)
        ]


def test_http10_stream_ends_with_connection(http_server: ControlledServer) -> None:
    with http_server.connect() as client:
        client.sendall(get("/held", "connection: keep-alive", version="1.0") + get("/never"))
        stream = held_exchange(http_server).stream(HEAD)
        stream.write(b"one ")
        stream.write(b"two")
        stream.end()
        head, _, body = receive_all(client).partition(b"\r\n\r\n")
    assert (b"transfer-encoding" in head, b"content-length" in head, b"connection: close" in head, body) == (
        False,
        False,
        True,
        b"one two",
    )
    assert len(http_server.exchanges) == 1


def test_pipelined_request_waits_for_end_of_stream(http_server: ControlledServer) -> None:
    with http_server.connect() as client:
        client.sendall(get("/held") + get("/after") + b"\x00nonsense\r\n\r\n")
        stream = held_exchange(http_server).stream(HEAD)
        stream.write(b"the parts")
        receive(client, b"the parts\r\n")
        assert len(http_server.exchanges) == 1
        stream.end()
        received = receive_all(client)
    assert received.startswith(b"0\r\n\r\nHTTP/1.1 200")
    assert statuses(received) == [200, 400]


def test_head_response_has_no_parts(http_server: ControlledServer) -> None:
    with http_server.connect() as client:
        client.sendall(b"HEAD /held HTTP/1.1\r\nhost: x\r\n\r\n" + get("/after", "connection: close"))
        stream = held_exchange(http_server).stream(HEAD)
        stream.write(b"unseen")
        stream.end()
        received = receive_all(client)
    first, second = received.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert first.endswith(b"\r\n\r\n")
    assert b"unseen" not in first
    assert second.endswith(b"GET /after 0")


@pytest.mark.parametrize("how", ["reset", "closed"])
def test_disconnect_during_stream_is_noticed(http_server: ControlledServer, how: str) -> None:
    disconnected = threading.Event()
    client = http_server.connect()
    client.sendall(get("/held") + get("/behind"))
    exchange = held_exchange(http_server)
    exchange.on_close = disconnected.set
    stream = exchange.stream(HEAD)
    stream.write(b"one")
    receive(client, b"one")
    if how == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    begin = time.monotonic()
    while not disconnected.is_set():
        stream.write(b"more")
        disconnected.wait(0.02)
        assert time.monotonic() - begin < 5
    wait_until(lambda: not http_server.state.open)
    stream.write(b"discarded")
    stream.end()
    assert [record.status for record in http_server.records] == [499]
    assert stream.read()[0] == b""


def test_disconnect_before_stream_begins_is_noticed(http_server: ControlledServer) -> None:
    disconnected: list[int] = []
    with http_server.connect() as client:
        client.sendall(get("/held"))
        exchange = held_exchange(http_server)
        exchange.on_close = lambda: disconnected.append(1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        with blocked_loop(http_server):
            client.close()
            stream = exchange.stream(HEAD)
            stream.write(b"one")
        wait_until(lambda: not http_server.state.open)
    stream.write(b"two")
    wait_until(lambda: disconnected == [1])
    stream.end()
    assert [record.status for record in http_server.records] == [499]


def test_half_closed_client_receives_stream_without_probes(http_server: ControlledServer) -> None:
    with http_server.connect() as client:
        client.sendall(get("/held"))
        exchange = held_exchange(http_server)
        stream = exchange.stream(HEAD)
        stream.write(b"one ")
        received = receive(client, b"one ")
        client.shutdown(socket.SHUT_WR)
        begin = time.monotonic()
        wait_until(lambda: time.monotonic() - begin > 0.7)  # longer than the interval of probes
        stream.write(b"two")
        stream.end()
        received += receive_all(client)
    assert decode_chunks(received) == b"one two"
    assert [record.status for record in http_server.records] == [200]


def test_slow_reader_receives_whole_stream(http_servers: Callable[..., ControlledServer]) -> None:
    http_server = http_servers(read_s=1.0)
    with http_server.connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
        client.sendall(get("/held", "connection: close"))
        stream = held_exchange(http_server).stream(HEAD)
        part = b"x" * 2**16
        received, size, begin = b"", 0, time.monotonic()

        def write() -> None:
            for _ in range(64):
                # Stay below the limit of the stream: this test checks that nothing is lost.
                wait_until(lambda: stream._size < 2**18)
                stream.write(part)
            stream.end()

        writer = threading.Thread(target=write)
        writer.start()
        while data := client.recv(2**16):
            received += data
            size += len(data)
            if time.monotonic() - begin < 1.5:
                time.sleep(0.01)  # the slow reader itself
        writer.join()
    assert decode_chunks(received) == part * 64


def test_client_that_does_not_read_is_disconnected_at_limit(
    http_server: ControlledServer,
) -> None:
    disconnected = threading.Event()
    with http_server.connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(get("/held"))
        exchange = held_exchange(http_server)
        exchange.on_close = disconnected.set
        stream = exchange.stream(HEAD)
        part, max_size, written, slowest = b"x" * 2**14, 0, 0, 0.0
        while not disconnected.is_set():
            begin = time.monotonic()
            stream.write(part)
            slowest = max(slowest, time.monotonic() - begin)
            max_size = max(max_size, stream._size)
            written += len(part)
            assert written < 2**26
            disconnected.wait(0.001)
        assert slowest < 1.0
        assert max_size <= 2**20 + len(part)
        wait_until(lambda: not http_server.state.open)
        assert stream._size == 0
    assert [record.status for record in http_server.records] == [499]


def test_client_that_reads_nothing_is_disconnected_after_timeout(http_servers: Callable[..., ControlledServer]) -> None:
    http_server = http_servers(read_s=0.3)
    disconnected = threading.Event()
    with http_server.connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(get("/held"))
        exchange = held_exchange(http_server)
        exchange.on_close = disconnected.set
        stream = exchange.stream(HEAD)
        stream.write(b"x" * 2**23)  # more than the kernel buffers, and nothing follows
        assert disconnected.wait(10)


def test_failed_stream_is_recorded_with_its_status(http_server: ControlledServer) -> None:
    with http_server.connect() as client:
        client.sendall(get("/held", "connection: close"))
        stream = held_exchange(http_server).stream(HEAD)
        stream.write(b"one")
        stream.end(504)
        assert decode_chunks(receive_all(client)) == b"one"
    assert [record.status for record in http_server.records] == [504]


def test_drain_completes_streams(http_server: ControlledServer) -> None:
    with http_server.connect() as client, http_server.connect() as late:
        client.sendall(get("/held"))
        stream = held_exchange(http_server).stream(HEAD)
        stream.write(b"one ")
        received = receive(client, b"one ")
        late.sendall(get("/held"))
        exchange = held_exchange(http_server, 2)
        http_server.drain()
        last = exchange.stream(HEAD)
        for open_stream in (stream, last):
            open_stream.write(b"two")
        assert len(http_server.state.open) == 2
        stream.end()
        assert decode_chunks(received + receive_all(client)) == b"one two"
        last.end()
        received = receive_all(late)
    assert (decode_chunks(received), b"connection: close" in received) == (b"two", True)
    assert [record.status for record in http_server.records] == [200, 200]


def test_response_after_stream_is_sent_by_its_thread(http_server: ControlledServer) -> None:
    """Even while the loop is blocked."""
    with http_server.connect() as client:
        client.sendall(get("/held"))
        stream = held_exchange(http_server).stream(HEAD)
        stream.end()
        receive(client, b"0\r\n\r\n")
        client.sendall(get("/held/again"))
        exchange = held_exchange(http_server, 2)
        with blocked_loop(http_server):
            exchange.reply(Response.text("the answer"))
            assert client.recv(2**16).endswith(b"the answer")


def test_stream_wakes_reader_once_and_overflows_at_limit() -> None:
    woken: list[int] = []
    ended: list[int] = []
    stream = Stream(200, lambda: ended.append(1), max_bytes=10)
    stream.write(b"early ")
    stream.follow(lambda: woken.append(1))
    stream.write(b"on")
    stream.write(b"e")
    assert woken == [1]  # once, until it is read
    assert stream.read() == (b"early one", False)
    stream.write(b"x" * 100)
    assert (stream.is_overfull, woken) == (False, [1, 1])
    stream.write(b"y")
    assert (stream.is_overfull, woken) == (True, [1, 1, 1])
    stream.end(500)
    stream.end()
    assert (ended, stream.status) == ([1], 500)
    assert stream.read() == (b"", True)


# ASGI


class AsgiRequest:
    """A request through the ASGI application on a separate loop, whose client may disconnect."""

    def __init__(self, serve: Callable[[Exchange], None], *, reads: bool = True, method: str = "POST") -> None:
        self.sent: list[Any] = []
        self.statuses: list[int] = []
        self.reads = threading.Event()
        if reads:
            self.reads.set()
        self._serve = serve
        self._method = method
        self._is_disconnected = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._run()))
        self.thread.start()

    async def _run(self) -> None:
        messages = [{"type": "http.request", "body": b"{}"}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await self._is_disconnected.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await asyncio.to_thread(self.reads.wait)
            self.sent.append(message)

        def app(exchange: Exchange) -> None:
            exchange.watch = lambda record: self.statuses.append(record.status)
            self._serve(exchange)

        scope = {"type": "http", "method": self._method, "path": "/", "query_string": b"", "headers": []}
        await Asgi(app)(scope, receive, send)

    def disconnect(self) -> None:
        self._loop.call_soon_threadsafe(self._is_disconnected.set)

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    def finish(self) -> None:
        self.thread.join(20)
        assert not self.thread.is_alive()
        self._loop.close()


def test_asgi_parts_arrive_as_they_are_written() -> None:
    streams: list[Stream] = []
    request = AsgiRequest(lambda exchange: streams.append(exchange.stream(HEAD)))
    wait_until(lambda: len(request.sent) == 1)
    assert b"content-length" not in dict(request.sent[0]["headers"])
    for part in (b"one ", b"two"):
        streams[0].write(part)
        wait_until(lambda part=part: request.body.endswith(part))
    assert (request.statuses, request.sent[-1]["more_body"]) == ([], True)
    streams[0].end()
    request.finish()
    assert (request.body, request.statuses, request.sent[-1]["more_body"]) == (b"one two", [200], False)


def test_asgi_head_response_has_no_parts() -> None:
    def serve(exchange: Exchange) -> None:
        stream = exchange.stream(HEAD)
        stream.write(b"unseen")
        stream.end()

    request = AsgiRequest(serve, method="HEAD")
    request.finish()
    assert (request.body, request.statuses, request.sent[-1]["more_body"]) == (b"", [200], False)


def test_asgi_disconnect_during_stream_is_noticed() -> None:
    disconnected = threading.Event()
    streams: list[Stream] = []

    def serve(exchange: Exchange) -> None:
        exchange.on_close = disconnected.set
        streams.append(exchange.stream(HEAD))
        streams[0].write(b"one")

    request = AsgiRequest(serve)
    wait_until(lambda: request.body == b"one")
    request.disconnect()
    assert disconnected.wait(10)  # without another part
    request.finish()
    streams[0].end()
    assert (request.statuses, request.sent[-1]["more_body"]) == ([499], True)


def test_asgi_stream_is_aborted_at_limit_when_client_does_not_read() -> None:
    disconnected = threading.Event()
    streams: list[Stream] = []

    def serve(exchange: Exchange) -> None:
        exchange.on_close = disconnected.set
        streams.append(exchange.stream(HEAD))

    request = AsgiRequest(serve, reads=False)
    wait_until(lambda: bool(streams))
    for _ in range(40):
        streams[0].write(b"x" * 2**16)
        assert streams[0]._size <= 2**20 + 2**16
    assert streams[0].is_overfull
    request.reads.set()
    assert disconnected.wait(10)
    request.finish()
    assert request.statuses == [499]
