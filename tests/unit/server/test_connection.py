"""HTTP connections with misbehaving, slow, old and pipelining clients."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise

import pytest

from hasten.server.http.exchange import Exchange, Response
from support.http_server import ControlledServer, blocked_loop, get, post, receive_all, statuses
from support.wait import wait_until

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")
pytest.importorskip("httptools", reason="serving needs hasten[serve]")


def test_rejection_follows_earlier_responses(http_server: ControlledServer) -> None:
    with http_server.connect() as client:
        client.sendall(get("/held") + b"\x00nonsense\r\n\r\n")
        wait_until(lambda: len(http_server.exchanges) == 1)
        http_server.exchanges[0].reply(Response.text("the answer"))
        received = receive_all(client)
    assert statuses(received) == [200, 400]
    assert received.index(b"the answer") < received.index(b"invalid HTTP")


def test_oversized_body_gets_413_before_close(http_servers: Callable[..., ControlledServer]) -> None:
    http_server = http_servers(body_bytes=2**16)
    with http_server.connect() as client:
        client.sendall(post("/", b"x" * 2**23))
        assert statuses(receive_all(client)) == [413]
    with http_server.connect() as client:
        client.sendall(
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            + (b"8000\r\n" + b"x" * 2**15 + b"\r\n") * 9
        )
        assert statuses(receive_all(client)) == [413]
    assert http_server.exchanges == []


def test_large_body_is_not_read_from_unauthorized_client(http_server: ControlledServer) -> None:
    for headers in (["content-length: 1000000"], ["transfer-encoding: chunked"]):
        expecting = ["expect: 100-continue", "x-request-id: mine"]
        with http_server.connect() as client:
            client.sendall(
                "\r\n".join(["POST /guarded HTTP/1.1", "host: x", *headers, *expecting]).encode() + b"\r\n\r\n"
            )
            received = receive_all(client)
            assert (statuses(received), b"POST without a key" in received) == ([401], True)
            assert b"x-request-id: mine\r\n" in received
    assert http_server.exchanges == []
    with http_server.connect() as client:
        client.sendall(post("/guarded", b"x" * 100_000, "authorization: Bearer x", "connection: close"))
        assert statuses(receive_all(client)) == [200]
    with http_server.connect() as client:  # a small body is read, and rejected by the application
        client.sendall(post("/guarded", b"x" * 100, "connection: close"))
        assert statuses(receive_all(client)) == [200]


def test_rejected_requests_are_recorded(http_servers: Callable[..., ControlledServer]) -> None:
    http_server = http_servers(body_bytes=1000, read_s=0.2)
    for sent in (
        post("/much", b"x" * 2000, "x-request-id: mine"),
        b"GET /long HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 300,
        b"\x16\x03\x01nonsense",
        b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc",
    ):
        with http_server.connect() as client:
            client.sendall(sent)
            receive_all(client)
    recorded = [(record.operation, record.status, record.model) for record in http_server.records]
    assert recorded == [("POST /much", 413, ""), ("GET /long", 431, ""), ("HTTP", 400, ""), ("POST /slow", 408, "")]
    assert (http_server.records[0].id, http_server.records[3].seconds >= 0.2) == ("mine", True)


@pytest.mark.parametrize(
    "head", [b"a: " + b"x" * 2**20, b"a: b\r\n" * 300, b"a" * 2**20, b"".join(b"a%d: b\r\n" % n for n in range(300))]
)
def test_oversized_headers_and_trailers_get_431(http_server: ControlledServer, head: bytes) -> None:
    with http_server.connect() as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n" + head)  # a header that never ends is never complete
        assert statuses(receive_all(client)) == [431]
    with http_server.connect() as client:
        client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + head)
        assert statuses(receive_all(client)) == [431]
    assert http_server.exchanges == []


def test_trailers_are_not_headers(http_server: ControlledServer) -> None:
    with http_server.connect() as client:
        trailer = b"authorization: Bearer smuggled\r\n"
        client.sendall(
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n" + trailer + b"\r\n"
        )
        wait_until(lambda: len(http_server.exchanges) == 1)
    assert (http_server.exchanges[0].body, "authorization" in http_server.exchanges[0].headers) == (b"abc", False)


@pytest.mark.parametrize(
    "sent",
    [
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ncontent-length: 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: identity\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding:\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\ntransfer-encoding: chunked\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET http://x/ HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.0\r\nhost: x\r\nHost: y\r\n\r\n",
        b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\nhost: x\r\nhost: y\r\n\r\n",
        *(
            b"GET / HTTP/1.1\r\nhost: %s\r\n\r\n" % host
            for host in (
                b"a b",
                b"a/b",
                b"a@b",
                b"a:b",
                b"a:1:2",
                b"http://a",
                b"[::1",
                b"::1",
                b"a%zz",
                b"a?b",
                b"a#b",
                "ä".encode(),
            )
        ),
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1e3\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\na: b\x00c\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nhost: x\r\n\r\n",
        "GET /ä HTTP/1.1\r\nhost: x\r\n\r\n".encode(),
        b"GET / HTTP/1.1\r\nhost: x\r\na : b\r\n\r\n",
        b"GET / HTTP/1.1\r\n b: c\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
    ],
)
def test_ambiguous_or_invalid_request_gets_400(http_server: ControlledServer, sent: bytes) -> None:
    with http_server.connect() as client:
        client.sendall(sent)
        assert statuses(receive_all(client)) == [400]
    assert http_server.exchanges == []


@pytest.mark.parametrize("host", ["x", "a.b:80", "a_b", "127.0.0.1:8000", "[::1]:8000", "[fe80::1]", "a%20b", "x:", ""])
def test_valid_host_is_accepted(http_server: ControlledServer, host: str) -> None:
    with http_server.connect() as client:
        client.sendall(f"GET / HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
        assert statuses(receive_all(client)) == [200]
    with http_server.connect() as client:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert statuses(receive_all(client)) == [200]


def test_half_closed_client_is_answered(http_server: ControlledServer) -> None:
    with http_server.connect() as client:
        client.sendall(get("/held/1") + get("/held/2"))
        client.shutdown(socket.SHUT_WR)
        for index in range(2):
            wait_until(lambda index=index: len(http_server.exchanges) == index + 1)
            http_server.exchanges[index].reply(Response.text(f"answer {index}"))
        received = receive_all(client)
    assert [status for status in statuses(received) if status != 100] == [200, 200]
    assert received.index(b"answer 0") < received.index(b"answer 1")


def test_half_closed_client_is_distinguished_from_disconnected(http_server: ControlledServer) -> None:
    with http_server.connect() as waiting, http_server.connect() as disconnected:
        for client in (waiting, disconnected):
            client.sendall(get("/held"))
            client.shutdown(socket.SHUT_WR)
        wait_until(lambda: len(http_server.exchanges) == 2)
        disconnected.close()
        wait_until(lambda: any(exchange.is_closed for exchange in http_server.exchanges))
        (remaining,) = [exchange for exchange in http_server.exchanges if not exchange.is_closed]
        remaining.reply(Response.text("the answer"))
        received = receive_all(waiting)
    assert (statuses(received)[-1], b"the answer" in received) == (200, True)
    assert set(statuses(received)[:-1]) <= {100}


def test_disconnect_cancels_requests(http_server: ControlledServer) -> None:
    cancelled: list[str] = []
    with http_server.connect() as client:
        client.sendall(post("/held", b"x" * 1000) + post("/held/too", b"y" * 1000))
        wait_until(lambda: len(http_server.exchanges) == 1)
        http_server.exchanges[0].on_close = lambda: cancelled.append("first")
    wait_until(lambda: cancelled == ["first"])
    wait_until(lambda: not http_server.state.open)
    assert (http_server.state.buffered_bytes.used, len(http_server.exchanges)) == (0, 1)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("http://elsewhere:80/a/b?c=d", "/a/b"),
        ("http://elsewhere", "/"),
        ("/a%20b?c", "/a%20b"),
        ("*", "*"),
        ("/a?b=http://c", "/a"),
    ],
)
def test_request_target_is_split(http_server: ControlledServer, url: str, path: str) -> None:
    with http_server.connect() as client:
        client.sendall(f"OPTIONS {url} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        assert f"OPTIONS {path} 0".encode() in receive_all(client)


def test_http10_and_closing_clients_are_answered_and_closed(http_server: ControlledServer) -> None:
    for sent in (
        get("/", version="1.0"),
        get("/", "connection: keep-alive", version="1.0"),
        get("/", "connection: upgrade", "upgrade: h2c", version="1.0"),
        get("/", "connection: close") + get("/never"),
    ):
        with http_server.connect() as client:
            client.sendall(sent)
            received = receive_all(client)
        assert (statuses(received), b"connection: close" in received) == ([200], True), sent
    assert "/never" not in [exchange.path for exchange in http_server.exchanges]


def test_upgrade_request_is_answered_as_plain_request(http_server: ControlledServer) -> None:
    """As `curl --http2` and Java's client send them, with bodies; the connection stays open."""
    upgrade = ("connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "http2-settings: AAMAAABk")
    chunked = "POST /chunked HTTP/1.1\r\nhost: x\r\n" + "\r\n".join(upgrade) + "\r\ntransfer-encoding: chunked\r\n\r\n"
    sent = get("/first", *upgrade) + post("/second", b"abc", *upgrade) + post("/third", b"abcd", *upgrade)
    sent += chunked.encode() + b"5\r\nabcde\r\n0\r\n\r\n" + post("/last", b"abcdef", "connection: close")
    for size in (1, 7, len(sent)):
        with http_server.connect() as client:
            for begin in range(0, len(sent), size):
                client.sendall(sent[begin : begin + size])
            received = receive_all(client)
        assert statuses(received) == [200] * 5
        for answer in (b"GET /first 0", b"POST /second 3", b"POST /third 4", b"POST /chunked 5", b"POST /last 6"):
            assert answer in received


def test_upgrade_request_is_rejected_when_body_is_too_large(http_servers: Callable[..., ControlledServer]) -> None:
    http_server = http_servers(body_bytes=4)
    with http_server.connect() as client:
        client.sendall(post("/", b"abcde", "connection: upgrade", "upgrade: h2c"))
        assert statuses(receive_all(client)) == [413]


def test_unsupported_transfer_encoding_is_rejected(http_server: ControlledServer) -> None:
    with http_server.connect() as client:
        client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
        received = receive_all(client)
    assert (statuses(received), b"unsupported transfer-encoding" in received) == ([400], True)
    assert http_server.exchanges == []


def test_content_length_with_thousands_of_digits_is_read(http_server: ControlledServer) -> None:
    with http_server.connect() as client:
        client.sendall(
            b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: " + b"0" * 5000 + b"3\r\n\r\nabc"
        )
        assert b"POST / 3" in receive_all(client)


def test_input_after_last_request_is_ignored(http_server: ControlledServer) -> None:
    with http_server.connect() as client:
        client.sendall(get("/", "connection: close") + get("/never"))
        assert statuses(receive_all(client)) == [200]
    wait_until(lambda: not http_server.state.open)
    assert http_server.records == []


def test_connect_client_that_keeps_sending_receives_its_response(http_server: ControlledServer) -> None:
    with http_server.connect() as client:
        client.sendall(b"CONNECT /held HTTP/1.1\r\nhost: x\r\n\r\n")
        wait_until(lambda: len(http_server.exchanges) == 1)
        client.sendall(b"x" * 2**20)
        http_server.exchanges[0].reply(Response.text("the answer"))
        client.sendall(b"x" * 2**22)
        assert b"the answer" in receive_all(client)


def test_expect_continue_is_answered(http_server: ControlledServer) -> None:
    with http_server.connect() as client:
        client.sendall(
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n"
        )
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(b"abc")
        assert statuses(receive_all(client)) == [200]


def test_expect_continue_waits_for_earlier_response(http_server: ControlledServer) -> None:
    expecting = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n"
    with http_server.connect() as client:
        client.sendall(get("/held") + expecting)
        wait_until(lambda: len(http_server.exchanges) == 1)
        http_server.exchanges[0].reply(Response.text("the answer"))
        received = b""
        while not received.endswith(b"HTTP/1.1 100 Continue\r\n\r\n"):
            received += client.recv(100)
        assert statuses(received) == [200, 100]
        client.sendall(b"abc")
        assert statuses(receive_all(client)) == [200]


def test_http10_client_gets_no_continue(http_server: ControlledServer) -> None:
    with http_server.connect() as client:
        client.sendall(b"POST / HTTP/1.0\r\ncontent-length: 3\r\nexpect: 100-continue\r\n\r\nabc")
        assert statuses(receive_all(client)) == [200]


def test_head_response_has_no_body(http_server: ControlledServer) -> None:
    with http_server.connect() as client:
        client.sendall(b"HEAD / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        head, _, body = receive_all(client).partition(b"\r\n\r\n")
    assert (b"content-length: 8" in head, body) == (True, b"")


def test_unsafe_request_id_is_not_echoed(http_server: ControlledServer) -> None:
    for name, is_safe in (("mine-1", True), ("a\x85b", False), ("ä", False), ("x" * 200, False)):
        with http_server.connect() as client:
            client.sendall(get("/", f"x-request-id: {name}", "connection: close").decode().encode("latin-1"))
            assert (f"x-request-id: {name}\r\n".encode("latin-1") in receive_all(client)) == is_safe


def test_incomplete_request_gets_408_and_idle_one_is_closed(
    http_servers: Callable[..., ControlledServer],
) -> None:
    http_server = http_servers(read_s=0.3, idle_s=0.5)
    for start in (b"GET / HT", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc", get("/") + b"G"):
        with http_server.connect() as client:
            client.sendall(start)
            assert statuses(receive_all(client))[-1] == 408
    with http_server.connect() as client:
        client.sendall(b"\r\n")
        assert receive_all(client) == b""
    with http_server.connect() as client:
        client.sendall(get("/"))
        assert statuses(receive_all(client)) == [200]


def test_read_timeout_does_not_apply_while_request_is_processed(http_servers: Callable[..., ControlledServer]) -> None:
    http_server = http_servers(read_s=0.2, idle_s=0.2)
    with http_server.connect() as client:
        client.sendall(get("/held", "connection: close") + b"G")
        wait_until(lambda: len(http_server.exchanges) == 1)
        begin = time.monotonic()
        wait_until(lambda: time.monotonic() - begin > 0.7)
        http_server.exchanges[0].reply(Response.text("the answer"))
        assert b"the answer" in receive_all(client)


def test_client_that_does_not_read_is_disconnected(http_servers: Callable[..., ControlledServer]) -> None:
    http_server = http_servers(read_s=0.5)
    with http_server.connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(get("/held") * 20)
        wait_until(lambda: len(http_server.exchanges) == 1)
        for index in range(2):
            wait_until(lambda index=index: len(http_server.exchanges) > index)
            http_server.exchanges[index].reply(Response(200, b"x" * 2**24))
            if len(http_server.exchanges) == 1:
                break
        wait_until(lambda: not http_server.state.open)
    assert len(http_server.exchanges) <= 2


def test_slow_reader_receives_everything(http_servers: Callable[..., ControlledServer]) -> None:
    http_server = http_servers(read_s=0.3)
    with http_server.connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        client.sendall(get("/held", "connection: close"))
        wait_until(lambda: len(http_server.exchanges) == 1)
        http_server.exchanges[0].reply(Response(200, b"x" * 2**23))
        size, begin = 0, time.monotonic()
        while data := client.recv(2**18):
            size += len(data)
            if time.monotonic() - begin < 1.2:
                time.sleep(0.05)  # the slow reader itself
    assert size > 2**23


def test_thousands_of_pipelined_requests_are_answered_in_order(http_server: ControlledServer) -> None:
    with http_server.connect() as client:
        sender = threading.Thread(
            target=client.sendall, args=[b"".join(get(f"/{n}") for n in range(5000)) + get("/", "connection: close")]
        )
        sender.start()
        received = receive_all(client)
        sender.join()
    assert [int(part.split()[0]) for part in received.split(b"GET /")[1:-1]] == list(range(5000))


def test_request_is_rejected_when_buffered_bytes_exceed_limit(http_servers: Callable[..., ControlledServer]) -> None:
    http_server = http_servers(buffered_bytes=2**16)
    with http_server.connect() as first, http_server.connect() as second:
        first.sendall(post("/held", b"x" * 50_000, "connection: close"))
        wait_until(lambda: len(http_server.exchanges) == 1)
        second.sendall(post("/", b"x" * 50_000))
        received = receive_all(second)
        assert (statuses(received), b"retry-after: 1" in received) == ([429], True)
        http_server.exchanges[0].reply(Response.text("the answer"))
        assert statuses(receive_all(first)) == [200]
    with http_server.connect() as again:
        again.sendall(post("/", b"x" * 50_000, "connection: close"))
        assert statuses(receive_all(again)) == [200]


def test_drain_completes_started_requests(http_server: ControlledServer) -> None:
    with http_server.connect() as idle, http_server.connect() as sending, http_server.connect() as waiting:
        idle.sendall(get("/"))
        assert statuses(idle.recv(1000)) == [200]
        sending.sendall(post("/", b"abc")[:-1])
        waiting.sendall(get("/held") + get("/after"))
        wait_until(lambda: len(http_server.exchanges) == 2 and len(http_server.state.open) == 3)
        wait_until(lambda: any(connection.is_receiving for connection in http_server.state.open))
        http_server.drain()
        assert receive_all(idle) == b""
        sending.sendall(b"c")
        received = receive_all(sending)
        assert (statuses(received), b"connection: close" in received) == ([200], True)
        http_server.exchanges[1].reply(Response.text("the answer"))
        assert statuses(receive_all(waiting)) == [200, 200]
        with http_server.connect() as late:
            assert statuses(receive_all(late)) == [503]


def test_connection_beyond_limit_gets_503(http_servers: Callable[..., ControlledServer]) -> None:
    http_server = http_servers(connections=2)
    with http_server.connect() as first, http_server.connect(), http_server.connect() as third:
        third.sendall(get("/"))
        assert statuses(receive_all(third)) == [503]
        first.sendall(get("/", "connection: close"))
        assert statuses(receive_all(first)) == [200]


def test_response_is_sent_by_its_thread_under_light_load(http_server: ControlledServer) -> None:
    with http_server.connect() as client:
        client.sendall(get("/held"))
        wait_until(lambda: len(http_server.exchanges) == 1)
        with blocked_loop(http_server):
            http_server.exchanges[0].reply(Response.text("the answer"))
            assert client.recv(2**16).endswith(b"the answer")
        client.sendall(get("/more", "connection: close"))
        assert statuses(receive_all(client)) == [200]


def test_responses_are_sent_by_loop_under_load(http_server: ControlledServer) -> None:
    with ExitStack() as opened:
        clients = [opened.enter_context(http_server.connect()) for _ in range(6)]
        for client in clients:
            client.sendall(get("/held"))
        wait_until(lambda: len(http_server.exchanges) == len(clients))
        with blocked_loop(http_server):
            for exchange in http_server.exchanges:
                exchange.reply(Response.text("the answer"))
            clients[0].settimeout(0.2)
            with pytest.raises(TimeoutError):
                clients[0].recv(1)
        clients[0].settimeout(20)
        assert [statuses(client.recv(2**16)) for client in clients] == [[200]] * len(clients)
        wait_until(lambda: not http_server.state.in_flight)
        clients[0].sendall(get("/held"))
        wait_until(lambda: len(http_server.exchanges) == len(clients) + 1)
        with blocked_loop(http_server):  # a lone request is answered by its thread again
            http_server.exchanges[-1].reply(Response.text("the answer"))
            assert statuses(clients[0].recv(2**16)) == [200]


def test_connections_lost_at_once_are_closed_in_parts(http_server: ControlledServer) -> None:
    clients = [http_server.connect() for _ in range(100)]
    wait_until(lambda: len(http_server.state.open) == len(clients))

    async def open_by_iteration() -> list[int]:
        counts = [len(clients)]
        while http_server.state.open:
            await asyncio.sleep(0)
            counts.append(len(http_server.state.open))
        return counts

    with blocked_loop(http_server):
        counts = http_server.submit(open_by_iteration())
        for client in clients:
            client.close()
    assert max(before - after for before, after in pairwise(counts.result(20))) <= 16


def test_partially_sent_response_is_finished_first(http_server: ControlledServer) -> None:
    large = "x" * 2**24
    with http_server.connect() as client:
        client.sendall(get("/held"))
        wait_until(lambda: len(http_server.exchanges) == 1)
        with blocked_loop(http_server):
            client.sendall(
                b"POST /more HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n"
                b"expect: 100-continue\r\nconnection: close\r\n\r\n"
            )
            http_server.exchanges[0].reply(Response.text(large))
        received = b""
        while not received.endswith(b"100 Continue\r\n\r\n"):
            received += client.recv(2**16)
        client.sendall(b"abc")
        received += receive_all(client)
    assert statuses(received) == [200, 100, 200]
    assert large.encode() + b"HTTP/1.1 100" in received


def test_disconnect_after_response_is_recorded_as_answered(http_server: ControlledServer) -> None:
    with http_server.connect() as client:
        client.sendall(get("/held"))
        wait_until(lambda: len(http_server.exchanges) == 1)
        http_server.exchanges[0].watch = http_server.records.append
        with blocked_loop(http_server):
            http_server.exchanges[0].reply(Response.text("the answer"))
            assert client.recv(2**16).endswith(b"the answer")
            client.close()
    wait_until(lambda: bool(http_server.records) and not http_server.state.open)
    assert [record.status for record in http_server.records] == [200]


def test_response_is_recorded_before_next_request(http_server: ControlledServer) -> None:
    with http_server.connect() as first, http_server.connect() as second:
        first.sendall(get("/held"))
        wait_until(lambda: len(http_server.exchanges) == 1)
        http_server.exchanges[0].watch = http_server.records.append
        second.sendall(get("/other"))
        assert second.recv(2**16)
        counted: list[int] = []
        app = http_server.state.app

        def counting(exchange: Exchange) -> None:
            counted.append(len(http_server.records))
            app(exchange)

        http_server.state.app = counting
        with blocked_loop(http_server):
            http_server.exchanges[0].reply(Response.text("the answer"))
            assert first.recv(2**16).endswith(b"the answer")
            second.sendall(get("/after"))
        assert second.recv(2**16)
    assert counted == [1]


def test_client_may_send_again_when_response_did_not_announce_close(http_server: ControlledServer) -> None:
    with http_server.connect() as client:
        client.sendall(get("/held"))
        wait_until(lambda: len(http_server.exchanges) == 1)
        with blocked_loop(http_server):
            http_server.exchanges[0].reply(Response.text("the answer"))
            http_server.state.is_draining = True
            assert b"connection: close" not in client.recv(2**16)
        client.sendall(get("/more"))
        received = receive_all(client)
        assert (statuses(received), b"connection: close" in received) == ([200], True)


def test_connection_answered_by_thread_is_closed_when_drained(http_server: ControlledServer) -> None:
    with http_server.connect() as client:
        client.sendall(get("/held"))
        wait_until(lambda: len(http_server.exchanges) == 1)
        with blocked_loop(http_server):
            http_server.exchanges[0].reply(Response.text("the answer"))
            http_server.state.is_draining = http_server.state.is_drained = True
        assert statuses(receive_all(client)) == [200]


def test_every_started_request_is_answered_while_draining(http_server: ControlledServer) -> None:
    with http_server.connect() as client:
        client.sendall(get("/held"))
        wait_until(lambda: len(http_server.exchanges) == 1)

        async def answer_and_read_on() -> None:
            (connection,) = http_server.state.open
            http_server.state.drain()
            http_server.exchanges[0].reply(Response.text("the answer"))
            connection.data_received(get("/second"))  # before the loop has settled the response

        http_server.run(answer_and_read_on())
        received = receive_all(client)
    assert [exchange.path for exchange in http_server.exchanges] == ["/held", "/second"]
    first, last = received.split(b"HTTP/1.1 200")[1:]
    assert (b"connection: close" in first, b"connection: close" in last) == (False, True)


def test_no_request_runs_after_last_response(http_server: ControlledServer) -> None:
    with http_server.connect() as client:
        client.sendall(get("/first", "connection: keep-alive", version="1.0") * 2)
        assert statuses(receive_all(client)) == [200]
    wait_until(lambda: not http_server.state.open)
    assert len(http_server.exchanges) == 1


def test_rejected_client_reads_reason_while_draining(
    http_server: ControlledServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hasten.server.http.connection._LINGER_S", 60.0)
    with http_server.connect() as waiting, http_server.connect() as rejected:
        waiting.sendall(get("/held") + b"\x00nonsense\r\n\r\n")
        rejected.sendall(b"\x00nonsense\r\n\r\n")
        assert statuses(receive_all(rejected)) == [400]
        wait_until(lambda: len(http_server.exchanges) == 1)
        http_server.drain()
        http_server.exchanges[0].reply(Response.text("the answer"))
        assert statuses(receive_all(waiting)) == [200, 400]
        http_server.run(asyncio.sleep(0.05))
        assert len(http_server.state.open) == 2  # not closed: closing would reset clients that are still sending
    wait_until(lambda: not http_server.state.open)


def test_repeated_heads_are_answered_like_new_ones(http_server: ControlledServer) -> None:
    """Only whole requests with the same head, byte for byte, are taken without parsing it again."""
    requests = [
        *(post("/a", body) for body in (b"one", b"two", b"\r\n\r\n", b"three")),
        post("/a?query", b"two", "x-request-id: mine"),
        get("/a"),
    ]
    with http_server.connect() as client:
        # Twice each: alone, in two parts, and with the next request in the same packet.
        for count, request in enumerate((*requests, *requests), 1):
            client.sendall(request)
            wait_until(lambda count=count: len(http_server.exchanges) == count)
        for request in requests:
            client.sendall(request[:-2])
            client.sendall(request[-2:])
        client.sendall(b"".join(requests) + get("/last", "connection: close"))
        assert statuses(receive_all(client)) == [200] * (4 * len(requests) + 1)
    seen = [(exchange.method, exchange.path, exchange.query, exchange.body) for exchange in http_server.exchanges]
    sent = [("POST", "/a", "", body) for body in (b"one", b"two", b"\r\n\r\n", b"three")]
    sent += [("POST", "/a", "query", b"two"), ("GET", "/a", "", b"")]
    assert seen[:-1] == sent * 4
    assert [exchange.id for exchange in http_server.exchanges].count("mine") == 4


def test_heads_without_a_body_size_are_parsed_each_time(http_server: ControlledServer) -> None:
    chunked = b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    for end in (b"3\r\nabc\r\n0\r\n\r\n", b"2\r\nab\r\n0\r\n\r\n"):
        with http_server.connect() as client:
            client.sendall(chunked + end + get("/last", "connection: close"))
            assert statuses(receive_all(client)) == [200, 200]
    assert [len(exchange.body) for exchange in http_server.exchanges] == [3, 0, 2, 0]
