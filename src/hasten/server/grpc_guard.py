"""Who is let in by gRPC before anything of a call is read: whoever has a key, and whoever asks for health, but briefly.

A call holds a thread from its headers on, and waits for its message there: those without a key could hold them all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, NoReturn

from hasten.core.errors import InputError, OverloadedError, UnauthorizedError
from hasten.server.app import App
from hasten.server.grpc_calls import Call

_HEALTH = "/grpc.health.v1.Health/"
# Calls without a key whose message has not come, and how long it is waited for: it is a few bytes.
OPEN_CALLS = 64
_OPEN_S = 5.0
_RETRY_S = 1.0


class Guard:
    """What grpcio calls an interceptor: asked for every call of every service, reflection too."""

    def __init__(
        self, app: App, open_methods: Collection[str], refuse: Callable[[Call, Exception], NoReturn], read_s: float
    ) -> None:
        self._app = app
        self._open_methods = open_methods
        self._refuse = refuse
        self._wait_s = min(_OPEN_S, read_s)
        self._free = threading.Semaphore(OPEN_CALLS)

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        handler = continuation(details)
        keys = self._app.keys
        if handler is None or not keys:
            return handler
        if details.method in self._open_methods or details.method.startswith(_HEALTH):
            return self._brief(handler, details.method)
        given = next((value for name, value in details.invocation_metadata if name == "authorization"), "")
        try:
            keys.check(given)
        except UnauthorizedError as error:
            return self._refusal(details.method, error)
        return handler

    def _refusal(self, method: str, error: UnauthorizedError) -> Any:
        """Of any kind of call: one of streams is the one that is begun without a message."""
        import grpc

        return grpc.stream_stream_rpc_method_handler(
            lambda _, context: self._refuse(Call(method.rpartition("/")[2], context), error)
        )

    def _brief(self, handler: Any, method: str) -> Any:
        """The same, but its one message comes soon or not at all."""
        import grpc

        behavior = handler.unary_stream if handler.response_streaming else handler.unary_unary

        @wraps(behavior)  # with what grpcio has marked it with
        def answer(requests: Any, context: Any, *others: Any) -> Any:
            call = Call(method.rpartition("/")[2], context)
            if not self._free.acquire(blocking=False):
                self._refuse(call, OverloadedError(f"{OPEN_CALLS} calls are waiting", retry_after_s=_RETRY_S))
            timer = threading.Timer(self._wait_s, context.cancel)
            timer.daemon = True
            timer.start()
            try:
                request = next(requests, None)
            finally:
                timer.cancel()
                self._free.release()
            if request is None:
                self._refuse(call, InputError("there is no message in it"))
            return behavior(request, context, *others)

        kind = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return kind(answer, handler.request_deserializer, handler.response_serializer)
