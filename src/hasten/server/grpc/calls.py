"""gRPC calls: the request, the response that its thread waits for, and the order of calls in a stream."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from hasten.core.errors import DeadlineError, HastenError, InputError
from hasten.server.grpc.protobuf import message
from hasten.server.http.exchange import DisconnectedError
from hasten.server.protocols.oip import BYTES, VERSION, Output, Tensor, from_bytes, from_values, to_text
from hasten.server.request_records import RequestRecord, RequestStats, request_id

# gRPC codes of HTTP statuses; any other status is an internal error.
_CODES = {
    200: "OK",
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    413: "RESOURCE_EXHAUSTED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
# Fields of tensor values that are not sent as bytes.
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
# Requests of one stream that are processed ahead of their responses.
_MAX_PIPELINED = 64


class GrpcCall:
    """A call, or one request of a stream. Another thread sets its response, unless its client disconnects."""

    def __init__(self, method: str, context: Any) -> None:
        self.method = method
        self.context = context
        self.request: Any = None
        self.model = ""
        self.stats: RequestStats | None = None
        self.metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        # Cancels the request in the engine.
        self.cancel: Callable[[], None] = lambda: None
        self._id = request_id(self.metadata.get("x-request-id", ""))
        self._started = time.monotonic()
        # Parts of the response, each with whether it is the last.
        self._answers: SimpleQueue[tuple[list[Output] | HastenError, bool]] = SimpleQueue()

    def read(self, kind: str, data: bytes) -> None:
        """Decode the request, a message of this kind."""
        from google.protobuf.message import DecodeError

        try:
            self.request = message(kind).FromString(data)
        except DecodeError as error:
            raise InputError(f"the request is not a valid {kind}") from error

    def finish(self, answer: list[Output] | HastenError, stats: RequestStats | None = None) -> None:
        """Set the last part of the response, or an error. Thread-safe."""
        self.stats = stats
        self._answers.put((answer, True))

    def add(self, part: list[Output]) -> None:
        """Add a part of the response that others follow. Thread-safe."""
        self._answers.put((part, False))

    def disconnect(self) -> None:
        """Cancel the request: its client has disconnected."""
        self.cancel()
        self._answers.put((DisconnectedError("client disconnected"), True))

    def parts(self) -> Iterator[tuple[list[Output], bool]]:
        """Yield the parts of the response as they come, each with whether it is the last."""
        is_last = False
        while not is_last:
            answer, is_last = self._answers.get()
            if isinstance(answer, HastenError):
                raise answer
            yield answer, is_last

    def record(self, status: int) -> RequestRecord:
        """Return the record of the call for logs, metrics and traces."""
        seconds = time.monotonic() - self._started
        trace = self.metadata.get("traceparent", "")
        return RequestRecord(self._id, self.method, self.model, status, seconds, self.stats, trace)


class ResponseQueue:
    """The calls of a stream in the order of their requests. Adding a call blocks while too many are waiting."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._calls: deque[GrpcCall] = deque()
        self._changed = threading.Condition()
        self._is_complete = self._is_disconnected = False

    def add(self, call: GrpcCall) -> None:
        """Append a call, once there is room."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_disconnected or len(self._calls) < _MAX_PIPELINED)
            self._calls.append(call)
            is_disconnected = self._is_disconnected
            self._changed.notify_all()
        if is_disconnected:
            call.disconnect()

    def complete(self) -> None:
        """Mark the stream as complete: no call follows."""
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()

    def disconnect(self) -> None:
        """Cancel all calls: the client has disconnected."""
        with self._changed:
            self._is_disconnected = True
            calls = tuple(self._calls)
            self._changed.notify_all()
        for call in calls:
            call.disconnect()

    def __iter__(self) -> Iterator[GrpcCall]:
        while True:
            with self._changed:
                if not self._changed.wait_for(
                    lambda: self._calls or self._is_complete or self._is_disconnected, self._idle_s
                ):
                    raise DeadlineError(f"the stream was idle for {self._idle_s:g} s")
                if self._is_disconnected or not self._calls:
                    return
                call = self._calls[0]
            # It stays in the queue while its response is awaited, so that a disconnect cancels it.
            yield call
            with self._changed:
                self._calls.popleft()
                self._changed.notify_all()


def code_of(status: int) -> Any:
    """Return the gRPC code of an HTTP status."""
    import grpc

    return grpc.StatusCode[_CODES.get(status, "INTERNAL")]


def parameters_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of request parameters."""
    choices = {name: (value, value.WhichOneof("parameter_choice")) for name, value in parameters.items()}
    return {name: getattr(value, choice) for name, (value, choice) in choices.items() if choice}


def tensors_of(request: Any) -> Mapping[str, Tensor]:
    """Return the input tensors of an inference request."""
    raw: Sequence[bytes] = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InputError(f"raw_input_contents has {len(raw)} entries, but the request has {len(request.inputs)} inputs")
    tensors: dict[str, Tensor] = {}
    for index, tensor in enumerate(request.inputs):
        name, datatype, shape = tensor.name, tensor.datatype, list(tensor.shape)
        if name in tensors:
            raise InputError(f"input '{name}' occurs twice")
        if raw:
            if tensor.HasField("contents"):
                raise InputError(f"input '{name}' has both contents and raw_input_contents")
            tensors[name] = from_bytes(name, datatype, shape, memoryview(raw[index]))
            continue
        if datatype not in _CONTENTS:
            reason = f"datatype {datatype} of input '{name}' has no contents field"
            raise InputError(reason, hint="use raw_input_contents")
        values: Sequence[Any] = getattr(tensor.contents, _CONTENTS[datatype])
        if datatype == BYTES:
            values = [to_text(name, value) for value in values]
        tensors[name] = from_values(name, datatype, shape, values)
    return tensors


def response_to(request: Any, outputs: Sequence[Output], **parameters: Any) -> dict[str, Any]:
    """Return the fields of the response to an inference request."""
    return {
        "model_name": request.model_name,
        "model_version": VERSION,
        "id": request.id,
        "parameters": parameters,
        "outputs": [{"name": output.name, "datatype": output.datatype, "shape": output.shape} for output in outputs],
        "raw_output_contents": [output.to_bytes() for output in outputs],
    }
