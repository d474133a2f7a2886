"""The application for any ASGI server: uvicorn, hypercorn, Ray Serve. `hasten serve` itself speaks HTTP without it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from hasten.core.errors import TooLargeError
from hasten.server.app import App
from hasten.server.connections import HttpLimits
from hasten.server.exchange import REQUEST_ID, Exchange, Response, Streamed, has_large_body
from hasten.server.run import http_limits, keep_time, load_models, make_app
from hasten.server.settings import Settings
from hasten.server.stream import Stream

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
            clock = asyncio.ensure_future(keep_time(self._behind)) if self._behind else None
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
        try:
            await self._send(exchange, send, answer, gone)
        finally:
            gone.cancel()

    async def _send(
        self, exchange: Exchange, send: Send, answer: asyncio.Future[Response], gone: asyncio.Future[None]
    ) -> None:
        if not answer.done():
            exchange.leave()
            return
        response, has_body = answer.result(), exchange.method != "HEAD"
        head = _head(response, exchange.id if self._names_requests else "")
        if isinstance(response, Streamed):
            is_whole = False
            try:
                await send(head)
                is_whole = await _send_parts(send, response.stream, gone, has_body=has_body)
            finally:
                # The server in front, which was not told that it has all, closes the connection.
                if not is_whole:
                    response.stream.cut()
                    exchange.leave()
            if not is_whole:
                return
            response = Response(response.stream.status, b"")
        else:
            await send(head)
            await send({"type": "http.response.body", "body": response.body if has_body else b""})
        exchange.was_sent(response)

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


def _head(response: Response, request: str) -> Message:
    headers = {
        "content-type": response.content_type,
        # How long one in parts is, is not known yet; the server in front knows how to tell where it ends.
        **({} if isinstance(response, Streamed) else {"content-length": str(len(response.body))}),
        **response.headers,
        **({REQUEST_ID: request} if request else {}),
    }
    encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": response.status, "headers": encoded}


async def _send_parts(send: Send, stream: Stream, gone: asyncio.Future[None], *, has_body: bool) -> bool:
    """Whether all was sent before the client left, or did not take it."""
    loop, news = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(news.set)

    stream.follow(wake)
    gone.add_done_callback(lambda _: news.set())
    is_over = False
    while not is_over:
        data, is_over = stream.take()
        if (gone.done() and not is_over) or stream.is_overfull:
            return False
        if data or is_over:
            await send({"type": "http.response.body", "body": data if has_body else b"", "more_body": not is_over})
        if not is_over:
            await news.wait()
            news.clear()
    return True


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
