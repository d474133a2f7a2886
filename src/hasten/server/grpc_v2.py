"""The Open Inference Protocol v2 by gRPC: `inference.GRPCInferenceService`, health and reflection.

A call has a thread of its own, which waits for its answer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
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
from hasten.server.app import App, once_more
from hasten.server.connections import HttpLimits
from hasten.server.grpc_calls import Call, Line, code_of, parameters_of, response_to, status_of_call, tensors_of
from hasten.server.grpc_guard import OPEN_CALLS, Guard
from hasten.server.inference import (
    VERSION,
    Inference,
    check_version,
    load,
    refuse_parameters,
)
from hasten.server.messages import METHODS, SERVICE, STREAM, message, pool
from hasten.server.models import READY, Model, repository
from hasten.server.text_inference import describe, infer
from hasten.server.v2 import EXTENSIONS

logger = logging.getLogger("hasten")

_OPEN = ("ServerLive", "ServerReady", "ModelReady")
# What tritonserver has and its clients may ask for.
_UNKNOWN = (
    "ModelConfig",
    "ModelStatistics",
    "TraceSetting",
    "LogSettings",
    *(f"{kind}SharedMemory{verb}" for kind in ("System", "Cuda") for verb in ("Status", "Register", "Unregister")),
)
# Calls at once, each of which holds a thread; and threads beyond them, so that whoever is refused, or asks for the
# server's health, is answered at once. grpcio's own limit on calls would refuse those who ask for health too.
CALLS = 512
_SPARE = 16
_RETRY_S = 1.0
# Of one connection.
_MOST_STREAMS = 1024
# A stream is given longer than a connection that is idle: its client is told only when it asks again.
_STREAM_PATIENCE = 4
# A client that is no longer there, but never said so, is given up after both.
_KEEPALIVE_MS = {"grpc.keepalive_time_ms": 60_000, "grpc.keepalive_timeout_ms": 20_000}


class GrpcServer:
    def __init__(self, app: App, address: str, limits: HttpLimits, tls: tuple[Path, Path] | None = None) -> None:
        try:
            import grpc
            from grpc_health.v1 import health, health_pb2, health_pb2_grpc
            from grpc_reflection.v1alpha import reflection
        except ImportError as error:
            raise missing_package("grpcio", "gRPC", "serve") from error
        except Exception as error:  # protobuf's own kind, where it is older than what was generated for it
            why = str(error).partition("\n")[0]
            raise UnsupportedError(
                f"gRPC cannot be served: {why}", hint="pip install --upgrade protobuf, or --no-grpc"
            ) from error
        options = {
            "grpc.max_receive_message_length": limits.body_bytes,
            "grpc.max_concurrent_streams": _MOST_STREAMS,
            "grpc.max_connection_idle_ms": _to_ms(limits.idle_s),
            "grpc.server_handshake_timeout_ms": _to_ms(limits.read_s),
            "grpc.so_reuseport": 0,
            **_KEEPALIVE_MS,
        }
        service = _Service(app, _STREAM_PATIENCE * limits.idle_s)
        self._server = grpc.server(
            ThreadPoolExecutor(CALLS + OPEN_CALLS + _SPARE, "grpc"),
            [service.handler()],
            [Guard(app, [f"/{SERVICE}/{name}" for name in _OPEN], service.refuse, limits.read_s)],
            list(options.items()),
        )
        self._health, self._status = health.HealthServicer(), health_pb2.HealthCheckResponse
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server, pool=_Pools())
        try:
            if tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                key, certificate = (file.read_bytes() for file in tls)
                credentials = grpc.ssl_server_credentials([(key, certificate)])
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise UnavailableError(f"cannot listen on {address}", hint="--grpc-port takes another") from error

    def start(self) -> None:
        """Whoever asks is told that nothing is ready yet."""
        self.tell(is_ready=False)
        self._server.start()

    def tell(self, *, is_ready: bool) -> None:
        for name in ("", SERVICE):
            self._health.set(name, self._status.SERVING if is_ready else self._status.NOT_SERVING)

    def stop(self, grace_s: float) -> threading.Event:
        """Take nothing more; the event is set when all calls are over. Asked again, the shorter time counts."""
        self._health.enter_graceful_shutdown()
        stopped: threading.Event = self._server.stop(grace_s)
        return stopped


class _Pools:
    """For reflection, which asks one: ours first, then protobuf's own, where health is described."""

    def __getattr__(self, name: str) -> Any:
        from google.protobuf import descriptor_pool

        def find(*arguments: Any) -> Any:
            try:
                return getattr(pool(), name)(*arguments)
            except KeyError:
                return getattr(descriptor_pool.Default(), name)(*arguments)

        return find


