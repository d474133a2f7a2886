"""Run the application in an ASGI server such as uvicorn, hypercorn or Ray Serve. `hasten serve` does not use it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from hasten.core.errors import TooLargeError
from hasten.server.app import App
from hasten.server.http.exchange import REQUEST_ID, Exchange, Response, StreamedResponse, has_large_body
from hasten.server.http.state import HttpLimits
from hasten.server.http.stream import Stream
from hasten.server.settings import Settings
from hasten.server.startup import http_limits, load_models, make_app, run_periodic_tasks

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def from_environment() -> Asgi:
    """Return the application that the environment configures.

    Usage: `HASTEN_BUNDLES=sst2 uvicorn --factory hasten.server.asgi:from_environment`
    """
    settings = Settings.read({})
    app = make_app(settings)
    load_models(app, settings)
    return Asgi(app, http_limits(settings), lambda: app.close(settings.drain_timeout))


class Asgi:
    """An ASGI application. `inner` is the application that `app` wraps, if it is not an `App` itself."""

    def __init__(
        self,
        app: Callable[[Exchange], None],
        limits: HttpLimits | None = None,
        on_close: Callable[[], object] = lambda: None,
        inner: App | None = None,
        *,
        adds_request_id: bool = True,
    ) -> None:
        self._app = app
        self._on_close = on_close
        self._inner = app if isinstance(app, App) else inner
        # False if the ASGI server adds the request id to responses itself.
        self._names_requests = adds_request_id
        self._limits = limits or HttpLimits()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        clock = None
        if self._inner is not None:
            clock = asyncio.ensure_future(run_periodic_tasks(self._inner))
            self._inner.supervise(clock)
        await receive()  # lifespan.startup
        await send({"type": "lifespan.startup.complete"})
        await receive()  # lifespan.shutdown
        # Confirmed only afterwards: the ASGI server may then end the process.
        await asyncio.to_thread(self._on_close)
        await send({"type": "lifespan.shutdown.complete"})
        if clock is not None:
            clock.cancel()

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Response] = loop.create_future()

        def set_answer(response: Response) -> None:
            if not answer.done():
                answer.set_result(response)

        def reply(response: Response) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(set_answer, response)

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        query, limit = scope["query_string"].decode("latin-1"), self._limits.body_bytes
        exchange = Exchange(scope["method"], quote(scope["path"]), query, headers, b"", reply, limit)
        try:
            if await self._is_accepted(exchange, receive):
                self._app(exchange)
        except ConnectionResetError:
            return
        disconnected = asyncio.ensure_future(_wait_for_disconnect(receive))
        events: list[asyncio.Future[Any]] = [answer, disconnected]
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        try:
            await self._send(exchange, send, answer, disconnected)
        finally:
            disconnected.cancel()

    async def _send(
        self, exchange: Exchange, send: Send, answer: asyncio.Future[Response], disconnected: asyncio.Future[None]
    ) -> None:
        if not answer.done():
            exchange.disconnect()
            return
        response, has_body = answer.result(), exchange.method != "HEAD"
        head = _head(response, exchange.id if self._names_requests else "")
        if isinstance(response, StreamedResponse):
            is_complete = False
            try:
                await send(head)
                is_complete = await _send_parts(send, response.stream, disconnected, has_body=has_body)
            finally:
                # The ASGI server closes the connection of an incomplete response.
                if not is_complete:
                    response.stream.discard()
                    exchange.disconnect()
            if not is_complete:
                return
            response = Response(response.stream.status, b"")
        else:
            await send(head)
            await send({"type": "http.response.body", "body": response.body if has_body else b""})
        exchange.record(response)

    async def _is_accepted(self, exchange: Exchange, receive: Receive) -> bool:
        """Read the body and return True, or reject the request if its body is too large or would not be used."""
        inner, limit = self._inner, self._limits.body_bytes
        exchange.watch = inner.watch if inner else None
        if inner and has_large_body(exchange.headers):
            rejection = inner.refusal(exchange.method, exchange.path, exchange.headers)
            if rejection is not None:
                exchange.reply(rejection)
                return False
        chunks: list[bytes] = []
        size, has_more = 0, True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > limit:
                exchange.fail(TooLargeError(f"the body is larger than {limit} bytes"))
                return False
            has_more = message.get("more_body", False)
        exchange.body = b"".join(chunks)
        return True


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _head(response: Response, request_id: str) -> Message:
    headers = {
        "content-type": response.content_type,
        # The length of a stream is not known yet; the ASGI server frames it.
        **({} if isinstance(response, StreamedResponse) else {"content-length": str(len(response.body))}),
        **response.headers,
        **({REQUEST_ID: request_id} if request_id else {}),
    }
    encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": response.status, "headers": encoded}


async def _send_parts(send: Send, stream: Stream, disconnected: asyncio.Future[None], *, has_body: bool) -> bool:
    """Send the stream, and return whether all of it was sent; not if the client disconnects or reads too slowly."""
    loop, has_news = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(has_news.set)

    stream.follow(wake)
    disconnected.add_done_callback(lambda _: has_news.set())
    is_ended = False
    while not is_ended:
        data, is_ended = stream.read()
        if (disconnected.done() and not is_ended) or stream.is_overfull:
            return False
        if data or is_ended:
            await send({"type": "http.response.body", "body": data if has_body else b"", "more_body": not is_ended})
        if not is_ended:
            await has_news.wait()
            has_news.clear()
    return True
