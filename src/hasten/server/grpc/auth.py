"""Check API keys of gRPC calls before their messages are read, and limit calls that need no key.

A call holds a thread from its headers on and waits there for its message: clients without a key could hold them all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, NoReturn

from hasten.core.errors import InputError, OverloadedError, UnauthorizedError
from hasten.server.app import App
from hasten.server.grpc.calls import GrpcCall

_HEALTH = "/grpc.health.v1.Health/"
# Calls without a key that may wait for their message at once, and for how long: it is a few bytes.
MAX_UNAUTHENTICATED_CALLS = 64
_UNAUTHENTICATED_READ_S = 5.0
_RETRY_S = 1.0


class AuthInterceptor:
    """A grpcio interceptor of all calls of all services, including reflection."""

    def __init__(
        self, app: App, open_methods: Collection[str], reject: Callable[[GrpcCall, Exception], NoReturn], read_s: float
    ) -> None:
        self._app = app
        self._open_methods = open_methods
        self._reject = reject
        self._wait_s = min(_UNAUTHENTICATED_READ_S, read_s)
        self._free = threading.Semaphore(MAX_UNAUTHENTICATED_CALLS)

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Return the handler of a call, or one that rejects it."""
        handler = continuation(details)
        keys = self._app.keys
        if handler is None or not keys:
            return handler
        if details.method in self._open_methods or details.method.startswith(_HEALTH):
            return self._with_read_timeout(handler, details.method)
        authorization = next((value for name, value in details.invocation_metadata if name == "authorization"), "")
        try:
            keys.check(authorization)
        except UnauthorizedError as error:
            return self._rejection(details.method, error)
        return handler

    def _rejection(self, method: str, error: UnauthorizedError) -> Any:
        """Return a handler that rejects a call of any kind: a stream handler starts without waiting for a message."""
        import grpc

        return grpc.stream_stream_rpc_method_handler(
            lambda _, context: self._reject(GrpcCall(method.rpartition("/")[2], context), error)
        )

    def _with_read_timeout(self, handler: Any, method: str) -> Any:
        """Return the handler with a short timeout for the single message of the call."""
        import grpc

        behavior = handler.unary_stream if handler.response_streaming else handler.unary_unary

        @wraps(behavior)  # keeps the attributes that grpcio sets on it
        def answer(requests: Any, context: Any, *others: Any) -> Any:
            call = GrpcCall(method.rpartition("/")[2], context)
            if not self._free.acquire(blocking=False):
                reason = f"{MAX_UNAUTHENTICATED_CALLS} calls without a key are waiting"
                self._reject(call, OverloadedError(reason, retry_after_s=_RETRY_S))
            timer = threading.Timer(self._wait_s, context.cancel)
            timer.daemon = True
            timer.start()
            try:
                request = next(requests, None)
            finally:
                timer.cancel()
                self._free.release()
            if request is None:
                self._reject(call, InputError("the call has no message"))
            return behavior(request, context, *others)

        kind = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return kind(answer, handler.request_deserializer, handler.response_serializer)