class _Service:
    def __init__(self, app: App, idle_s: float) -> None:
        self._app = app
        self._idle_s = idle_s
        self._free = threading.Semaphore(CALLS)

    def handler(self) -> Any:
        """Requests come as bytes: what cannot be read is the client's fault, and grpcio would call it ours."""
        import grpc

        methods: dict[str, Callable[[Call], Any]] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._infer,
            "RepositoryIndex": self._repository_index,
            "RepositoryModelLoad": self._repository_load,
            "RepositoryModelUnload": self._repository_unload,
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._answering(name, methods[name]), None, message(f"{name}Response").SerializeToString
            )
            for name in METHODS
        }
        for name in _UNKNOWN:
            handlers[name] = grpc.unary_unary_rpc_method_handler(self._answering(name, _refuse_unknown))
        handlers[STREAM] = grpc.stream_stream_rpc_method_handler(
            self._stream, None, message("ModelStreamInferResponse").SerializeToString
        )
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _answering(self, name: str, method: Callable[[Call], Any]) -> Callable[[bytes, Any], Any]:
        """Let in, answered or refused, and told to those who watch."""

        def answer(data: bytes, context: Any) -> Any:
            call = Call(name, context)
            try:
                with self._let_in(call):
                    if name in METHODS:
                        call.read(f"{name}Request", data)
                    found = method(call)
            except Exception as error:
                self.refuse(call, error)
            self._app.watch(call.seen(200))
            return found

        return answer

    @contextmanager
    def _let_in(self, call: Call) -> Iterator[None]:
        if call.what in _OPEN:
            yield
            return
        if not self._free.acquire(blocking=False):
            raise OverloadedError(f"{CALLS} calls are waiting", retry_after_s=_RETRY_S)
        try:
            yield
        finally:
            self._free.release()

    def refuse(self, call: Call, error: Exception) -> NoReturn:
        known = _known(call, error)
        status = status_of_call(known)
        self._app.watch(call.seen(status))
        if isinstance(known, OverloadedError):
            call.context.set_trailing_metadata([("retry-after", f"{known.retry_after_s:.1f}")])
        call.context.abort(code_of(status), str(known))
        raise AssertionError("a call that is aborted goes on")

    # Methods

    def _server_live(self, call: Call) -> Any:
        return message("ServerLiveResponse")(live=self._app.is_alive())

    def _server_ready(self, call: Call) -> Any:
        return message("ServerReadyResponse")(ready=self._app.is_ready and self._app.is_alive())

    def _model_ready(self, call: Call) -> Any:
        is_there = any(served.name == call.request.name for served in self._app.models)
        return message("ModelReadyResponse")(ready=is_there and call.request.version in ("", VERSION))

    def _server_metadata(self, call: Call) -> Any:
        return message("ServerMetadataResponse")(name="hasten", version=__version__, extensions=EXTENSIONS)

    def _model_metadata(self, call: Call) -> Any:
        about = describe(self._found(call, call.request.name, call.request.version))
        return message("ModelMetadataResponse")(
            name=about.name,
            versions=about.versions,
            platform=about.platform,
            inputs=[{"name": one.name, "datatype": one.datatype, "shape": one.shape} for one in about.inputs],
            outputs=[{"name": one.name, "datatype": one.datatype, "shape": one.shape} for one in about.outputs],
        )

    def _repository_index(self, call: Call) -> Any:
        models = [entry for entry in repository(self._app.models) if entry["state"] == READY or not call.request.ready]
        return message("RepositoryIndexResponse")(models=models)

    def _repository_load(self, call: Call) -> Any:
        load(self._app.models, call.request.model_name, call.request.parameters)
        return message("RepositoryModelLoadResponse")()

    def _repository_unload(self, call: Call) -> Any:
        self._app.models.unload(call.request.model_name)
        return message("RepositoryModelUnloadResponse")()

    def _infer(self, call: Call) -> Any:
        once_more(self._ask, call)
        if not call.context.add_callback(call.leave):
            call.leave()
        return response_to(call.request, call.wait())

    def _stream(self, requests: Iterator[bytes], context: Any) -> Iterator[Any]:
        """Answers in the order of the requests, each as soon as those before it are there."""
        whole = Call(STREAM, context)
        try:
            with self._let_in(whole):
                line = Line(self._idle_s)
                if context.add_callback(line.leave):
                    threading.Thread(target=self._read, args=(requests, context, line), daemon=True).start()
                    for call in line:
                        yield from self._streamed(call)
        except HastenError as error:
            self.refuse(whole, error)

    def _read(self, requests: Iterator[bytes], context: Any, line: Line) -> None:
        import grpc

        try:
            with suppress(grpc.RpcError):  # the client has left
                for data in requests:
                    call = Call(STREAM, context)
                    try:
                        call.read("ModelInferRequest", data)
                        once_more(self._ask, call)
                    except Exception as error:
                        call.give(_known(call, error))
                    line.add(call)
        finally:
            line.complete()

    def _streamed(self, call: Call) -> Iterator[Any]:
        """What is wrong with one request is its answer, and the stream goes on."""
        answer = message("ModelStreamInferResponse")
        try:
            # What a client looks for that would take several, as of a text while it is written.
            for outputs, is_last in call.pieces():
                response = response_to(call.request, outputs, triton_final_response={"bool_param": is_last})
                yield answer(infer_response=response)
        except Exception as error:
            known = _known(call, error)
            self._app.watch(call.seen(status_of_call(known)))
            # The request's own name, so that whoever asked knows which of them it was.
            name = call.request.id if call.request is not None else ""
            yield answer(error_message=str(known), infer_response={"id": name})
        else:
            self._app.watch(call.seen(200))

    def _ask(self, call: Call) -> None:
        request = call.request
        served = self._found(call, request.model_name, request.model_version)
        parameters = parameters_of(request.parameters)
        # A stream's deadline is not that of one of its requests.
        if call.what != STREAM and (left_s := call.left_s) is not None:
            parameters.setdefault("timeout", max(1, int(left_s * 1e6)))
        for given in (*request.inputs, *request.outputs):
            refuse_parameters(given.name, given.parameters)
        outputs = tuple(output.name for output in request.outputs)
        on_piece = call.add if call.what == STREAM else None
        call.withdraw = infer(served, Inference(tensors_of(request), outputs, parameters), call.give, on_piece)

    def _found(self, call: Call, name: str, version: str) -> Model:
        served = self._app.models.named(name)
        check_version(version)
        call.model = served.name
        return served


def _to_ms(seconds: float) -> int:
    """As grpcio takes it, which has 31 bits for it."""
    return min(max(1, round(seconds * 1e3)), 2**31 - 1)


def _known(call: Call, error: Exception) -> HastenError:
    """What may be told to a client."""
    if isinstance(error, HastenError):
        return error
    logger.error("%s failed", call.what, exc_info=error)
    return StageError("the server failed on this request; its log says why")


def _refuse_unknown(call: Call) -> NoReturn:
    raise UnsupportedError(f"this server has no {call.what}")
