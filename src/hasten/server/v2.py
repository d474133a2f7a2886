"""The Open Inference Protocol v2 by HTTP, as tritonserver and KServe speak it: JSON, and tensors in binary after it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NotRequired, TypedDict

import msgspec

from hasten.core.errors import HastenError, InputError, StageError
from hasten.core.version import __version__
from hasten.server.engine import Measured
from hasten.server.exchange import BINARY, JSON, TEXT, Exchange, Response, read_json
from hasten.server.inference import (
    VERSION,
    Inference,
    Metadata,
    Output,
    Tensor,
    check_version,
    from_bytes,
    from_values,
    load,
    refuse_parameters,
)
from hasten.server.models import READY, Model, repository
from hasten.server.routes import Call, Route, apart
from hasten.server.text_inference import describe
from hasten.server.text_inference import infer as start

logger = logging.getLogger("hasten")

HEADER_LENGTH = "inference-header-content-length"
EXTENSIONS = ("binary_tensor_data", "generate", "model_repository")
_FORMS = (JSON, BINARY)
_DEEPEST = 8
# Python itself refuses to read numbers of thousands of digits.
_LONGEST_NUMBER = 18


class InputTensor(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    data: Any = None
    parameters: dict[str, Any] = {}


class WantedOutput(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class InferRequest(msgspec.Struct):
    inputs: list[InputTensor]
    id: str = ""
    outputs: list[WantedOutput] = []
    parameters: dict[str, Any] = {}


class OutputTensor(TypedDict):
    name: str
    datatype: str
    shape: list[int]
    # Not where it follows in binary.
    data: NotRequired[list[Any]]
    parameters: NotRequired[dict[str, int]]


class InferAnswer(TypedDict):
    model_name: str
    model_version: str
    id: NotRequired[str]
    outputs: list[OutputTensor]


class ServerMetadata(TypedDict):
    name: str
    version: str
    extensions: list[str]


class RepositoryRequest(msgspec.Struct):
    ready: bool = False
    parameters: dict[str, Any] = {}


def infer(call: Call) -> None:
    served = _found(call)
    request, tail = _read(call.exchange)
    outputs = tuple(output.name for output in request.outputs)
    for tensor in request.inputs:
        refuse_parameters(tensor.name, tensor.parameters)
    for wanted in request.outputs:
        refuse_parameters(wanted.name, wanted.parameters)

    def done(answer: list[Output] | HastenError, measured: Measured | None) -> None:
        if isinstance(answer, HastenError):
            call.done(answer, measured)
            return
        try:
            response = _respond(served.name, request, answer)
        except Exception:
            logger.exception("an answer could not be written")
            call.done(StageError("the answer could not be written; the server's log says why"), measured)
        else:
            call.done(response, measured)

    call.exchange.on_close = start(served, Inference(_tensors(request.inputs, tail), outputs, request.parameters), done)


def server_metadata(call: Call) -> None:
    call.exchange.reply(Response.json(ServerMetadata(name="hasten", version=__version__, extensions=list(EXTENSIONS))))


def model_metadata(call: Call) -> None:
    call.exchange.reply(Response.json(describe(_found(call))))


def model_ready(call: Call) -> None:
    _found(call)
    call.exchange.reply(Response.text(""))


def repository_index(call: Call) -> None:
    request = _repository_request(call)
    entries = repository(call.models)
    call.exchange.reply(Response.json([one for one in entries if one["state"] == READY or not request.ready]))


def repository_load(call: Call) -> None:
    parameters = _repository_request(call).parameters
    _done_apart(call, lambda: load(call.models, call.names["model"], parameters))


def repository_unload(call: Call) -> None:
    _done_apart(call, lambda: call.models.unload(call.names["model"]))


def _repository_request(call: Call) -> RepositoryRequest:
    return call.exchange.read_json(RepositoryRequest) if call.exchange.body else RepositoryRequest()


def _found(call: Call) -> Model:
    check_version(call.names.get("version", ""))
    return call.named(call.names["model"])


def _done_apart(call: Call, work: Callable[[], object]) -> None:
    """What takes seconds, and is answered by nothing."""

    def done() -> Response:
        work()
        return Response.text("")

    apart(call, done)


def _read(exchange: Exchange) -> tuple[InferRequest, memoryview]:
    length = exchange.headers.get(HEADER_LENGTH)
    body = memoryview(exchange.content())
    if length is None:
        return read_json(body, InferRequest), body[:0]
    if not length.isdecimal() or len(length) > _LONGEST_NUMBER or int(length) > len(body):
        raise InputError(f"{HEADER_LENGTH} is '{length:.40}', and the body has {len(body)} bytes")
    return read_json(body[: int(length)], InferRequest), body[int(length) :]


def _tensors(inputs: Sequence[InputTensor], tail: memoryview) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for tensor in inputs:
        name = tensor.name
        if name in tensors:
            raise InputError(f"input '{name}' is there twice")
        size = tensor.parameters.get("binary_data_size")
        if size is None:
            values: list[Any] = []
            _flatten([] if tensor.data is None else tensor.data, values, depth=0)
            tensors[name] = from_values(name, tensor.datatype, tensor.shape, values)
            continue
        if type(size) is not int or not 0 <= size <= len(tail):
            raise InputError(f"input '{name}' has {size} bytes, and {len(tail)} are left of the body")
        tensors[name] = from_bytes(name, tensor.datatype, tensor.shape, tail[:size])
        tail = tail[size:]
    if len(tail):
        raise InputError(f"{len(tail)} bytes of the body belong to no input")
    return tensors


def _flatten(data: Any, values: list[Any], depth: int) -> None:
    if isinstance(data, list):
        if depth > _DEEPEST:
            raise InputError("an input's data is nested too deeply")
        for entry in data:
            _flatten(entry, values, depth + 1)
    else:
        values.append(data)


def _respond(model: str, request: InferRequest, outputs: Sequence[Output]) -> Response:
    """Each output in JSON or in binary, as it was asked for."""
    default = bool(request.parameters.get("binary_data_output", False))
    asked = {output.name: bool(output.parameters.get("binary_data", default)) for output in request.outputs}
    entries: list[OutputTensor] = []
    blobs: list[bytes] = []
    for output in outputs:
        entry = OutputTensor(name=output.name, datatype=output.datatype, shape=output.shape)
        if asked.get(output.name, default):
            blob = output.to_bytes()
            blobs.append(blob)
            entry["parameters"] = {"binary_data_size": len(blob)}
        else:
            entry["data"] = output.to_list()
        entries.append(entry)
    head = InferAnswer(model_name=model, model_version=VERSION, outputs=entries)
    if request.id:
        head["id"] = request.id
    text = msgspec.json.encode(head)
    if not blobs:
        return Response(200, text)
    headers = {"Inference-Header-Content-Length": str(len(text))}
    return Response(200, b"".join([text, *blobs]), BINARY, headers)


_MODEL = "/v2/models/{model}"
_VERSION = f"{_MODEL}/versions/{{version}}"
_SAME = "The same: there is one version"
_LOAD, _UNLOAD = (f"/v2/repository/models/{{model}}/{what}" for what in ("load", "unload"))
ROUTES = (
    Route("POST", f"{_MODEL}/infer", infer, "Tensors in, tensors out", InferRequest, InferAnswer, _FORMS),
    Route("POST", f"{_VERSION}/infer", infer, _SAME, InferRequest, InferAnswer, _FORMS),
    Route("GET", "/v2", server_metadata, "What this server is", answer=ServerMetadata),
    Route("GET", _MODEL, model_metadata, "What a model takes and gives", answer=Metadata),
    Route("GET", _VERSION, model_metadata, _SAME, answer=Metadata),
    Route("GET", f"{_MODEL}/ready", model_ready, "Whether a model is ready", None, str, (TEXT,), is_open=True),
    Route("GET", f"{_VERSION}/ready", model_ready, _SAME, None, str, (TEXT,), is_open=True),
    Route(
        "POST",
        "/v2/repository/index",
        repository_index,
        "The models this server knows",
        RepositoryRequest,
        list[dict[str, str]],
    ),
    Route("POST", _LOAD, repository_load, "Load a model, or load it again", RepositoryRequest, str, (TEXT,)),
    Route("POST", _UNLOAD, repository_unload, "Take a model away", None, str, (TEXT,)),
)
