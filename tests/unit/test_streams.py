"""Replies in parts: how they go over a connection, and what becomes of them when a client is slow, old or gone."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from hasten.server.asgi import Asgi
from hasten.server.exchange import Exchange, Response
from hasten.server.stream import EVENTS, Stream
from sites import Site, all_of, get, standstill, statuses, until

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")
pytest.importorskip("httptools", reason="serving needs hasten[serve]")
HEAD = Response(200, b"", EVENTS)


def asked(site: Site, count: int = 1) -> Exchange:
    until(lambda: len(site.asked) >= count)
    exchange = site.asked[count - 1]
    exchange.watch = site.seen.append
    return exchange


def body_of(received: bytes) -> bytes:
    """Of one reply in chunks, each read as it is framed."""
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


def receive(raw: socket.socket, what: bytes, received: bytes = b"") -> bytes:
    while what not in received:
        data = raw.recv(2**16)
        assert data, received
        received += data
    return received


def test_parts_come_as_they_are_written(site: Site) -> None:
    with site.connect() as raw:
        raw.sendall(get("/held"))
        stream = asked(site).stream(HEAD)
        received = receive(raw, b"\r\n\r\n")
        assert b"content-type: text/event-stream\r\n" in received
        for part in (b"one ", b"two ", b"three"):
            stream.write(part)
            received = receive(raw, part + b"\r\n", received)
        assert not site.seen
        stream.end()
        received = receive(raw, b"0\r\n\r\n", received)
        assert body_of(received) == b"one two three"
        until(lambda: bool(site.seen))
        # The connection goes on.
        raw.sendall(get("/after", "connection: close"))
        assert statuses(all_of(raw)) == [200]
    assert [(seen.status, seen.what) for seen in site.seen] == [(200, "GET /held")]


def test_what_is_written_before_the_loop_looks_is_one_chunk_and_nothing_is_lost(site: Site) -> None:
    with site.connect() as raw:
        raw.sendall(get("/held", "connection: close"))
        exchange = asked(site)
        with standstill(site):
            stream = exchange.stream(HEAD)
            stream.write(b"")  # would be the last chunk
            for _ in range(1000):
                stream.write(b"x" * 10)
            stream.end()
            stream.write(b"too late")
            stream.end(500)
        received = all_of(raw)
    assert b"connection: close\r\n" in received
    assert body_of(received) == b"x" * 10_000
    assert [seen.status for seen in site.seen] == [200]


def test_many_threads_many_streams(site: Site) -> None:
    def serve(exchange: Exchange) -> None:
        stream = exchange.stream(HEAD)
        for place in range(200):
            stream.write(b"%s %d\n" % (exchange.path.encode(), place))
        stream.end()

    received: dict[int, bytes] = {}

    def ask(number: int) -> None:
        with site.connect() as raw:
            raw.sendall(get(f"/held/{number}", "connection: close"))
            received[number] = all_of(raw)

    clients = [threading.Thread(target=ask, args=[number]) for number in range(16)]
    for client in clients:
        client.start()
    asked(site, 16)
    writers = [threading.Thread(target=serve, args=[exchange]) for exchange in site.asked]
    for thread in (*writers, *clients):
        thread.start() if thread in writers else thread.join()
    for number in range(16):
        assert body_of(received[number]).splitlines() == [b"/held/%d %d" % (number, place) for place in range(200)]


def test_an_older_client_knows_the_end_by_that_of_the_connection(site: Site) -> None:
    with site.connect() as raw:
        raw.sendall(get("/held", "connection: keep-alive", version="1.0") + get("/never"))
        stream = asked(site).stream(HEAD)
        stream.write(b"one ")
        stream.write(b"two")
        stream.end()
        head, _, body = all_of(raw).partition(b"\r\n\r\n")
    assert (b"transfer-encoding" in head, b"content-length" in head, b"connection: close" in head, body) == (
        False,
        False,
        True,
        b"one two",
    )
    assert len(site.asked) == 1


def test_what_is_asked_behind_a_stream_waits_for_its_end(site: Site) -> None:
    with site.connect() as raw:
        raw.sendall(get("/held") + get("/after") + b"\x00nonsense\r\n\r\n")
        stream = asked(site).stream(HEAD)
        stream.write(b"the parts")
        receive(raw, b"the parts\r\n")
        assert len(site.asked) == 1
        stream.end()
        received = all_of(raw)
    assert received.startswith(b"0\r\n\r\nHTTP/1.1 200")
    assert statuses(received) == [200, 400]


def test_a_head_has_no_parts(site: Site) -> None:
    with site.connect() as raw:
        raw.sendall(b"HEAD /held HTTP/1.1\r\n\r\n" + get("/after", "connection: close"))
        stream = asked(site).stream(HEAD)
        stream.write(b"unseen")
        stream.end()
        received = all_of(raw)
    first, second = received.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert first.endswith(b"\r\n\r\n")
    assert b"unseen" not in first
    assert second.endswith(b"GET /after 0")


@pytest.mark.parametrize("how", ["reset", "closed"])
def test_who_leaves_in_the_middle_is_known_to_be_gone(site: Site, how: str) -> None:
    left = threading.Event()
    raw = site.connect()
    raw.sendall(get("/held") + get("/behind"))
    exchange = asked(site)
    exchange.on_close = left.set
    stream = exchange.stream(HEAD)
    stream.write(b"one")
    receive(raw, b"one")
    if how == "reset":
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    raw.close()
    begin = time.monotonic()
    while not left.is_set():
        stream.write(b"more")
        left.wait(0.02)
        assert time.monotonic() - begin < 5
    until(lambda: not site.connections.open)
    stream.write(b"to nobody")
    stream.end()
    assert [seen.status for seen in site.seen] == [499]
    assert stream.take()[0] == b""


def test_who_leaves_before_the_loop_has_seen_the_stream(site: Site) -> None:
    left: list[int] = []
    with site.connect() as raw:
        raw.sendall(get("/held"))
        exchange = asked(site)
        exchange.on_close = lambda: left.append(1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        with standstill(site):
            raw.close()
            stream = exchange.stream(HEAD)
            stream.write(b"one")
        until(lambda: not site.connections.open)
    stream.write(b"two")
    until(lambda: left == [1])
    stream.end()
    assert [seen.status for seen in site.seen] == [499]


def test_half_a_connection_is_enough_and_nothing_comes_between_the_parts(site: Site) -> None:
    with site.connect() as raw:
        raw.sendall(get("/held"))
        exchange = asked(site)
        stream = exchange.stream(HEAD)
        stream.write(b"one ")
        received = receive(raw, b"one ")
        raw.shutdown(socket.SHUT_WR)
        begin = time.monotonic()
        until(lambda: time.monotonic() - begin > 0.7)  # longer than it takes until one that waits is probed
        stream.write(b"two")
        stream.end()
        received += all_of(raw)
    assert body_of(received) == b"one two"
    assert [seen.status for seen in site.seen] == [200]


def test_who_reads_slowly_gets_all_of_it(sites: Callable[..., Site]) -> None:
    site = sites(read_s=1.0)
    with site.connect() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
        raw.sendall(get("/held", "connection: close"))
        stream = asked(site).stream(HEAD)
        part = b"x" * 2**16
        received, size, begin = b"", 0, time.monotonic()

        def write() -> None:
            for _ in range(64):
                # Never so far ahead that it would be broken off: what is tested is that none is lost.
                until(lambda: stream._size < 2**18)
                stream.write(part)
            stream.end()

        writer = threading.Thread(target=write)
        writer.start()
        while data := raw.recv(2**16):
            received += data
            size += len(data)
            if time.monotonic() - begin < 1.5:
                time.sleep(0.01)  # the slow reader itself
        writer.join()
    assert body_of(received) == part * 64


def test_who_does_not_read_is_cut_off_at_a_limit_and_holds_up_nobody(site: Site) -> None:
    left = threading.Event()
    with site.connect() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.sendall(get("/held"))
        exchange = asked(site)
        exchange.on_close = left.set
        stream = exchange.stream(HEAD)
        part, most, written, slowest = b"x" * 2**14, 0, 0, 0.0
        while not left.is_set():
            begin = time.monotonic()
            stream.write(part)
            slowest = max(slowest, time.monotonic() - begin)
            most = max(most, stream._size)
            written += len(part)
            assert written < 2**26
            left.wait(0.001)
        assert slowest < 1.0
        assert most <= 2**20 + len(part)
        until(lambda: not site.connections.open)
        assert stream._size == 0
    assert [seen.status for seen in site.seen] == [499]


def test_who_takes_nothing_for_long_is_cut_off_too(sites: Callable[..., Site]) -> None:
    site = sites(read_s=0.3)
    left = threading.Event()
    with site.connect() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.sendall(get("/held"))
        exchange = asked(site)
        exchange.on_close = left.set
        stream = exchange.stream(HEAD)
        stream.write(b"x" * 2**23)  # more than the kernel keeps, and no more follows
        assert left.wait(10)


def test_what_ends_badly_is_told_to_those_who_watch(site: Site) -> None:
    with site.connect() as raw:
        raw.sendall(get("/held", "connection: close"))
        stream = asked(site).stream(HEAD)
        stream.write(b"one")
        stream.end(504)
        assert body_of(all_of(raw)) == b"one"
    assert [seen.status for seen in site.seen] == [504]


def test_draining_lets_streams_end(site: Site) -> None:
    with site.connect() as raw, site.connect() as late:
        raw.sendall(get("/held"))
        stream = asked(site).stream(HEAD)
        stream.write(b"one ")
        received = receive(raw, b"one ")
        late.sendall(get("/held"))
        exchange = asked(site, 2)
        site.drain()
        last = exchange.stream(HEAD)
        for one in (stream, last):
            one.write(b"two")
        assert len(site.connections.open) == 2
        stream.end()
        assert body_of(received + all_of(raw)) == b"one two"
        last.end()
        received = all_of(late)
    assert (body_of(received), b"connection: close" in received) == (b"two", True)
    assert [seen.status for seen in site.seen] == [200, 200]


def test_the_one_shot_way_is_not_touched(site: Site) -> None:
    """Whoever has an answer after a stream sends it itself again, whatever the loop does."""
    with site.connect() as raw:
        raw.sendall(get("/held"))
        stream = asked(site).stream(HEAD)
        stream.end()
        receive(raw, b"0\r\n\r\n")
        raw.sendall(get("/held/again"))
        exchange = asked(site, 2)
        with standstill(site):
            exchange.reply(Response.text("the answer"))
            assert raw.recv(2**16).endswith(b"the answer")


def test_a_stream_of_its_own() -> None:
    woken: list[int] = []
    ended: list[int] = []
    stream = Stream(200, lambda: ended.append(1), most_bytes=10)
    stream.write(b"early ")
    stream.follow(lambda: woken.append(1))
    stream.write(b"on")
    stream.write(b"e")
    assert woken == [1]  # once, until it is looked
    assert stream.take() == (b"early one", False)
    stream.write(b"x" * 100)
    assert (stream.is_overfull, woken) == (False, [1, 1])
    stream.write(b"y")
    assert (stream.is_overfull, woken) == (True, [1, 1, 1])
    stream.end(500)
    stream.end()
    assert (ended, stream.status) == ([1], 500)
    assert stream.take() == (b"", True)


# Behind an ASGI server


class Asking:
    """One request behind an ASGI server, on a loop of its own: what it was sent, and a client that may leave."""

    def __init__(self, serve: Callable[[Exchange], None], *, takes: bool = True, method: str = "POST") -> None:
        self.sent: list[Any] = []
        self.seen: list[int] = []
        self.takes = threading.Event()
        if takes:
            self.takes.set()
        self._serve = serve
        self._method = method
        self._gone = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._ask()))
        self.thread.start()

    async def _ask(self) -> None:
        waiting = [{"type": "http.request", "body": b"{}"}]

        async def receive() -> Any:
            if waiting:
                return waiting.pop()
            await self._gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await asyncio.to_thread(self.takes.wait)
            self.sent.append(message)

        def app(exchange: Exchange) -> None:
            exchange.watch = lambda seen: self.seen.append(seen.status)
            self._serve(exchange)

        scope = {"type": "http", "method": self._method, "path": "/", "query_string": b"", "headers": []}
        await Asgi(app)(scope, receive, send)

    def leave(self) -> None:
        self._loop.call_soon_threadsafe(self._gone.set)

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    def end(self) -> None:
        self.thread.join(20)
        assert not self.thread.is_alive()
        self._loop.close()


def test_asgi_parts_come_as_they_are_written() -> None:
    streams: list[Stream] = []
    asking = Asking(lambda exchange: streams.append(exchange.stream(HEAD)))
    until(lambda: len(asking.sent) == 1)
    assert b"content-length" not in dict(asking.sent[0]["headers"])
    for part in (b"one ", b"two"):
        streams[0].write(part)
        until(lambda part=part: asking.body.endswith(part))
    assert (asking.seen, asking.sent[-1]["more_body"]) == ([], True)
    streams[0].end()
    asking.end()
    assert (asking.body, asking.seen, asking.sent[-1]["more_body"]) == (b"one two", [200], False)


def test_asgi_a_head_has_no_parts() -> None:
    def serve(exchange: Exchange) -> None:
        stream = exchange.stream(HEAD)
        stream.write(b"unseen")
        stream.end()

    asking = Asking(serve, method="HEAD")
    asking.end()
    assert (asking.body, asking.seen, asking.sent[-1]["more_body"]) == (b"", [200], False)


def test_asgi_who_leaves_in_the_middle_is_known_to_be_gone() -> None:
    left = threading.Event()
    streams: list[Stream] = []

    def serve(exchange: Exchange) -> None:
        exchange.on_close = left.set
        streams.append(exchange.stream(HEAD))
        streams[0].write(b"one")

    asking = Asking(serve)
    until(lambda: asking.body == b"one")
    asking.leave()
    assert left.wait(10)  # without another part
    asking.end()
    streams[0].end()
    assert (asking.seen, asking.sent[-1]["more_body"]) == ([499], True)


def test_asgi_who_does_not_read_is_broken_off_at_a_limit() -> None:
    left = threading.Event()
    streams: list[Stream] = []

    def serve(exchange: Exchange) -> None:
        exchange.on_close = left.set
        streams.append(exchange.stream(HEAD))

    asking = Asking(serve, takes=False)
    until(lambda: bool(streams))
    for _ in range(40):
        streams[0].write(b"x" * 2**16)
        assert streams[0]._size <= 2**20 + 2**16
    assert streams[0].is_overfull
    asking.takes.set()
    assert left.wait(10)
    asking.end()
    assert asking.seen == [499]
