"""The application for any ASGI server: uvicorn, hypercorn, Ray Serve. `hasten serve` itself speaks HTTP without it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from hasten.core.errors import TooLargeError
from hasten.server.app import App
from hasten.server.connection import HttpLimits
from hasten.server.exchange import REQUEST_ID, Exchange, Response, has_large_body
from hasten.server.run import http_limits, keep_time, load_models, make_app
from hasten.server.settings import Settings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def from_environment() -> Asgi:
    """`HASTEN_BUNDLES=sst2 uvicorn --factory hasten.server.asgi:from_environment`"""
    settings = Settings.read({})
    app = make_app(settings)
    load_models(app, settings)
    return Asgi(app, http_limits(settings), lambda: app.close(settings.drain))


class Asgi:
    def __init__(
        self,
        app: Callable[[Exchange], None],
        limits: HttpLimits | None = None,
        on_close: Callable[[], object] = lambda: None,
        behind: App | None = None,
        *,
        names_requests: bool = True,
    ) -> None:
        self._app = app
        self._on_close = on_close
        # The application that `app` leads to, where it is not that itself.
        self._behind = app if isinstance(app, App) else behind
        # Not where the server in front answers with the request's name itself.
        self._names_requests = names_requests
        self._limits = limits or HttpLimits()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            clock = asyncio.ensure_future(keep_time(self._behind.models)) if self._behind else None
            await _live(receive, send, self._on_close)
            if clock is not None:
                clock.cancel()
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Response] = loop.create_future()

        def give(response: Response) -> None:
            if not answer.done():
                answer.set_result(response)

        def reply(response: Response) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(give, response)

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        query, limit = scope["query_string"].decode("latin-1"), self._limits.body_bytes
        exchange = Exchange(scope["method"], quote(scope["path"]), query, headers, b"", reply, limit)
        try:
            if not await self._is_refused(exchange, receive):
                self._app(exchange)
        except ConnectionResetError:
            return
        gone = asyncio.ensure_future(_until_gone(receive))
        both: list[asyncio.Future[Any]] = [answer, gone]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if answer.done():
            name = exchange.id if self._names_requests else ""
            await _send(send, answer.result(), name, has_body=scope["method"] != "HEAD")
            exchange.was_sent(answer.result())
        else:
            exchange.leave()

    async def _is_refused(self, exchange: Exchange, receive: Receive) -> bool:
        """Whether its body, which is read here, is too large, or not even looked at."""
        behind, limit = self._behind, self._limits.body_bytes
        exchange.watch = behind.watch if behind else None
        if behind and has_large_body(exchange.headers):
            refusal = behind.refusal(exchange.method, exchange.path, exchange.headers)
            if refusal is not None:
                exchange.reply(refusal)
                return True
        body = await self._body(receive)
        if body is None:
            exchange.fail(TooLargeError(f"the body is larger than {limit} bytes"))
            return True
        exchange.body = body
        return False

    async def _body(self, receive: Receive) -> bytes | None:
        """None where there is more of it than is allowed."""
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self._limits.body_bytes:
                return None
            if not message.get("more_body", False):
                return b"".join(chunks)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, response: Response, request: str, *, has_body: bool = True) -> None:
    headers = {
        "content-type": response.content_type,
        "content-length": str(len(response.body)),
        **response.headers,
        **({REQUEST_ID: request} if request else {}),
    }
    encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": response.status, "headers": encoded})
    await send({"type": "http.response.body", "body": response.body if has_body else b""})


async def _live(receive: Receive, send: Send, on_close: Callable[[], object]) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        else:
            # Told when it is so: whoever hears it may end the process.
            await asyncio.to_thread(on_close)
            await send({"type": "lifespan.shutdown.complete"})
            return
