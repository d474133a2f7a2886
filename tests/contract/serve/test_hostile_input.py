"""Hostile request bodies against a real server: small on the wire, large once they are decompressed or decoded."""

from __future__ import annotations

import base64
import gzip
import random
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from hasten.bundle import Bundle
from support.server_operations import BODY, QUIET, Running

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")
pytestmark = pytest.mark.usefixtures("workers")

_CLIENTS = 40
_CLIENTS_PER_HEALTH_CHECK = 4
_MAX_GROWTH_BYTES = 120 * 2**20
# Far above what is measured, since other programs may run beside the test.
_MAX_HEALTH_S = 1.0
_BODY_BYTES = 2**22 - 2**12


@pytest.fixture(scope="module")
def server(classifier_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory, workers: int) -> Iterator[Running]:
    words = (str(classifier_bundle.path), *QUIET, "--workers", str(workers))
    with Running(tmp_path_factory.mktemp("hostile"), *words) as running:
        assert running.ready().ask("/predict", BODY)[0] == 200
        yield running
        assert running.stop() == 0


def _filled(before: str, item: str, after: str, size: int = _BODY_BYTES) -> bytes:
    """Return JSON that repeats an item up to a size."""
    count = (size - len(before) - len(after)) // (len(item) + 1)
    return (before + ",".join([item] * count) + after).encode()


def _post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", "connection: close", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def _peak_bytes(server: Running) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 2**10  # type: ignore[index]


def _status(client: socket.socket) -> int:
    received = b""
    while data := client.recv(2**16):
        received += data
    return int(received.split(b" ", 2)[1])


def _attack(server: Running, bodies: Sequence[bytes]) -> tuple[set[int], float, int]:
    """Send each body from a client of its own; return the statuses, the slowest health check, memory growth."""
    port, before, slowest = server.port, _peak_bytes(server), 0.0
    statuses: set[int] = set()
    with ExitStack() as opened:
        clients = [opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in bodies]
        for client, body in zip(clients, bodies, strict=True):
            client.sendall(body)
        for number, client in enumerate(clients):
            if number % _CLIENTS_PER_HEALTH_CHECK == 0:
                begin = time.monotonic()
                assert server.ask("/v2/health/live", port=port)[0] == 200
                slowest = max(slowest, time.monotonic() - begin)
            statuses.add(_status(client))
    return statuses, slowest, _peak_bytes(server) - before


_BODIES = [
    ("/predict", '{"inputs":[', "[]", "]}"),
    ("/predict", '{"inputs":[', "[0]", "]}"),
    ("/predict", '{"inputs":[', '{"":0}', "]}"),
    ("/predict", '{"inputs":[', '"ab"', "]}"),
    ("/predict", '{"inputs":"a","parameters":{"x":[', "{}", "]}}"),
    ("/v2/models/classifier/infer", '{"inputs":[{"name":"text","shape":[1],"datatype":"BYTES","data":[', "[]", "]}]}"),
    ("/embed", '{"inputs":[', "[]", "]}"),
    ("/v1/embeddings", '{"input":[', "[]", "]}"),
    ("/v1/completions", '{"prompt":[', "[]", "]}"),
    ("/v1/chat/completions", '{"messages":[', "{}", "]}"),
]


@pytest.mark.parametrize("padding_bytes", [0, 24 * 2**10])
def test_compressed_bodies_exhaust_neither_memory_nor_health_checks(server: Running, padding_bytes: int) -> None:
    """Padding that does not compress keeps the ratio under its limit, so that the bodies are decoded."""
    padding = base64.b64encode(random.Random(0).randbytes(padding_bytes)).decode()
    requests = [
        _post(
            path, gzip.compress(_filled(f'{{"pad":"{padding}",{before[1:]}', item, after), 6), "content-encoding: gzip"
        )
        for path, before, item, after in _BODIES
    ]
    statuses, slowest_s, growth = _attack(server, requests * (_CLIENTS // len(requests)))
    assert statuses <= {400, 413, 422}, statuses
    assert slowest_s < _MAX_HEALTH_S
    assert growth < _MAX_GROWTH_BYTES
