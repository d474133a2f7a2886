"""The methods of `inference.GRPCInferenceService`, health and reflection, as coroutines on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, NoReturn

from hasten.core.errors import HastenError, InputError, OverloadedError, UnsupportedError
from hasten.core.version import __version__
from hasten.server.app import LARGE_BYTES, App, retry_if_retired
from hasten.server.byte_budget import ByteBudget
from hasten.server.grpc import calls
from hasten.server.grpc.calls import GrpcCall, to_public_error
from hasten.server.grpc.health import HealthService
from hasten.server.grpc.messages import MessageReceiver
from hasten.server.grpc.protobuf import METHODS, SERVICE, STREAM, pool
from hasten.server.http.exchange import CLIENT_DISCONNECTED, status_of
from hasten.server.http.state import HttpLimits
from hasten.server.models.registry import Model, repository
from hasten.server.protocols import oip
from hasten.server.protocols.oip_http import EXTENSIONS

_HEALTH = "grpc.health.v1.Health"
_REFLECTION = "grpc.reflection.v1alpha.ServerReflection"
# Methods that need no API key. Not ModelReady, whose answer depends on whether a model exists.
OPEN_METHODS = (
    *(f"/{SERVICE}/{name}" for name in ("ServerLive", "ServerReady")),
    *(f"/{_HEALTH}/{name}" for name in ("Check", "Watch")),
)
# Methods of tritonserver that its clients may call.
_UNSUPPORTED_METHODS = (
    "ModelConfig",
    "ModelStatistics",
    "TraceSetting",
    "LogSettings",
    *(f"{kind}SharedMemory{verb}" for kind in ("System", "Cuda") for verb in ("Status", "Register", "Unregister")),
)
# Requests of one stream that are processed ahead of their responses.
_MAX_PIPELINED = 64
# A stream may idle longer than a connection: its client notices the end only when it sends the next request.
_STREAM_IDLE_FACTOR = 4

# Returns the response to a request, or None if `GrpcCall.finish` sets it later.
Method = Callable[[GrpcCall, bytes], bytes | None]


class Service:
    """The handlers of all methods. They take and return bytes: grpcio reports invalid messages as internal errors."""

    def __init__(self, app: App, health: HealthService, limits: HttpLimits, budget: ByteBudget) -> None:
        self._app = app
        self._health = health
        self._budget = budget
        self._read_s, self._idle_s = limits.read_s, _STREAM_IDLE_FACTOR * limits.idle_s
        self.receiver = MessageReceiver(limits.connections)

    def handlers(self) -> dict[str, Any]:
        """Return the handlers by the paths of their methods."""
        import grpc

        # Each returns the fields of its response.
        methods: dict[str, Callable[[GrpcCall], Mapping[str, Any] | None]] = {
            "ServerLive": lambda _: {"live": self._app.is_alive()},
            "ServerReady": lambda _: {"ready": self._app.can_serve()},
            "ModelReady": self._model_ready,
            "ServerMetadata": lambda _: {"name": "hasten", "version": __version__, "extensions": EXTENSIONS},
            "ModelMetadata": self._model_metadata,
            "ModelInfer": partial(retry_if_retired, self._submit),
            "RepositoryIndex": self._repository_index,
            "RepositoryModelLoad": self._repository_load,
            "RepositoryModelUnload": self._repository_unload,
        }
        unary: dict[str, Method] = {f"{SERVICE}/{name}": partial(_answer, methods[name]) for name in METHODS}
        unary.update((f"{SERVICE}/{name}", _reject_unsupported) for name in _UNSUPPORTED_METHODS)
        unary[f"{_HEALTH}/Check"] = lambda _, data: self._health.check(data)
        # As streams of requests: their messages are received here, within a deadline.
        to_one, to_many = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        return {
            **{f"/{path}": to_one(self._unary(path.rpartition("/")[2], method)) for path, method in unary.items()},
            f"/{SERVICE}/{STREAM}": to_many(self._stream),
            f"/{_HEALTH}/Watch": to_many(self._watch_health),
            f"/{_REFLECTION}/ServerReflectionInfo": to_many(self._reflect),
        }

    def rejection(self, method: str, error: HastenError) -> Any:
        """Return the handler of a call that is rejected before its message is received."""
        import grpc

        async def reject(_: object, context: Any) -> None:
            await self._reject(GrpcCall(method.rpartition("/")[2], context), error)

        return grpc.stream_stream_rpc_method_handler(reject)

    async def _reject(self, call: GrpcCall, error: Exception) -> NoReturn:
        public_error = to_public_error(call.method, error)
        status = status_of(public_error)
        self._app.watch(call.record(status))
        metadata: tuple[tuple[str, str], ...] = ()
        if isinstance(public_error, OverloadedError):
            metadata = (("retry-after", f"{public_error.retry_after_s:.1f}"),)
        await call.context.abort(calls.code_of(status), str(public_error), metadata)
        raise AssertionError("context.abort returned")

    @asynccontextmanager
    async def _answering(self, call: GrpcCall, *, is_stream: bool = False) -> AsyncIterator[None]:
        """Reject the call if the block fails, and record it; requests of a stream are recorded one by one."""
        try:
            yield
        except asyncio.CancelledError:
            call.disconnect()
            if not is_stream:
                self._app.watch(call.record(CLIENT_DISCONNECTED))
            raise
        except Exception as error:
            await self._reject(call, error)
        if not is_stream:
            self._app.watch(call.record(200))

    # Kinds of calls

    def _unary(self, name: str, method: Method) -> Callable[[object, Any], Any]:
        async def answer(_: object, context: Any) -> bytes:
            call = GrpcCall(name, context)
            async with self._answering(call):
                data = await self._receive_only(context)
                with self._budget.holding(len(data)):
                    response = await self._run(method, call, data)
                    if response is None:
                        response, _ = await call.next_part()
            return response

        return answer

    async def _stream(self, _: object, context: Any) -> None:
        """Send responses in the order of the requests, each as soon as those before it are sent."""
        stream = GrpcCall(STREAM, context)
        accepted: asyncio.Queue[GrpcCall | None] = asyncio.Queue(_MAX_PIPELINED)
        unanswered: set[GrpcCall] = set()
        sending = asyncio.ensure_future(self._send_responses(accepted, unanswered, context))
        try:
            async with self._answering(stream, is_stream=True):
                while True:
                    data = await self.receiver.receive(context, self._idle_s, lambda: bool(unanswered))
                    if data is None:
                        break
                    call = GrpcCall(STREAM, context)
                    unanswered.add(call)
                    try:
                        self._budget.add(len(data))
                        call.size = len(data)
                        await self._run(partial(_answer, partial(retry_if_retired, self._submit)), call, data)
                    except Exception as error:
                        call.finish(to_public_error(STREAM, error))
                    await accepted.put(call)
                await accepted.put(None)
                await sending
        finally:
            sending.cancel()
            for call in unanswered:
                call.disconnect()
                self._end(call, CLIENT_DISCONNECTED)

    async def _send_responses(
        self, accepted: asyncio.Queue[GrpcCall | None], unanswered: set[GrpcCall], context: Any
    ) -> None:
        while (call := await accepted.get()) is not None:
            status, is_last = 200, False
            try:
                while not is_last:
                    part, is_last = await call.next_part()
                    await context.write(part)
            except HastenError as error:
                # An error is a response too, and the stream goes on. The id tells which request has failed.
                status = status_of(error)
                request_id = call.request.id if call.request is not None else ""
                fields = {"error_message": str(error), "infer_response": {"id": request_id}}
                await context.write(calls.encode(STREAM, fields))
            unanswered.discard(call)
            self._end(call, status)

    def _end(self, call: GrpcCall, status: int) -> None:
        self._budget.remove(call.size)
        self._app.watch(call.record(status))

    async def _watch_health(self, _: object, context: Any) -> None:
        async with self._answering(GrpcCall("Watch", context), is_stream=True):
            await self._health.watch(await self._receive_only(context), context)

    async def _reflect(self, _: object, context: Any) -> None:
        from grpc_reflection.v1alpha import reflection, reflection_pb2

        async def requests() -> AsyncIterator[Any]:
            while (data := await self.receiver.receive(context, self._idle_s)) is not None:
                yield reflection_pb2.ServerReflectionRequest.FromString(data)

        reflector = reflection.aio.ReflectionServicer((SERVICE, _HEALTH, _REFLECTION), pool())
        async with self._answering(GrpcCall("ServerReflectionInfo", context), is_stream=True):
            async for response in reflector.ServerReflectionInfo(requests(), context):
                await context.write(response.SerializeToString())

    async def _receive_only(self, context: Any) -> bytes:
        data = await self.receiver.receive(context, self._read_s)
        if data is None:
            raise InputError("the call has no message")
        return data

    async def _run(self, method: Method, call: GrpcCall, data: bytes) -> bytes | None:
        """Call a method, in a thread if its message is large, since that would block the event loop."""
        if len(data) <= LARGE_BYTES:
            return method(call, data)
        response = await asyncio.get_running_loop().run_in_executor(self._app.readers, method, call, data)
        if call.is_disconnected:
            # The client may have disconnected before there was anything to cancel.
            call.cancel()
        return response

    # Methods

    def _model_ready(self, call: GrpcCall) -> Mapping[str, Any]:
        is_loaded = any(model.name == call.request.name for model in self._app.models)
        return {"ready": is_loaded and call.request.version in ("", oip.VERSION)}

    def _model_metadata(self, call: GrpcCall) -> Mapping[str, Any]:
        return asdict(oip.describe(self._find_model(call, call.request.name, call.request.version)))

    def _repository_index(self, call: GrpcCall) -> Mapping[str, Any]:
        return {"models": repository(self._app.models, only_ready=call.request.ready)}

    def _repository_load(self, call: GrpcCall) -> None:
        name, parameters = call.request.model_name, call.request.parameters
        call.cancel = self._app.control.load(name, parameters, lambda error: call.finish(error or b""))

    def _repository_unload(self, call: GrpcCall) -> None:
        call.cancel = self._app.control.unload(call.request.model_name, lambda error: call.finish(error or b""))

    def _submit(self, call: GrpcCall) -> None:
        request = call.request
        model = self._find_model(call, request.model_name, request.model_version)
        parameters = calls.parameters_of(request.parameters)
        # The deadline of a stream does not apply to its single requests.
        if call.method != STREAM and (remaining_s := call.context.time_remaining()) is not None:
            parameters.setdefault("timeout", max(1, int(remaining_s * 1e6)))
        for tensor in (*request.inputs, *request.outputs):
            oip.reject_parameters(tensor.name, tensor.parameters)
        outputs = tuple(output.name for output in request.outputs)
        on_text_delta = call.add if call.method == STREAM else None
        oip.check_items(model, request.inputs)
        inference = oip.Inference(calls.tensors_of(request), outputs, parameters)
        call.cancel = oip.infer(model, inference, call.finish, on_text_delta)

    def _find_model(self, call: GrpcCall, name: str, version: str) -> Model:
        model = self._app.models.named(name)
        oip.check_version(version)
        call.model = model.name
        return model


def _answer(method: Callable[[GrpcCall], Mapping[str, Any] | None], call: GrpcCall, data: bytes) -> bytes | None:
    """Decode the request, and encode the response if the method returns its fields."""
    call.read("ModelInferRequest" if call.method == STREAM else f"{call.method}Request", data)
    fields = method(call)
    return None if fields is None else calls.encode(call.method, fields)


def _reject_unsupported(call: GrpcCall, _data: bytes) -> NoReturn:
    raise UnsupportedError(f"{call.method} is not supported")
