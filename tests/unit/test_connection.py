"""What clients may do to a connection."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from hasten.server.exchange import Exchange, Response
from sites import Site, all_of, get, post, standstill, statuses, until

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")
pytest.importorskip("httptools", reason="serving needs hasten[serve]")


def test_a_refusal_waits_for_its_turn(site: Site) -> None:
    with site.connect() as raw:
        raw.sendall(get("/held") + b"\x00nonsense\r\n\r\n")
        until(lambda: len(site.asked) == 1)
        site.asked[0].reply(Response.text("the answer"))
        received = all_of(raw)
    assert statuses(received) == [200, 400]
    assert received.index(b"the answer") < received.index(b"not HTTP")


def test_who_sends_too_much_is_told_so_and_not_just_cut_off(sites: Callable[..., Site]) -> None:
    site = sites(body_bytes=2**16)
    with site.connect() as raw:
        raw.sendall(post("/", b"x" * 2**23))
        assert statuses(all_of(raw)) == [413]
    with site.connect() as raw:
        raw.sendall(
            b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + (b"8000\r\n" + b"x" * 2**15 + b"\r\n") * 9
        )
        assert statuses(all_of(raw)) == [413]
    assert site.asked == []


def test_a_large_body_is_not_read_from_whoever_is_not_answered(site: Site) -> None:
    for headers in (["content-length: 1000000"], ["transfer-encoding: chunked"]):
        expecting = ["expect: 100-continue", "x-request-id: mine"]
        with site.connect() as raw:
            raw.sendall("\r\n".join(["POST /guarded HTTP/1.1", *headers, *expecting]).encode() + b"\r\n\r\n")
            received = all_of(raw)
            assert (statuses(received), b"POST without a key" in received) == ([401], True)
            assert b"x-request-id: mine\r\n" in received
    assert site.asked == []
    with site.connect() as raw:
        raw.sendall(post("/guarded", b"x" * 100_000, "authorization: Bearer x", "connection: close"))
        assert statuses(all_of(raw)) == [200]
    with site.connect() as raw:  # so little is read, and refused by the application
        raw.sendall(post("/guarded", b"x" * 100, "connection: close"))
        assert statuses(all_of(raw)) == [200]


def test_what_is_refused_before_it_is_read_is_told_to_those_who_watch(sites: Callable[..., Site]) -> None:
    site = sites(body_bytes=1000, read_s=0.2)
    for sent in (
        post("/much", b"x" * 2000, "x-request-id: mine"),
        b"GET /long HTTP/1.1\r\n" + b"a: b\r\n" * 300,
        b"\x16\x03\x01nonsense",
        b"POST /slow HTTP/1.1\r\ncontent-length: 9\r\n\r\nabc",
    ):
        with site.connect() as raw:
            raw.sendall(sent)
            all_of(raw)
    told = [(seen.what, seen.status, seen.model) for seen in site.seen]
    assert told == [("POST /much", 413, ""), ("GET /long", 431, ""), ("HTTP", 400, ""), ("POST /slow", 408, "")]
    assert (site.seen[0].id, site.seen[3].seconds >= 0.2) == ("mine", True)


@pytest.mark.parametrize(
    "head", [b"a: " + b"x" * 2**20, b"a: b\r\n" * 300, b"a" * 2**20, b"".join(b"a%d: b\r\n" % n for n in range(300))]
)
def test_headers_have_an_end(site: Site, head: bytes) -> None:
    with site.connect() as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n" + head)  # a header that goes on and on is never whole
        assert statuses(all_of(raw)) == [431]
    with site.connect() as raw:
        raw.sendall(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + head)
        assert statuses(all_of(raw)) == [431]
    assert site.asked == []


def test_what_stands_behind_a_body_is_no_header_of_the_request(site: Site) -> None:
    with site.connect() as raw:
        trailer = b"authorization: Bearer smuggled\r\n"
        raw.sendall(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n" + trailer + b"\r\n")
        until(lambda: len(site.asked) == 1)
    assert (site.asked[0].body, "authorization" in site.asked[0].headers) == (b"abc", False)


@pytest.mark.parametrize(
    "sent",
    [
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 1e3\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"GET / HTTP/1.1\r\na: b\x00c\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\n\r\n",
        "GET /ä HTTP/1.1\r\n\r\n".encode(),
        b"GET / HTTP/1.1\r\na : b\r\n\r\n",
        b"GET / HTTP/1.1\r\n b: c\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
    ],
)
def test_what_can_be_understood_in_two_ways_is_refused(site: Site, sent: bytes) -> None:
    with site.connect() as raw:
        raw.sendall(sent)
        assert statuses(all_of(raw)) == [400]
    assert site.asked == []


def test_who_sends_no_more_is_answered_all_the_same(site: Site) -> None:
    with site.connect() as raw:
        raw.sendall(get("/held/1") + get("/held/2"))
        raw.shutdown(socket.SHUT_WR)
        for place in range(2):
            until(lambda place=place: len(site.asked) == place + 1)
            site.asked[place].reply(Response.text(f"answer {place}"))
        received = all_of(raw)
    assert [status for status in statuses(received) if status != 100] == [200, 200]
    assert received.index(b"answer 0") < received.index(b"answer 1")


def test_who_waits_long_with_half_a_connection_is_told_apart_from_who_is_gone(site: Site) -> None:
    with site.connect() as waits, site.connect() as gone:
        for raw in (waits, gone):
            raw.sendall(get("/held"))
            raw.shutdown(socket.SHUT_WR)
        until(lambda: len(site.asked) == 2)
        gone.close()
        until(lambda: any(exchange.is_closed for exchange in site.asked))
        (left,) = [exchange for exchange in site.asked if not exchange.is_closed]
        left.reply(Response.text("the answer"))
        received = all_of(waits)
    assert (statuses(received)[-1], b"the answer" in received) == (200, True)
    assert set(statuses(received)[:-1]) <= {100}


def test_who_leaves_has_its_requests_withdrawn(site: Site) -> None:
    withdrawn: list[str] = []
    with site.connect() as raw:
        raw.sendall(post("/held", b"x" * 1000) + post("/held/too", b"y" * 1000))
        until(lambda: len(site.asked) == 1)
        site.asked[0].on_close = lambda: withdrawn.append("first")
    until(lambda: withdrawn == ["first"])
    until(lambda: not site.connections.open)
    assert (site.connections.held_bytes, len(site.asked)) == (0, 1)


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
def test_where_a_request_goes(site: Site, url: str, path: str) -> None:
    with site.connect() as raw:
        raw.sendall(f"OPTIONS {url} HTTP/1.1\r\nconnection: close\r\n\r\n".encode())
        assert f"OPTIONS {path} 0".encode() in all_of(raw)


def test_older_clients_and_those_that_close_get_an_answer_and_an_end(site: Site) -> None:
    for sent in (
        get("/", version="1.0"),
        get("/", "connection: keep-alive", version="1.0"),
        get("/", "connection: upgrade", "upgrade: h2c", version="1.0"),
        get("/", "connection: close") + get("/never"),
    ):
        with site.connect() as raw:
            raw.sendall(sent)
            received = all_of(raw)
        assert (statuses(received), b"connection: close" in received) == ([200], True), sent
    assert "/never" not in [exchange.path for exchange in site.asked]


def test_who_would_upgrade_is_answered_as_one_that_would_not(site: Site) -> None:
    """As `curl --http2` and Java's client ask, bodies and all; the connection stays."""
    upgrade = ("connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "http2-settings: AAMAAABk")
    chunked = "POST /chunked HTTP/1.1\r\n" + "\r\n".join(upgrade) + "\r\ntransfer-encoding: chunked\r\n\r\n"
    sent = get("/first", *upgrade) + post("/second", b"abc", *upgrade) + post("/third", b"abcd", *upgrade)
    sent += chunked.encode() + b"5\r\nabcde\r\n0\r\n\r\n" + post("/last", b"abcdef", "connection: close")
    for size in (1, 7, len(sent)):
        with site.connect() as raw:
            for begin in range(0, len(sent), size):
                raw.sendall(sent[begin : begin + size])
            received = all_of(raw)
        assert statuses(received) == [200] * 5
        for told in (b"GET /first 0", b"POST /second 3", b"POST /third 4", b"POST /chunked 5", b"POST /last 6"):
            assert told in received


def test_who_would_upgrade_is_refused_like_others(sites: Callable[..., Site]) -> None:
    site = sites(body_bytes=4)
    with site.connect() as raw:
        raw.sendall(post("/", b"abcde", "connection: upgrade", "upgrade: h2c"))
        assert statuses(all_of(raw)) == [413]


def test_a_body_in_a_form_that_is_not_read(site: Site) -> None:
    with site.connect() as raw:
        raw.sendall(b"POST / HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
        received = all_of(raw)
    assert (statuses(received), b"in no other transfer-encoding" in received) == ([400], True)
    assert site.asked == []


def test_a_length_with_thousands_of_digits(site: Site) -> None:
    with site.connect() as raw:
        raw.sendall(b"POST / HTTP/1.1\r\nconnection: close\r\ncontent-length: " + b"0" * 5000 + b"3\r\n\r\nabc")
        assert b"POST / 3" in all_of(raw)


def test_what_follows_the_last_request_is_nobodys(site: Site) -> None:
    with site.connect() as raw:
        raw.sendall(get("/", "connection: close") + get("/never"))
        assert statuses(all_of(raw)) == [200]
    until(lambda: not site.connections.open)
    assert site.seen == []


def test_who_connects_and_sends_on_reads_its_answer(site: Site) -> None:
    with site.connect() as raw:
        raw.sendall(b"CONNECT /held HTTP/1.1\r\n\r\n")
        until(lambda: len(site.asked) == 1)
        raw.sendall(b"x" * 2**20)
        site.asked[0].reply(Response.text("the answer"))
        raw.sendall(b"x" * 2**22)
        assert b"the answer" in all_of(raw)


def test_expecting_to_go_on(site: Site) -> None:
    with site.connect() as raw:
        raw.sendall(b"POST / HTTP/1.1\r\ncontent-length: 3\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n")
        assert raw.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.sendall(b"abc")
        assert statuses(all_of(raw)) == [200]


def test_expecting_to_go_on_while_another_is_answered(site: Site) -> None:
    expecting = b"POST / HTTP/1.1\r\ncontent-length: 3\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n"
    with site.connect() as raw:
        raw.sendall(get("/held") + expecting)
        until(lambda: len(site.asked) == 1)
        site.asked[0].reply(Response.text("the answer"))
        received = b""
        while not received.endswith(b"HTTP/1.1 100 Continue\r\n\r\n"):
            received += raw.recv(100)
        assert statuses(received) == [200, 100]
        raw.sendall(b"abc")
        assert statuses(all_of(raw)) == [200]


def test_older_clients_are_not_told_to_go_on(site: Site) -> None:
    with site.connect() as raw:
        raw.sendall(b"POST / HTTP/1.0\r\ncontent-length: 3\r\nexpect: 100-continue\r\n\r\nabc")
        assert statuses(all_of(raw)) == [200]


def test_a_head_has_no_body(site: Site) -> None:
    with site.connect() as raw:
        raw.sendall(b"HEAD / HTTP/1.1\r\nconnection: close\r\n\r\n")
        head, _, body = all_of(raw).partition(b"\r\n\r\n")
    assert (b"content-length: 8" in head, body) == (True, b"")


def test_a_name_for_a_request_brings_no_headers_with_it(site: Site) -> None:
    for name, is_fit in (("mine-1", True), ("a\x85b", False), ("ä", False), ("x" * 200, False)):
        with site.connect() as raw:
            raw.sendall(get("/", f"x-request-id: {name}", "connection: close").decode().encode("latin-1"))
            assert (f"x-request-id: {name}\r\n".encode("latin-1") in all_of(raw)) == is_fit


def test_who_never_ends_a_request_is_told_and_who_asks_nothing_is_closed(sites: Callable[..., Site]) -> None:
    site = sites(read_s=0.3, idle_s=0.5)
    for begun in (b"GET / HT", b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nabc", get("/") + b"G"):
        with site.connect() as raw:
            raw.sendall(begun)
            assert statuses(all_of(raw))[-1] == 408
    with site.connect() as raw:
        raw.sendall(b"\r\n")
        assert all_of(raw) == b""
    with site.connect() as raw:
        raw.sendall(get("/"))
        assert statuses(all_of(raw)) == [200]


def test_a_slow_answer_is_not_cut_off_by_the_time_to_send(sites: Callable[..., Site]) -> None:
    site = sites(read_s=0.2, idle_s=0.2)
    with site.connect() as raw:
        raw.sendall(get("/held", "connection: close") + b"G")
        until(lambda: len(site.asked) == 1)
        begin = time.monotonic()
        until(lambda: time.monotonic() - begin > 0.7)
        site.asked[0].reply(Response.text("the answer"))
        assert b"the answer" in all_of(raw)


def test_who_does_not_read_is_not_answered_ahead_and_is_cut_off(sites: Callable[..., Site]) -> None:
    site = sites(read_s=0.5)
    with site.connect() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.sendall(get("/held") * 20)
        until(lambda: len(site.asked) == 1)
        for place in range(2):
            until(lambda place=place: len(site.asked) > place)
            site.asked[place].reply(Response(200, b"x" * 2**24))
            if len(site.asked) == 1:
                break
        until(lambda: not site.connections.open)
    assert len(site.asked) <= 2


def test_who_reads_slowly_gets_all_of_it(sites: Callable[..., Site]) -> None:
    site = sites(read_s=0.3)
    with site.connect() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        raw.sendall(get("/held", "connection: close"))
        until(lambda: len(site.asked) == 1)
        site.asked[0].reply(Response(200, b"x" * 2**23))
        size, begin = 0, time.monotonic()
        while data := raw.recv(2**18):
            size += len(data)
            if time.monotonic() - begin < 1.2:
                time.sleep(0.05)  # the slow reader itself
    assert size > 2**23


def test_thousands_ahead_are_answered_in_their_order(site: Site) -> None:
    with site.connect() as raw:
        sender = threading.Thread(
            target=raw.sendall, args=[b"".join(get(f"/{n}") for n in range(5000)) + get("/", "connection: close")]
        )
        sender.start()
        received = all_of(raw)
        sender.join()
    assert [int(part.split()[0]) for part in received.split(b"GET /")[1:-1]] == list(range(5000))


def test_not_all_of_them_at_once(sites: Callable[..., Site]) -> None:
    site = sites(held_bytes=2**16)
    with site.connect() as first, site.connect() as second:
        first.sendall(post("/held", b"x" * 50_000, "connection: close"))
        until(lambda: len(site.asked) == 1)
        second.sendall(post("/", b"x" * 50_000))
        received = all_of(second)
        assert (statuses(received), b"retry-after: 1" in received) == ([429], True)
        site.asked[0].reply(Response.text("the answer"))
        assert statuses(all_of(first)) == [200]
    with site.connect() as again:
        again.sendall(post("/", b"x" * 50_000, "connection: close"))
        assert statuses(all_of(again)) == [200]


def test_draining_lets_those_end_that_have_begun(site: Site) -> None:
    with site.connect() as idle, site.connect() as sending, site.connect() as waiting:
        idle.sendall(get("/"))
        assert statuses(idle.recv(1000)) == [200]
        sending.sendall(post("/", b"abc")[:-1])
        waiting.sendall(get("/held") + get("/after"))
        until(lambda: len(site.asked) == 2 and len(site.connections.open) == 3)
        until(lambda: any(connection._is_within for connection in site.connections.open))
        site.drain()
        assert all_of(idle) == b""
        sending.sendall(b"c")
        received = all_of(sending)
        assert (statuses(received), b"connection: close" in received) == ([200], True)
        site.asked[1].reply(Response.text("the answer"))
        assert statuses(all_of(waiting)) == [200, 200]
        with site.connect() as late:
            assert statuses(all_of(late)) == [503]


def test_too_many_connections(sites: Callable[..., Site]) -> None:
    site = sites(connections=2)
    with site.connect() as first, site.connect(), site.connect() as third:
        third.sendall(get("/"))
        assert statuses(all_of(third)) == [503]
        first.sendall(get("/", "connection: close"))
        assert statuses(all_of(first)) == [200]


def test_whoever_has_an_answer_sends_it(site: Site) -> None:
    with site.connect() as raw:
        raw.sendall(get("/held"))
        until(lambda: len(site.asked) == 1)
        with standstill(site):
            site.asked[0].reply(Response.text("the answer"))
            assert raw.recv(2**16).endswith(b"the answer")
        raw.sendall(get("/more", "connection: close"))
        assert statuses(all_of(raw)) == [200]


def test_where_many_are_waited_for_the_loop_sends(site: Site) -> None:
    with ExitStack() as opened:
        clients = [opened.enter_context(site.connect()) for _ in range(6)]
        for raw in clients:
            raw.sendall(get("/held"))
        until(lambda: len(site.asked) == len(clients))
        with standstill(site):
            for exchange in site.asked:
                exchange.reply(Response.text("the answer"))
            clients[0].settimeout(0.2)
            with pytest.raises(TimeoutError):
                clients[0].recv(1)
        clients[0].settimeout(20)
        assert [statuses(raw.recv(2**16)) for raw in clients] == [[200]] * len(clients)
        until(lambda: not site.connections.under_way)
        clients[0].sendall(get("/held"))
        until(lambda: len(site.asked) == len(clients) + 1)
        with standstill(site):  # who is alone again is sent its answer at once
            site.asked[-1].reply(Response.text("the answer"))
            assert statuses(clients[0].recv(2**16)) == [200]


def test_what_does_not_fit_goes_before_anything_else(site: Site) -> None:
    large = "x" * 2**24
    with site.connect() as raw:
        raw.sendall(get("/held"))
        until(lambda: len(site.asked) == 1)
        with standstill(site):
            raw.sendall(
                b"POST /more HTTP/1.1\r\ncontent-length: 3\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n"
            )
            site.asked[0].reply(Response.text(large))
        received = b""
        while not received.endswith(b"100 Continue\r\n\r\n"):
            received += raw.recv(2**16)
        raw.sendall(b"abc")
        received += all_of(raw)
    assert statuses(received) == [200, 100, 200]
    assert large.encode() + b"HTTP/1.1 100" in received


def test_who_leaves_with_its_answer_was_answered(site: Site) -> None:
    with site.connect() as raw:
        raw.sendall(get("/held"))
        until(lambda: len(site.asked) == 1)
        site.asked[0].watch = site.seen.append
        with standstill(site):
            site.asked[0].reply(Response.text("the answer"))
            assert raw.recv(2**16).endswith(b"the answer")
            raw.close()
    until(lambda: bool(site.seen) and not site.connections.open)
    assert [seen.status for seen in site.seen] == [200]


def test_whoever_has_its_answer_finds_it_counted(site: Site) -> None:
    with site.connect() as first, site.connect() as second:
        first.sendall(get("/held"))
        until(lambda: len(site.asked) == 1)
        site.asked[0].watch = site.seen.append
        second.sendall(get("/other"))
        assert second.recv(2**16)
        counted: list[int] = []
        app = site.connections.app

        def counting(exchange: Exchange) -> None:
            counted.append(len(site.seen))
            app(exchange)

        site.connections.app = counting
        with standstill(site):
            site.asked[0].reply(Response.text("the answer"))
            assert first.recv(2**16).endswith(b"the answer")
            second.sendall(get("/after"))
        assert second.recv(2**16)
    assert counted == [1]


def test_who_was_not_told_that_it_was_the_last_answer_may_ask_again(site: Site) -> None:
    with site.connect() as raw:
        raw.sendall(get("/held"))
        until(lambda: len(site.asked) == 1)
        with standstill(site):
            site.asked[0].reply(Response.text("the answer"))
            site.connections.is_draining = True
            assert b"connection: close" not in raw.recv(2**16)
        raw.sendall(get("/more"))
        received = all_of(raw)
        assert (statuses(received), b"connection: close" in received) == ([200], True)


def test_who_was_sent_its_answer_while_all_are_closed_is_closed_too(site: Site) -> None:
    with site.connect() as raw:
        raw.sendall(get("/held"))
        until(lambda: len(site.asked) == 1)
        with standstill(site):
            site.asked[0].reply(Response.text("the answer"))
            site.connections.is_draining = site.connections.is_drained = True
        assert statuses(all_of(raw)) == [200]


def test_while_all_are_closed_every_request_that_is_run_is_answered(site: Site) -> None:
    with site.connect() as raw:
        raw.sendall(get("/held"))
        until(lambda: len(site.asked) == 1)

        async def answer_and_read_on() -> None:
            (connection,) = site.connections.open
            site.connections.drain()
            site.asked[0].reply(Response.text("the answer"))
            connection.data_received(get("/second"))  # before the loop has come to the answer

        site.call(answer_and_read_on())
        received = all_of(raw)
    assert [exchange.path for exchange in site.asked] == ["/held", "/second"]
    first, last = received.split(b"HTTP/1.1 200")[1:]
    assert (b"connection: close" in first, b"connection: close" in last) == (False, True)


def test_nothing_is_run_behind_a_last_answer(site: Site) -> None:
    with site.connect() as raw:
        raw.sendall(get("/first", "connection: keep-alive", version="1.0") * 2)
        assert statuses(all_of(raw)) == [200]
    until(lambda: not site.connections.open)
    assert len(site.asked) == 1


def test_who_is_refused_while_all_are_closed_can_read_why(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten.server.connection._LINGER_S", 60.0)
    with site.connect() as waiting, site.connect() as refused:
        waiting.sendall(get("/held") + b"\x00nonsense\r\n\r\n")
        refused.sendall(b"\x00nonsense\r\n\r\n")
        assert statuses(all_of(refused)) == [400]
        until(lambda: len(site.asked) == 1)
        site.drain()
        site.asked[0].reply(Response.text("the answer"))
        assert statuses(all_of(waiting)) == [200, 400]
        site.call(asyncio.sleep(0.05))
        assert len(site.connections.open) == 2  # not closed, which would reset what they still send
    until(lambda: not site.connections.open)
