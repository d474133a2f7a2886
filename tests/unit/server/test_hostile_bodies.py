"""Bodies that are small on the wire, and large once they are decompressed or decoded."""

from __future__ import annotations

import gzip
import random
import time
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from hasten.core.errors import InputError, OverloadedError, TooLargeError
from hasten.server.http.compression import decompress
from hasten.server.http.exchange import DisconnectedError, Exchange, Response, read_json
from hasten.server.http.state import HttpLimits, HttpState
from hasten.server.protocols import oip
from support.http_server import ControlledServer, post, receive_all, statuses
from support.wait import wait_until

_NOISE = random.Random(0).randbytes(2**20)


def test_decompression_stops_at_size_and_ratio() -> None:
    bomb = gzip.compress(bytes(2**24))
    sizes: list[int] = []
    with pytest.raises(TooLargeError, match="compressed more than 200:1"):
        decompress(bomb, "gzip", 2**25, sizes.append)
    assert sum(sizes) <= 2**20 < len(bomb) * 200
    with pytest.raises(TooLargeError, match="larger than 1000 bytes"):
        decompress(bomb, "gzip", 1000)
    # One text many times: small bodies may be compressed to any ratio, as may large ones to less than the limit.
    for content in (b"a" * 2**20, _NOISE + bytes(2**22), b""):
        assert decompress(zlib.compress(content), "deflate", 2**23) == content


@pytest.mark.parametrize("cut", [1, 10, 2**19])
def test_truncated_and_overlong_bodies_are_rejected(cut: int) -> None:
    compressed = gzip.compress(_NOISE)
    for body in (compressed[:-cut], compressed + b"x" * cut):
        with pytest.raises(InputError, match="truncated gzip, or has data"):
            decompress(body, "gzip", 2**22)


def _state(buffered_bytes: int) -> HttpState:
    return HttpState(lambda _: None, HttpLimits(buffered_bytes=buffered_bytes))


def _compressed(state: HttpState, content: bytes) -> Exchange:
    body, headers = gzip.compress(content), {"content-encoding": "gzip"}
    state.reserve(len(body))
    return Exchange("POST", "/", "", headers, body, lambda _: None, reserved_bytes=len(body), reserve=state.reserve)


def test_decompressed_bytes_count_until_exchange_is_released() -> None:
    state = _state(5 * 2**20)
    first, second = (_compressed(state, _NOISE + bytes(2**20)) for _ in range(2))
    received = state.buffered_bytes.used
    for _ in range(2):  # a second reading, as after a reload, counts nothing more
        assert len(first.content()) == 2**21
        assert state.buffered_bytes.used == received + 2**21
    with pytest.raises(OverloadedError):
        second.content()
    state.release(first)
    state.release(second)
    assert state.buffered_bytes.used == 0


def test_body_of_disconnected_client_is_not_decompressed() -> None:
    state = _state(2**22)
    exchange = _compressed(state, _NOISE)
    exchange.disconnect()
    assert exchange.body == b""
    waiting = _compressed(state, _NOISE)
    for each in (exchange, waiting):
        state.release(each)
    with pytest.raises(DisconnectedError):
        waiting.content()
    assert state.buffered_bytes.used == 0


def test_decompressed_bytes_are_given_back_after_any_answer(http_servers: Callable[..., ControlledServer]) -> None:
    server = http_servers(buffered_bytes=2**22)
    app = server.state.app

    def read(exchange: Exchange) -> None:
        try:
            exchange.reply(Response.text(str(len(exchange.content()))))
        except (InputError, OverloadedError, TooLargeError) as error:
            exchange.fail(error)
        app(exchange)

    server.state.app = read
    for content, status in ((gzip.compress(_NOISE), 200), (gzip.compress(bytes(2**24)), 413), (b"nonsense", 400)):
        with server.connect() as client:
            client.sendall(post("/", content, "content-encoding: gzip", "connection: close"))
            assert statuses(receive_all(client)) == [status]
        wait_until(lambda: server.state.buffered_bytes.used == 0)


_LISTS = b'{"a":[' + b"[]," * 2**17 + b"[]]}"


@pytest.mark.parametrize("kind", [Any, dict[str, Any], dict[str, list[str]]])
def test_json_with_too_many_containers_is_rejected_before_it_is_built(kind: Any) -> None:
    with pytest.raises(TooLargeError, match="more than 16384 lists and objects"):
        read_json(_LISTS, kind)
    with pytest.raises(TooLargeError):
        read_json(memoryview(_LISTS.replace(b"[]", b'{"":0}')), kind)


@pytest.mark.parametrize("text", ["[{" * 2**16, '\\"[' * 2**17, "\\\\[" * 2**17, 'x["' * 2**16, "\n[" * 2**16])
def test_brackets_in_strings_are_not_containers(text: str) -> None:
    assert read_json(msgspec.json.encode({"inputs": [text, "[" * 2**17, {"a": [text]}]}), dict[str, Any])


@pytest.mark.parametrize("body", [b'"' + b'\\"' * 2**20, b'"[' * 2**20, b'["' * 2**20, b'[\\"' * 2**20, b'"' * 2**21])
def test_brackets_are_counted_in_linear_time(body: bytes) -> None:
    begin = time.process_time()
    with pytest.raises((InputError, TooLargeError)):
        read_json(b"[" * 2**16 + body, list[str])
    assert time.process_time() - begin < 5


def test_brackets_in_many_strings_are_counted_faster_than_decoded() -> None:
    """Other large bodies wait meanwhile, and the event loop competes for the interpreter lock."""
    body = b"[" + b'"[",' * 10**6 + b'""]'

    def cpu_s(work: Callable[[], object]) -> float:
        begin = time.process_time()
        work()
        return time.process_time() - begin

    decoding_s = min(cpu_s(lambda: msgspec.json.decode(body, type=list[str])) for _ in range(3))
    assert min(cpu_s(lambda: read_json(body, list[str])) for _ in range(3)) < 3 * decoding_s


def test_binary_strings_beyond_the_shape_are_not_decoded() -> None:
    data = memoryview(bytes(4 * 2**20))
    with pytest.raises(InputError, match=r"more strings than its shape \[2\]"):
        oip.from_bytes("text", "BYTES", [2], data)
    assert oip.from_bytes("text", "BYTES", [2, 1], data[:8]).tolist() == [[""], [""]]
    assert np.array_equal(oip.from_bytes("ids", "INT64", [1], data[:8]), [0])
