"""Serve the Open Inference Protocol v2 over gRPC: `inference.GRPCInferenceService`, health and reflection.

Each call holds a thread, which waits for its response.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from hasten.core.errors import (
    HastenError,
    OverloadedError,
    StageError,
    UnavailableError,
    UnsupportedError,
    missing_package,
)
from hasten.core.version import __version__
from hasten.server.app import App, retry_if_retired
from hasten.server.grpc import calls
from hasten.server.grpc.auth import MAX_UNAUTHENTICATED_CALLS, AuthInterceptor
from hasten.server.grpc.calls import GrpcCall, ResponseQueue
from hasten.server.grpc.protobuf import METHODS, SERVICE, STREAM, message, pool
from hasten.server.http.exchange import status_of
from hasten.server.http.state import HttpLimits
from hasten.server.models.registry import Model, repository
from hasten.server.protocols import oip
from hasten.server.protocols.oip_http import EXTENSIONS

logger = logging.getLogger("hasten")

_OPEN_METHODS = ("ServerLive", "ServerReady", "ModelReady")
# Methods of tritonserver that its clients may call.
_UNSUPPORTED_METHODS = (
    "ModelConfig",
    "ModelStatistics",
    "TraceSetting",
    "LogSettings",
    *(f"{kind}SharedMemory{verb}" for kind in ("System", "Cuda") for verb in ("Status", "Register", "Unregister")),
)
# Concurrent calls, each of which holds a thread, and spare threads for rejections and health checks, so that these are
# answered at once. grpcio's own limit on calls would reject health checks too.
MAX_CALLS = 512
_SPARE_THREADS = 16
_RETRY_S = 1.0
# grpcio reports a call without a deadline as one with a deadline in the far future.
_NO_DEADLINE_S = 1e9
_MAX_CALLS_PER_CONNECTION = 1024
# A stream may idle longer than a connection: its client notices the end only when it sends the next request.
_STREAM_IDLE_FACTOR = 4
# A client that disappeared without closing its connection is given up after the sum of both.
_KEEPALIVE_MS = {"grpc.keepalive_time_ms": 60_000, "grpc.keepalive_timeout_ms": 20_000}


class GrpcServer:
    """The gRPC server of an application. It listens when constructed and serves once started."""

    def __init__(self, app: App, address: str, limits: HttpLimits, tls_key: Path | None, tls_cert: Path | None) -> None:
        try:
            import grpc
            from grpc_health.v1 import health, health_pb2, health_pb2_grpc
            from grpc_reflection.v1alpha import reflection, reflection_pb2
        except ImportError as error:
            raise missing_package("grpcio", "gRPC", "serve") from error
        except Exception as error:  # of protobuf itself, if it is older than the generated code
            reason, hint = str(error).partition("\n")[0], "pip install --upgrade protobuf, or use --no-grpc"
            raise UnsupportedError(f"cannot serve gRPC: {reason}", hint=hint) from error
        options = {
            "grpc.max_receive_message_length": limits.body_bytes,
            "grpc.max_concurrent_streams": _MAX_CALLS_PER_CONNECTION,
            "grpc.max_connection_idle_ms": _to_ms(limits.idle_s),
            "grpc.server_handshake_timeout_ms": _to_ms(limits.read_s),
            "grpc.so_reuseport": 0,
            **_KEEPALIVE_MS,
        }
        service = _Service(app, _STREAM_IDLE_FACTOR * limits.idle_s)
        self._server = grpc.server(
            ThreadPoolExecutor(MAX_CALLS + MAX_UNAUTHENTICATED_CALLS + _SPARE_THREADS, "grpc"),
            [service.handler()],
            [AuthInterceptor(app, [f"/{SERVICE}/{name}" for name in _OPEN_METHODS], service.reject, limits.read_s)],
            list(options.items()),
        )
        self._health, self._status = health.HealthServicer(), health_pb2.HealthCheckResponse
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME]
        for module in (health_pb2, reflection_pb2):
            pool().AddSerializedFile(module.DESCRIPTOR.serialized_pb)
        reflection.enable_server_reflection(names, self._server, pool=pool())
        try:
            if tls_key is None or tls_cert is None:
                self.port = self._server.add_insecure_port(address)
            else:
                credentials = grpc.ssl_server_credentials([(tls_key.read_bytes(), tls_cert.read_bytes())])
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            hint = "choose another port with --grpc-port"
            raise UnavailableError(f"cannot listen on {address}", hint=hint) from error

    def start(self) -> None:
        """Start serving; health checks report that the server is not ready yet."""
        self.report(is_ready=False)
        self._server.start()

    def report(self, *, is_ready: bool) -> None:
        """Set what health checks report."""
        for name in ("", SERVICE):
            self._health.set(name, self._status.SERVING if is_ready else self._status.NOT_SERVING)

    def stop(self, grace_s: float) -> threading.Event:
        """Accept no more calls. The event is set when all have ended; of several grace periods the shortest counts."""
        self._health.enter_graceful_shutdown()
        stopped: threading.Event = self._server.stop(grace_s)
        return stopped


class _Service:
    def __init__(self, app: App, idle_s: float) -> None:
        self._app = app
        self._idle_s = idle_s
        self._free = threading.Semaphore(MAX_CALLS)

    def handler(self) -> Any:
        """Return the handler. Methods take bytes: grpcio itself reports invalid messages as internal errors."""
        import grpc

        # Each returns the fields of its response.
        methods: dict[str, Callable[[GrpcCall], Mapping[str, Any]]] = {
            "ServerLive": lambda _: {"live": self._app.is_alive()},
            "ServerReady": lambda _: {"ready": self._app.can_serve()},
            "ModelReady": self._model_ready,
            "ServerMetadata": lambda _: {"name": "hasten", "version": __version__, "extensions": EXTENSIONS},
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._infer,
            "RepositoryIndex": self._repository_index,
            "RepositoryModelLoad": self._repository_load,
            "RepositoryModelUnload": self._repository_unload,
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._unary(name, methods[name]), None, message(f"{name}Response").SerializeToString
            )
            for name in METHODS
        }
        for name in _UNSUPPORTED_METHODS:
            handlers[name] = grpc.unary_unary_rpc_method_handler(self._unary(name, _reject_unsupported))
        handlers[STREAM] = grpc.stream_stream_rpc_method_handler(
            self._stream, None, message("ModelStreamInferResponse").SerializeToString
        )
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _unary(self, name: str, method: Callable[[GrpcCall], Mapping[str, Any]]) -> Callable[[bytes, Any], Any]:
        """Return a function that admits a call, answers or rejects it, and records it."""

        def answer(data: bytes, context: Any) -> Any:
            call = GrpcCall(name, context)
            try:
                with self._admit(call):
                    if name in METHODS:
                        call.read(f"{name}Request", data)
                    fields = method(call)
                    response = message(f"{name}Response")(**fields)
            except Exception as error:
                self.reject(call, error)
            self._app.watch(call.record(200))
            return response

        return answer

    @contextmanager
    def _admit(self, call: GrpcCall) -> Iterator[None]:
        if call.method in _OPEN_METHODS:
            yield
            return
        if not self._free.acquire(blocking=False):
            raise OverloadedError(f"{MAX_CALLS} calls are in progress", retry_after_s=_RETRY_S)
        try:
            yield
        finally:
            self._free.release()

    def reject(self, call: GrpcCall, error: Exception) -> NoReturn:
        public_error = _to_public_error(call, error)
        status = status_of(public_error)
        self._app.watch(call.record(status))
        if isinstance(public_error, OverloadedError):
            call.context.set_trailing_metadata([("retry-after", f"{public_error.retry_after_s:.1f}")])
        call.context.abort(calls.code_of(status), str(public_error))
        raise AssertionError("context.abort returned")

    # Methods

    def _model_ready(self, call: GrpcCall) -> Mapping[str, Any]:
        is_loaded = any(model.name == call.request.name for model in self._app.models)
        return {"ready": is_loaded and call.request.version in ("", oip.VERSION)}

    def _model_metadata(self, call: GrpcCall) -> Mapping[str, Any]:
        return asdict(oip.describe(self._find_model(call, call.request.name, call.request.version)))

    def _repository_index(self, call: GrpcCall) -> Mapping[str, Any]:
        return {"models": repository(self._app.models, only_ready=call.request.ready)}

    def _repository_load(self, call: GrpcCall) -> Mapping[str, Any]:
        oip.load(self._app.models, call.request.model_name, call.request.parameters)
        return {}

    def _repository_unload(self, call: GrpcCall) -> Mapping[str, Any]:
        self._app.models.unload(call.request.model_name)
        return {}

    def _infer(self, call: GrpcCall) -> Mapping[str, Any]:
        retry_if_retired(self._submit, call)
        if not call.context.add_callback(call.disconnect):
            call.disconnect()
        outputs = next(part for part, is_last in call.parts() if is_last)
        return calls.response_to(call.request, outputs)

    def _stream(self, requests: Iterator[bytes], context: Any) -> Iterator[Any]:
        """Yield responses in the order of the requests, each as soon as those before it are sent."""
        stream = GrpcCall(STREAM, context)
        try:
            with self._admit(stream):
                queue = ResponseQueue(self._idle_s)
                if context.add_callback(queue.disconnect):
                    threading.Thread(target=self._read, args=(requests, context, queue), daemon=True).start()
                    for call in queue:
                        yield from self._streamed(call)
        except HastenError as error:
            self.reject(stream, error)

    def _read(self, requests: Iterator[bytes], context: Any, queue: ResponseQueue) -> None:
        import grpc

        try:
            with suppress(grpc.RpcError):  # the client disconnected
                for data in requests:
                    call = GrpcCall(STREAM, context)
                    try:
                        call.read("ModelInferRequest", data)
                        retry_if_retired(self._submit, call)
                    except Exception as error:
                        call.finish(_to_public_error(call, error))
                    queue.add(call)
        finally:
            queue.complete()

    def _streamed(self, call: GrpcCall) -> Iterator[Any]:
        """Yield the response of one request. An error is a response too, and the stream goes on."""
        stream_response = message("ModelStreamInferResponse")
        try:
            # By triton_final_response a client recognizes the last part of a response, as of a generated text.
            for outputs, is_last in call.parts():
                response = calls.response_to(call.request, outputs, triton_final_response={"bool_param": is_last})
                yield stream_response(infer_response=response)
        except Exception as error:
            public_error = _to_public_error(call, error)
            self._app.watch(call.record(status_of(public_error)))
            # With the id of the request, so that the client knows which one failed.
            request_id = call.request.id if call.request is not None else ""
            yield stream_response(error_message=str(public_error), infer_response={"id": request_id})
        else:
            self._app.watch(call.record(200))

    def _submit(self, call: GrpcCall) -> None:
        request = call.request
        model = self._find_model(call, request.model_name, request.model_version)
        parameters = calls.parameters_of(request.parameters)
        # The deadline of a stream does not apply to its single requests.
        if call.method != STREAM and (remaining_s := call.context.time_remaining()) < _NO_DEADLINE_S:
            parameters.setdefault("timeout", max(1, int(remaining_s * 1e6)))
        for tensor in (*request.inputs, *request.outputs):
            oip.reject_parameters(tensor.name, tensor.parameters)
        outputs = tuple(output.name for output in request.outputs)
        on_text_delta = call.add if call.method == STREAM else None
        inference = oip.Inference(calls.tensors_of(request), outputs, parameters)
        call.cancel = oip.infer(model, inference, call.finish, on_text_delta)

    def _find_model(self, call: GrpcCall, name: str, version: str) -> Model:
        model = self._app.models.named(name)
        oip.check_version(version)
        call.model = model.name
        return model


def _to_ms(seconds: float) -> int:
    """Convert to milliseconds, limited to the 31 bits that grpcio accepts."""
    return min(max(1, round(seconds * 1e3)), 2**31 - 1)


def _to_public_error(call: GrpcCall, error: Exception) -> HastenError:
    """Return the error that the client may see; details of others are only logged."""
    if isinstance(error, HastenError):
        return error
    logger.error("%s failed.", call.method, exc_info=error)
    return StageError("internal server error: see the server's log")


def _reject_unsupported(call: GrpcCall) -> NoReturn:
    raise UnsupportedError(f"{call.method} is not supported")
