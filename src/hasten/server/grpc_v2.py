"""The Open Inference Protocol v2 by gRPC: `inference.GRPCInferenceService`, health and reflection.

A call has a thread of its own, which waits for its answer. With grpcio's asynchronous server a call takes longer, since
each crosses the event loop of Python twice: docs/decisions/http.md.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from hasten.core.errors import HastenError, InputError, OverloadedError, UnavailableError, missing_package
from hasten.core.version import __version__
from hasten.server.app import App, once_more
from hasten.server.engine import Measured
from hasten.server.exchange import status_of
from hasten.server.inference import (
    BYTES,
    VERSION,
    Inference,
    Output,
    Tensor,
    check_version,
    describe,
    from_bytes,
    from_values,
    infer,
    to_text,
)
from hasten.server.messages import METHODS, SERVICE, STREAM, message, pool
from hasten.server.models import READY, repository
from hasten.server.served import Served
from hasten.server.v2 import EXTENSIONS
from hasten.server.watch import Seen, request_id

logger = logging.getLogger("hasten")

# What HTTP calls it to what gRPC calls it; what is not here is our own fault.
_CODES = {
    200: "OK",
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    413: "RESOURCE_EXHAUSTED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_OPEN = ("ServerLive", "ServerReady", "ModelReady")
_GONE = 499
_FAULT = 500
# Where numbers stand that do not come as bytes.
_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}
# Calls that wait for answers at once; more wait for a thread.
_THREADS = 64
# Requests of one stream that are asked ahead of their answers.
_AHEAD = 64


class GrpcServer:
    def __init__(self, app: App, address: str, *, most_bytes: int, tls: tuple[Path, Path] | None = None) -> None:
        try:
            import grpc
            from grpc_health.v1 import health, health_pb2, health_pb2_grpc
            from grpc_reflection.v1alpha import reflection
        except ImportError as error:
            raise missing_package("grpcio", "gRPC", "serve") from error
        options = [("grpc.max_receive_message_length", most_bytes), ("grpc.so_reuseport", 0)]
        self._server = grpc.server(ThreadPoolExecutor(_THREADS, "grpc"), options=options)
        self._server.add_generic_rpc_handlers([_Service(app).handler()])
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
        """Take nothing more; the event is set when all that was taken is answered."""
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


class _Call:
    """One call, for those who watch."""

    def __init__(self, what: str, context: Any) -> None:
        self.context = context
        self.what = what
        self.begin = time.monotonic()
        self.metadata: dict[str, str] = {
            key: value for key, value in context.invocation_metadata() if isinstance(value, str)
        }
        self.id = request_id(self.metadata.get("x-request-id", ""))
        self.model = ""
        self.measured: Measured | None = None

    def seen(self, status: int) -> Seen:
        seconds = time.monotonic() - self.begin
        trace = self.metadata.get("traceparent", "")
        return Seen(self.id, self.what, self.model, status, seconds, self.measured, trace)


class _Service:
    def __init__(self, app: App) -> None:
        self._app = app

    def handler(self) -> Any:
        import grpc

        methods: dict[str, Callable[[Any, _Call], Any]] = {
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
                self._answering(name, methods[name]),
                message(f"{name}Request").FromString,
                message(f"{name}Response").SerializeToString,
            )
            for name in METHODS
        }
        handlers[STREAM] = grpc.stream_stream_rpc_method_handler(
            self._stream, message("ModelInferRequest").FromString, message("ModelStreamInferResponse").SerializeToString
        )
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _answering(self, name: str, method: Callable[[Any, _Call], Any]) -> Callable[[Any, Any], Any]:
        """Let in, answered or refused, and told to those who watch."""

        def answer(request: Any, context: Any) -> Any:
            call = _Call(name, context)
            try:
                if name not in _OPEN:
                    self._app.admit(call.metadata.get("authorization", ""))
                found = once_more(lambda: method(request, call))
            except HastenError as error:
                self._refuse(call, error)
            except Exception:
                logger.exception("%s failed", name)
                self._app.watch(call.seen(_FAULT))
                context.abort(_code(_FAULT), "the server failed on this request; its log says why")
            else:
                self._app.watch(call.seen(200))
                return found

        return answer

    def _refuse(self, call: _Call, error: HastenError) -> None:
        status = _GONE if isinstance(error, _GoneError) else status_of(error)
        self._app.watch(call.seen(status))
        if isinstance(error, OverloadedError):
            call.context.set_trailing_metadata([("retry-after", f"{error.retry_after_s:.1f}")])
        call.context.abort(_code(status), str(error))

    # Methods

    def _server_live(self, request: Any, call: _Call) -> Any:
        return message("ServerLiveResponse")(live=self._app.is_alive())

    def _server_ready(self, request: Any, call: _Call) -> Any:
        return message("ServerReadyResponse")(ready=self._app.is_ready)

    def _model_ready(self, request: Any, call: _Call) -> Any:
        is_there = any(served.name == request.name for served in self._app.models)
        return message("ModelReadyResponse")(ready=is_there and request.version in ("", VERSION))

    def _server_metadata(self, request: Any, call: _Call) -> Any:
        return message("ServerMetadataResponse")(name="hasten", version=__version__, extensions=EXTENSIONS)

    def _model_metadata(self, request: Any, call: _Call) -> Any:
        about = describe(self._found(call, request.name, request.version))
        return message("ModelMetadataResponse")(
            name=about.name,
            versions=about.versions,
            platform=about.platform,
            inputs=[{"name": one.name, "datatype": one.datatype, "shape": one.shape} for one in about.inputs],
            outputs=[{"name": one.name, "datatype": one.datatype, "shape": one.shape} for one in about.outputs],
        )

    def _repository_index(self, request: Any, call: _Call) -> Any:
        models = [entry for entry in repository(self._app.models) if entry["state"] == READY or not request.ready]
        return message("RepositoryIndexResponse")(models=models)

    def _repository_load(self, request: Any, call: _Call) -> Any:
        self._app.models.load_again(request.model_name)
        return message("RepositoryModelLoadResponse")()

    def _repository_unload(self, request: Any, call: _Call) -> Any:
        self._app.models.unload(request.model_name)
        return message("RepositoryModelUnloadResponse")()

    def _infer(self, request: Any, call: _Call) -> Any:
        answers: list[list[Output] | HastenError] = []
        is_over = threading.Event()

        def done(answer: list[Output] | HastenError, measured: Measured | None) -> None:
            call.measured = measured
            answers.append(answer)
            is_over.set()

        def leave() -> None:
            withdraw()
            is_over.set()

        withdraw = self._ask(request, call, done)
        if not call.context.add_callback(leave):
            leave()
        is_over.wait()
        if not answers:
            raise _GoneError("the client has left")
        if isinstance(answers[0], HastenError):
            raise answers[0]
        return _response(request, answers[0])

    def _stream(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        """Answers in the order of the requests, each as soon as those before it are there."""
        call = _Call(STREAM, context)
        try:
            self._app.admit(call.metadata.get("authorization", ""))
        except HastenError as error:
            self._refuse(call, error)
        answers: queue.Queue[Future[Any] | None] = queue.Queue(_AHEAD)
        threading.Thread(target=self._read, args=(requests, call, answers), daemon=True).start()
        while (answer := answers.get()) is not None:
            yield answer.result()

    def _read(self, requests: Iterator[Any], call: _Call, answers: queue.Queue[Future[Any] | None]) -> None:
        import grpc

        with suppress(grpc.RpcError):  # the client has left
            for request in requests:
                _put(answers, self._begin(request, _Call(STREAM, call.context)), call.context)
        _put(answers, None, call.context)

    def _begin(self, request: Any, call: _Call) -> Future[Any]:
        future: Future[Any] = Future()
        answer = message("ModelStreamInferResponse")

        def done(found: list[Output] | HastenError, measured: Measured | None) -> None:
            call.measured = measured
            if isinstance(found, HastenError):
                self._app.watch(call.seen(status_of(found)))
                # The request's own name, so that whoever asked knows which of them it was.
                future.set_result(answer(error_message=str(found), infer_response={"id": request.id}))
            else:
                self._app.watch(call.seen(200))
                future.set_result(answer(infer_response=_response(request, found)))

        try:
            once_more(lambda: self._ask(request, call, done))
        except HastenError as error:
            done(error, None)
        except Exception:
            logger.exception("%s failed", STREAM)
            self._app.watch(call.seen(_FAULT))
            future.set_result(answer(error_message="the server failed on this request; its log says why"))
        return future

    def _ask(
        self, request: Any, call: _Call, done: Callable[[list[Output] | HastenError, Measured | None], None]
    ) -> Callable[[], None]:
        served = self._found(call, request.model_name, request.model_version)
        parameters = {name: _plain(value) for name, value in request.parameters.items()}
        left = call.context.time_remaining()
        if left is not None and call.what != STREAM:
            parameters.setdefault("timeout", max(1, int(left * 1e6)))
        outputs = tuple(output.name for output in request.outputs)
        return infer(served, Inference(_tensors(request), outputs, parameters), done)

    def _found(self, call: _Call, name: str, version: str) -> Served:
        served = self._app.models.named(name)
        check_version(version)
        call.model = served.name
        return served


class _GoneError(HastenError):
    pass


def _put(answers: queue.Queue[Future[Any] | None], answer: Future[Any] | None, context: Any) -> None:
    while context.is_active():
        with suppress(queue.Full):
            answers.put(answer, timeout=0.1)
            return


def _code(status: int) -> Any:
    import grpc

    return grpc.StatusCode[_CODES.get(status, "INTERNAL")]


def _plain(parameter: Any) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    return getattr(parameter, choice) if choice else None


def _tensors(request: Any) -> Mapping[str, Tensor]:
    raw: Sequence[bytes] = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InputError(f"there are {len(request.inputs)} inputs, and the contents of {len(raw)}")
    tensors: dict[str, Tensor] = {}
    for place, given in enumerate(request.inputs):
        name, datatype, shape = given.name, given.datatype, list(given.shape)
        if name in tensors:
            raise InputError(f"input '{name}' is there twice")
        if raw:
            tensors[name] = from_bytes(name, datatype, shape, memoryview(raw[place]))
            continue
        if datatype not in _CONTENTS:
            raise InputError(f"input '{name}' is {datatype}", hint="it comes in raw_input_contents, if at all")
        values: Sequence[Any] = getattr(given.contents, _CONTENTS[datatype])
        if datatype == BYTES:
            values = [to_text(name, value) for value in values]
        tensors[name] = from_values(name, datatype, shape, values)
    return tensors


def _response(request: Any, outputs: Sequence[Output]) -> Any:
    return message("ModelInferResponse")(
        model_name=request.model_name,
        model_version=VERSION,
        id=request.id,
        outputs=[{"name": one.name, "datatype": one.datatype, "shape": one.shape} for one in outputs],
        raw_output_contents=[one.to_bytes() for one in outputs],
    )
