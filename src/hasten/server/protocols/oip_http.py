"""Serve the Open Inference Protocol v2 over HTTP, with tritonserver's extension for binary tensors after the JSON."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, NotRequired, TypedDict

import msgspec

from hasten.core.errors import HastenError, InputError, StageError
from hasten.core.version import __version__
from hasten.server.http.exchange import BINARY, JSON, TEXT, Exchange, Response, read_json, to_json_value
from hasten.server.models.registry import Model, repository
from hasten.server.protocols import oip
from hasten.server.protocols.oip import VERSION, Inference, Metadata, Output, Tensor, check_version
from hasten.server.protocols.routes import HttpCall, Route, with_version
from hasten.server.request_records import RequestStats

logger = logging.getLogger("hasten")

HEADER_LENGTH = "inference-header-content-length"
EXTENSIONS = ("binary_tensor_data", "generate", "model_repository")
_FORMS = (JSON, BINARY)
_MAX_NESTING = 8
# Python itself rejects numbers of thousands of digits.
_MAX_LENGTH_DIGITS = 18


class InputTensor(msgspec.Struct):
    """An input; its data is here, or in binary after the JSON."""

    name: str
    shape: list[int]
    datatype: str
    data: Any = None
    parameters: dict[str, Any] = {}


class RequestedOutput(msgspec.Struct):
    """An output that the client requests."""

    name: str
    parameters: dict[str, Any] = {}


class InferRequest(msgspec.Struct):
    """The JSON of an inference request."""

    inputs: list[InputTensor]
    id: str = ""
    outputs: list[RequestedOutput] = []
    parameters: dict[str, Any] = {}


class OutputTensor(TypedDict):
    """An output tensor."""

    name: str
    datatype: str
    shape: list[int]
    # Absent if it follows in binary.
    data: NotRequired[list[Any]]
    parameters: NotRequired[dict[str, int]]


class InferResponse(TypedDict):
    """The JSON of an inference response."""

    model_name: str
    model_version: str
    id: NotRequired[str]
    outputs: list[OutputTensor]


class ServerMetadata(TypedDict):
    """Name, version and extensions of the server."""

    name: str
    version: str
    extensions: list[str]


class RepositoryRequest(msgspec.Struct):
    """The body of the model repository routes."""

    ready: bool = False
    parameters: dict[str, Any] = {}


def infer(call: HttpCall) -> None:
    """Run a model on the tensors of a request."""
    model = _find_model(call)
    request, tail = _read(call.exchange)
    outputs = tuple(output.name for output in request.outputs)
    tensors: list[InputTensor | RequestedOutput] = [*request.inputs, *request.outputs]
    for tensor in tensors:
        oip.reject_parameters(tensor.name, tensor.parameters)

    def done(answer: list[Output] | HastenError, stats: RequestStats | None) -> None:
        if isinstance(answer, HastenError):
            call.done(answer, stats)
            return
        try:
            response = _response(model.name, request, answer)
        except Exception:
            logger.exception("Failed to encode a response.")
            call.done(StageError("failed to encode the response: see the server's log"), stats)
        else:
            call.done(response, stats)

    oip.check_items(model, request.inputs)
    inference = Inference(_tensors(request.inputs, tail), outputs, request.parameters)
    call.exchange.on_close = oip.infer(model, inference, done)


def server_metadata(call: HttpCall) -> None:
    """Reply with name, version and extensions of the server."""
    call.exchange.reply(Response.json(ServerMetadata(name="hasten", version=__version__, extensions=list(EXTENSIONS))))


def model_metadata(call: HttpCall) -> None:
    """Reply with the inputs and outputs of a model."""
    call.exchange.reply(Response.json(oip.describe(_find_model(call))))


def model_ready(call: HttpCall) -> None:
    """Reply with 200 if the model is loaded."""
    _find_model(call)
    call.exchange.reply(Response.text(""))


def repository_index(call: HttpCall) -> None:
    """Reply with all models that are or were loaded."""
    only_ready = _repository_request(call).ready
    call.exchange.reply(Response.json(repository(call.models, only_ready=only_ready)))


def repository_load(call: HttpCall) -> None:
    """Load or reload a model."""
    parameters = _repository_request(call).parameters
    call.exchange.on_close = call.control.load(call.names["model"], parameters, partial(_controlled, call))


def repository_unload(call: HttpCall) -> None:
    """Unload a model."""
    call.exchange.on_close = call.control.unload(call.names["model"], partial(_controlled, call))


def _controlled(call: HttpCall, error: HastenError | None) -> None:
    if error is None:
        call.exchange.reply(Response.text(""))
    else:
        call.exchange.fail(error)


def _repository_request(call: HttpCall) -> RepositoryRequest:
    return call.exchange.read_json(RepositoryRequest) if call.exchange.body else RepositoryRequest()


def _find_model(call: HttpCall) -> Model:
    check_version(call.names.get("version", ""))
    return call.model_named(call.names["model"])


def _read(exchange: Exchange) -> tuple[InferRequest, memoryview]:
    length = exchange.headers.get(HEADER_LENGTH)
    body = memoryview(exchange.content())
    if length is None:
        return read_json(body, InferRequest), body[:0]
    if not length.isdecimal() or len(length) > _MAX_LENGTH_DIGITS or int(length) > len(body):
        raise InputError(f"invalid {HEADER_LENGTH} '{length:.40}': the body has {len(body)} bytes")
    return read_json(body[: int(length)], InferRequest), body[int(length) :]


def _tensors(inputs: Sequence[InputTensor], tail: memoryview) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for tensor in inputs:
        name = tensor.name
        if name in tensors:
            raise InputError(f"input '{name}' occurs twice")
        size = tensor.parameters.get("binary_data_size")
        if size is None:
            values: list[Any] = []
            _flatten([] if tensor.data is None else tensor.data, values, depth=0)
            tensors[name] = oip.from_values(name, tensor.datatype, tensor.shape, values)
            continue
        if type(size) is not int or not 0 <= size <= len(tail):
            raise InputError(f"input '{name}' has {size} bytes, but the rest of the body has {len(tail)}")
        tensors[name] = oip.from_bytes(name, tensor.datatype, tensor.shape, tail[:size])
        tail = tail[size:]
    if len(tail):
        raise InputError(f"the last {len(tail)} bytes of the body do not belong to an input")
    return tensors


def _flatten(data: Any, values: list[Any], depth: int) -> None:
    if isinstance(data, list):
        if depth > _MAX_NESTING:
            raise InputError("an input's data is nested too deeply")
        for entry in data:
            _flatten(entry, values, depth + 1)
    else:
        values.append(data)


def _response(model: str, request: InferRequest, outputs: Sequence[Output]) -> Response:
    """Return each output in JSON or in binary, as requested."""
    default = bool(request.parameters.get("binary_data_output", False))
    is_binary = {output.name: bool(output.parameters.get("binary_data", default)) for output in request.outputs}
    entries: list[OutputTensor] = []
    blobs: list[bytes] = []
    for output in outputs:
        entry = OutputTensor(name=output.name, datatype=output.datatype, shape=output.shape)
        if is_binary.get(output.name, default):
            blob = output.to_bytes()
            blobs.append(blob)
            entry["parameters"] = {"binary_data_size": len(blob)}
        else:
            entry["data"] = output.to_json()
        entries.append(entry)
    head = InferResponse(model_name=model, model_version=VERSION, outputs=entries)
    if request.id:
        head["id"] = request.id
    text = msgspec.json.encode(head, enc_hook=to_json_value)
    if not blobs:
        return Response(200, text)
    headers = {"Inference-Header-Content-Length": str(len(text))}
    return Response(200, b"".join([text, *blobs]), BINARY, headers)


_MODEL, _INDEX = "/v2/models/{model}", "/v2/repository/index"
_Index = list[dict[str, str]]
_IF_OFF = {403: "model control is off"}
_LOAD, _UNLOAD = (f"/v2/repository/models/{{model}}/{action}" for action in ("load", "unload"))
ROUTES = (
    *with_version(
        Route("POST", f"{_MODEL}/infer", infer, "Run a model on tensors", InferRequest, InferResponse, _FORMS)
    ),
    Route("GET", "/v2", server_metadata, "Server metadata", answer=ServerMetadata),
    *with_version(Route("GET", _MODEL, model_metadata, "Model metadata", answer=Metadata)),
    # Not open: its answer depends on whether a model exists.
    *with_version(Route("GET", f"{_MODEL}/ready", model_ready, "Readiness of a model", None, str, (TEXT,))),
    Route("POST", _INDEX, repository_index, "List the models of the repository", RepositoryRequest, _Index),
    Route("POST", _LOAD, repository_load, "Load or reload a model", RepositoryRequest, str, (TEXT,), statuses=_IF_OFF),
    Route("POST", _UNLOAD, repository_unload, "Unload a model", None, str, (TEXT,), statuses=_IF_OFF),
)
