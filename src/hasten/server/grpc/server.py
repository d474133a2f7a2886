"""Serve the Open Inference Protocol v2 over gRPC: `inference.GRPCInferenceService`, health and reflection.

Calls are coroutines on the server's event loop: one that waits, for its message or for its response, holds no thread.
"""

from __future__ import annotations

from typing import Any

from hasten.core.errors import UnauthorizedError, UnavailableError, UnsupportedError, missing_package
from hasten.server.app import App
from hasten.server.byte_budget import ByteBudget
from hasten.server.grpc.health import HealthService
from hasten.server.grpc.protobuf import SERVICE, pool
from hasten.server.grpc.service import OPEN_METHODS, Service
from hasten.server.http.state import HttpLimits
from hasten.server.tls import Tls

_MAX_CALLS_PER_CONNECTION = 1024
# A client that disappeared without closing its connection is given up after the sum of both.
_KEEPALIVE_MS = {"grpc.keepalive_time_ms": 60_000, "grpc.keepalive_timeout_ms": 20_000}


class GrpcServer:
    """The gRPC server of an application. It listens when constructed and serves once started.

    Used on the event loop of the application.
    """

    def __init__(
        self,
        app: App,
        address: str,
        limits: HttpLimits,
        budget: ByteBudget,
        tls: Tls | None,
        *,
        shares_port: bool = False,
    ) -> None:
        """Listen on an address. With `shares_port`, the kernel divides its connections among several processes."""
        try:
            import grpc
            from grpc_health.v1 import health_pb2
            from grpc_reflection.v1alpha import reflection_pb2
        except ImportError as error:
            raise missing_package("grpcio", "gRPC", "serve") from error
        except Exception as error:  # of protobuf itself, if it is older than the generated code
            reason, hint = str(error).partition("\n")[0], "pip install --upgrade protobuf, or use --no-grpc"
            raise UnsupportedError(f"cannot serve gRPC: {reason}", hint=hint) from error
        options = {
            "grpc.max_receive_message_length": limits.body_bytes,
            "grpc.max_concurrent_streams": _MAX_CALLS_PER_CONNECTION,
            "grpc.max_allowed_incoming_connections": limits.connections,
            "grpc.max_connection_idle_ms": _to_ms(limits.idle_s),
            "grpc.server_handshake_timeout_ms": _to_ms(limits.read_s),
            "grpc.so_reuseport": int(shares_port),
            **_KEEPALIVE_MS,
        }
        for module in (health_pb2, reflection_pb2):
            pool().AddSerializedFile(module.DESCRIPTOR.serialized_pb)
        self.health = HealthService((SERVICE,))
        self.service = Service(app, self.health, limits, budget)
        self._server = grpc.aio.server(options=list(options.items()))
        self._server.add_generic_rpc_handlers([_Router(app, self.service)])
        try:
            if tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, tls.grpc_credentials())
        except RuntimeError as error:
            hint = "choose another port with --grpc-port"
            raise UnavailableError(f"cannot listen on {address}", hint=hint) from error

    async def start(self) -> None:
        """Start serving; health checks report that the server is not ready yet."""
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Accept no more calls, and wait until all have ended; of several grace periods the shortest counts."""
        self.health.report(is_ready=False)
        await self._server.stop(grace_s)


class _Router:
    """Finds the handler of a call and checks its API key, before its message is received."""

    def __init__(self, app: App, service: Service) -> None:
        self._app = app
        self._service = service
        self._handlers = service.handlers()

    def service(self, details: Any) -> Any:
        """Return the handler; grpcio calls this with the path and the metadata of each call."""
        handler = self._handlers.get(details.method)
        if handler is None or details.method in OPEN_METHODS:
            return handler
        authorization = next((value for name, value in details.invocation_metadata if name == "authorization"), "")
        try:
            self._app.keys.check(authorization)
        except UnauthorizedError as error:
            return self._service.rejection(details.method, error)
        return handler


def _to_ms(seconds: float) -> int:
    """Convert to milliseconds, limited to the 31 bits that grpcio accepts."""
    return min(max(1, round(seconds * 1e3)), 2**31 - 1)
