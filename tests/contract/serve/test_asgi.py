"""The ASGI application, called with messages and without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

import hasten
from hasten.bundle import Bundle
from hasten.server.asgi import Asgi
from hasten.server.auth import ApiKeys
from hasten.server.http.state import HttpLimits
from hasten.server.settings import Settings
from hasten.server.startup import load_models, make_app

pytest.importorskip("prometheus_client", reason="serving needs hasten[serve]")
TEXT = "one answer"


@pytest.fixture(scope="module")
def bundle(tiny_classifier: Any, quick_build: Any, tmp_path_factory: Any) -> Bundle:
    return quick_build(
        tiny_classifier("bert"), tmp_path_factory.mktemp("asgi") / "classifier", variants=["onnxruntime-fp32"]
    )


@pytest.fixture(scope="module")
def asgi(bundle: Bundle) -> Iterator[Asgi]:
    settings = Settings.read({"bundles": [str(bundle.path)], "instances": "1", "threads": "1"}, {})
    app = make_app(settings)
    load_models(app, settings)
    yield Asgi(app, HttpLimits(body_bytes=1000))
    assert app.models.close(5.0)


def send_request(asgi: Asgi, method: str, path: str, chunks: list[bytes]) -> tuple[int, dict[str, str], bytes]:
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": chunk, "more_body": index < len(chunks) - 1}
        for index, chunk in enumerate(chunks)
    ]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        await asyncio.Event().wait()  # the client stays
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": [(b"x-request-id", b"7")]}
    asyncio.run(asgi(scope, receive, send))
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, sent[1]["body"]


def test_predict_gives_same_answer_as_in_process(asgi: Asgi, bundle: Bundle) -> None:
    body = json.dumps({"inputs": TEXT}).encode()
    status, headers, content = send_request(asgi, "POST", "/predict", [body[:7], body[7:]])
    expected = hasten.load(bundle.path, threads=1)(TEXT)
    assert (status, headers["x-request-id"], int(headers["content-length"])) == (200, "7", len(content))
    assert [entry["label"] for entry in json.loads(content)] == [entry["label"] for entry in expected]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("HEAD", "/v2/health/ready", b"", 200),
        ("GET", "/nothing", b"", 404),
        ("POST", "/predict", b"{", 400),
        ("POST", "/predict", b"a" * 2000, 413),
    ],
)
def test_status_of_other_requests(asgi: Asgi, method: str, path: str, body: bytes, status: int) -> None:
    assert send_request(asgi, method, path, [body])[0] == status


def test_large_body_is_not_read_from_client_without_key(bundle: Bundle) -> None:
    app = make_app(Settings((str(bundle.path),)))
    app.keys = ApiKeys(["first"])
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()  # the body never arrives
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-length", b"1000000")]
    scope = {"type": "http", "method": "POST", "path": "/predict", "query_string": b"", "headers": headers}
    asyncio.run(asyncio.wait_for(Asgi(app)(scope, receive, send), 20))
    assert sent[0]["status"] == 401
    assert app.close(5.0)


def test_disconnected_client_is_not_waited_for(asgi: Asgi) -> None:
    messages = [
        {"type": "http.request", "body": json.dumps({"inputs": [TEXT] * 8}).encode()},
        {"type": "http.disconnect"},
    ]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/predict", "query_string": b"", "headers": []}
    asyncio.run(asgi(scope, receive, send))
    assert sent == [] or sent[0]["status"] == 200
    assert send_request(asgi, "POST", "/predict", [json.dumps({"inputs": TEXT}).encode()])[0] == 200


def test_lifespan_events_are_confirmed(asgi: Asgi) -> None:
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent: list[str] = []

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    asyncio.run(asgi({"type": "lifespan"}, receive, send))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
