"""gRPC calls: a request, the response that it waits for, and the conversion of both from and to messages."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hasten.core.errors import HastenError, InputError, StageError
from hasten.server.grpc.protobuf import STREAM, message
from hasten.server.protocols.oip import BYTES, VERSION, Output, Tensor, from_bytes, from_values, to_text
from hasten.server.request_records import RequestRecord, RequestStats, request_id

logger = logging.getLogger("hasten")

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


class GrpcCall:
    """A call, or one request of a stream. Any thread may set its response; everything else is on the event loop."""

    def __init__(self, method: str, context: Any) -> None:
        self.method = method
        self.context = context
        self.request: Any = None
        self.model = ""
        self.stats: RequestStats | None = None
        self.metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        # The size of its message.
        self.size = 0
        # Cancels the request in the engine.
        self.cancel: Callable[[], object] = lambda: None
        self.is_disconnected = False
        self._id = request_id(self.metadata.get("x-request-id", ""))
        self._started = time.monotonic()
        self._loop = asyncio.get_running_loop()
        # Encoded parts of the response, each with whether it is the last.
        self._parts: asyncio.Queue[tuple[bytes | HastenError, bool]] = asyncio.Queue()

    def read(self, kind: str, data: bytes) -> None:
        """Decode the request, a message of this kind."""
        from google.protobuf.message import DecodeError

        try:
            self.request = message(kind).FromString(data)
        except DecodeError as error:
            raise InputError(f"the request is not a valid {kind}") from error

    def finish(self, answer: list[Output] | bytes | HastenError, stats: RequestStats | None = None) -> None:
        """Set the last part of the response, encoded or not, or an error. Thread-safe."""
        self.stats = stats
        self._put(answer, is_last=True)

    def add(self, part: list[Output]) -> None:
        """Add a part of the response that others follow. Thread-safe."""
        self._put(part, is_last=False)

    def _put(self, answer: list[Output] | bytes | HastenError, *, is_last: bool) -> None:
        # Encoded in the engine's thread, so that a large response does not hold up the event loop.
        try:
            part = self._encode(answer, is_last=is_last) if isinstance(answer, list) else answer
        except Exception as error:
            part = to_public_error(self.method, error)
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._parts.put_nowait, (part, is_last))

    def _encode(self, outputs: list[Output], *, is_last: bool) -> bytes:
        if self.method != STREAM:
            return encode(self.method, response_to(self.request, outputs))
        # By triton_final_response a client recognizes the last part of a response, as of a generated text.
        fields = response_to(self.request, outputs, triton_final_response={"bool_param": is_last})
        return encode(STREAM, {"infer_response": fields})

    def disconnect(self) -> None:
        """Cancel the request: its client has disconnected."""
        self.is_disconnected = True
        self.cancel()

    async def next_part(self) -> tuple[bytes, bool]:
        """Return the next encoded part of the response and whether it is the last, or raise the error at its end."""
        part, is_last = await self._parts.get()
        if isinstance(part, HastenError):
            raise part
        return part, is_last

    def record(self, status: int) -> RequestRecord:
        """Return the record of the call for logs, metrics and traces."""
        seconds = time.monotonic() - self._started
        trace = self.metadata.get("traceparent", "")
        return RequestRecord(self._id, self.method, self.model, status, seconds, self.stats, trace)


def encode(method: str, fields: Mapping[str, Any]) -> bytes:
    """Return the response of a method with these fields."""
    return bytes(message(f"{method}Response")(**fields).SerializeToString())


def to_public_error(method: str, error: Exception) -> HastenError:
    """Return the error that the client may see; details of others are only logged."""
    if isinstance(error, HastenError):
        return error
    logger.error("%s failed.", method, exc_info=error)
    return StageError("internal server error: see the server's log")


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
