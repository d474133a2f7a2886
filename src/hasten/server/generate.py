"""The v2 protocol's generate extension, as tritonserver has it: `text_input` to `text_output`, whole or as a stream."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

import msgspec

from hasten.core.errors import HastenError, InputError
from hasten.core.generation import Sampling
from hasten.generation.rows import Piece
from hasten.server.engine import Measured
from hasten.server.events import Events, whole
from hasten.server.exchange import fitted
from hasten.server.inference import VERSION, check_version
from hasten.server.routes import Call, Route, writing
from hasten.server.served_writer import ServedWriter
from hasten.server.text_inference import sampling_from

# Of the parameters, those that do not say how it is written.
_STREAM, _EXCLUDES = "stream", "exclude_input_in_output"


class GenerateRequest(msgspec.Struct):
    text_input: str
    id: str = ""
    # How it is written: max_tokens, temperature, top_k, top_p, stop, seed and the like; may stand beside the text too.
    parameters: dict[str, Any] = {}


class Generated(TypedDict):
    id: NotRequired[str]
    model_name: str
    model_version: str
    text_output: str


def generate(call: Call) -> None:
    request, served, sampling = _read(call)
    if request.parameters.get(_STREAM):
        raise InputError("this answers once", hint=f"/v2/models/{served.name}/generate_stream streams")
    before = "" if request.parameters.get(_EXCLUDES, True) else request.text_input
    collected = whole(call, lambda texts: _form(served, request, before + texts[0][0]))
    call.exchange.on_close = served.write([request.text_input], [sampling], collected.on_piece, collected.on_done)


def generate_stream(call: Call) -> None:
    request, served, sampling = _read(call)
    events = Events(call)

    def on_piece(_: int, piece: Piece) -> None:
        # The last may be empty, and says nothing then that the end of the stream does not.
        if piece.text:
            events.send(_form(served, request, piece.text))

    def on_done(outcome: object, measured: Measured | None) -> None:
        if isinstance(outcome, HastenError):
            events.fail(outcome)
        else:
            events.end(measured)

    call.exchange.on_close = served.write([request.text_input], [sampling], on_piece, on_done, is_stream=True)


def _read(call: Call) -> tuple[GenerateRequest, ServedWriter, Sampling]:
    check_version(call.names.get("version", ""))
    served = writing(call.named(call.names["model"]))
    given = call.exchange.read_json(dict[str, Any])
    request = fitted(given, GenerateRequest)
    # tritonserver takes whatever it does not know for an option: its models for TensorRT-LLM are asked so.
    beside = {name: value for name, value in given.items() if name not in GenerateRequest.__struct_fields__}
    request.parameters = beside | request.parameters
    for name in (_STREAM, _EXCLUDES):
        if not isinstance(value := request.parameters.get(name, False), bool):
            raise InputError(f"{name} is {value!r}; it must be true or false")
    asked = {name: value for name, value in request.parameters.items() if name not in (_STREAM, _EXCLUDES)}
    return request, served, sampling_from(served, asked)


def _form(served: ServedWriter, request: GenerateRequest, text: str) -> Generated:
    made = Generated(model_name=served.name, model_version=VERSION, text_output=text)
    return {"id": request.id, **made} if request.id else made


_MODEL = "/v2/models/{model}"
_VERSION = f"{_MODEL}/versions/{{version}}"
ROUTES = (
    Route("POST", f"{_MODEL}/generate", generate, "Text in, text out", GenerateRequest, Generated),
    Route("POST", f"{_VERSION}/generate", generate, "The same: there is one version", GenerateRequest, Generated),
    Route(
        "POST",
        f"{_MODEL}/generate_stream",
        generate_stream,
        "Text as it is written",
        GenerateRequest,
        Generated,
        streams=True,
    ),
    Route(
        "POST",
        f"{_VERSION}/generate_stream",
        generate_stream,
        "The same: there is one version",
        GenerateRequest,
        Generated,
        streams=True,
    ),
)
