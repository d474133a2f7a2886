"""Serve with ONNX Runtime in a bare ASGI application, the least that a Python server does; in uvicorn or granian.

It does not batch: each request runs in a thread of the event loop's pool.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

from classifier import Classifier
from options import Options

classify = Classifier(os.environ["MODEL"], os.environ["GRAPH"], Options(1, 1))
_HEADERS = [(b"content-type", b"application/json")]


def answer(body: bytes) -> bytes:
    """Return the body of the response."""
    return json.dumps(classify([json.loads(body)["inputs"]])).encode() if body else b"{}"


async def app(scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]):
    """Answer one request."""
    if scope["type"] != "http":
        return
    body, has_more = b"", True
    while has_more:
        message = await receive()
        body += message.get("body", b"")
        has_more = message.get("more_body", False)
    content = await asyncio.to_thread(answer, body)
    headers = [*_HEADERS, (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})
