"""`grpc.health.v1.Health`. A stalled client of grpcio's own asynchronous service would hold up all others."""

from __future__ import annotations

import asyncio
from typing import Any

from hasten.core.errors import InputError, PlanError


class HealthService:
    """Reports whether the services of a server are ready. Used on its event loop."""

    def __init__(self, services: tuple[str, ...]) -> None:
        from grpc_health.v1 import health_pb2

        self._messages = health_pb2
        # The empty name stands for the whole server.
        self._services = ("", *services)
        self._is_ready = False
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def report(self, *, is_ready: bool) -> None:
        """Set what all services report, and inform the calls that watch."""
        self._is_ready = is_ready
        changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
        changed.set_result(None)

    def check(self, request: bytes) -> bytes:
        """Return the response to a `HealthCheckRequest`; raise a PlanError if there is no such service."""
        if (name := self._name(request)) not in self._services:
            raise PlanError(f"there is no service '{name}'", hint=f"services: {', '.join(self._services[1:])}")
        return self._response(name)

    async def watch(self, request: bytes, context: Any) -> None:
        """Send the response at once and after each change, until the client cancels the call."""
        name, sent = self._name(request), b""
        while True:
            changed = self._changed
            if (response := self._response(name)) != sent:
                await context.write(response)
                sent = response
            await asyncio.shield(changed)

    def _name(self, request: bytes) -> str:
        from google.protobuf.message import DecodeError

        try:
            return str(self._messages.HealthCheckRequest.FromString(request).service)
        except DecodeError as error:
            raise InputError("the request is not a valid HealthCheckRequest") from error

    def _response(self, name: str) -> bytes:
        response = self._messages.HealthCheckResponse
        ready = response.SERVING if self._is_ready else response.NOT_SERVING
        status = ready if name in self._services else response.SERVICE_UNKNOWN
        return bytes(response(status=status).SerializeToString())
