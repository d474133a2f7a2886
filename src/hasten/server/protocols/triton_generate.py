"""Serve tritonserver's generate extension of the v2 protocol: `text_input` to `text_output`, complete or streamed."""

from __future__ import annotations

from functools import partial
from typing import Any, NotRequired, TypedDict

import msgspec

from hasten.core.errors import HastenError, InputError
from hasten.core.generation_types import SamplingParams
from hasten.generation.sequences import TextDelta
from hasten.server.http.exchange import read_json
from hasten.server.models.generative_model import CompletedTexts, GenerativeModel
from hasten.server.protocols.oip import VERSION, check_version
from hasten.server.protocols.oip_generation import EXCLUDES, STREAM, sampling_from
from hasten.server.protocols.routes import HttpCall, Route, require_generative, with_version
from hasten.server.protocols.sse import EventStream, reply_with_texts
from hasten.server.request_records import RequestStats


class GenerateRequest(msgspec.Struct):
    """The body of both routes."""

    text_input: str
    id: str = ""
    # Sampling parameters such as max_tokens, temperature, top_k, top_p, stop and seed; also accepted beside the text.
    parameters: dict[str, Any] = {}


class GenerateResponse(TypedDict):
    """The response, or one event of it."""

    id: NotRequired[str]
    model_name: str
    model_version: str
    text_output: str


def generate(call: HttpCall) -> None:
    """Reply with the complete text."""
    request, model, sampling = _read(call)
    if request.parameters.get(STREAM):
        raise InputError("this route does not stream", hint=f"use /v2/models/{model.name}/generate_stream")
    prefix = "" if request.parameters.get(EXCLUDES, True) else request.text_input

    def present(texts: CompletedTexts) -> GenerateResponse:
        return _response(model, request, prefix + texts[0][0])

    reply_with_texts(call, model, [request.text_input], [sampling], present)


def generate_stream(call: HttpCall) -> None:
    """Reply with the text as server-sent events while it is generated."""
    request, model, sampling = _read(call)
    events = EventStream(call)

    def on_text_delta(_: int, delta: TextDelta) -> None:
        # The last delta may be empty; it then says no more than the end of the stream.
        if delta.text:
            events.send(_response(model, request, delta.text))

    def on_done(outcome: object, stats: RequestStats | None) -> None:
        if isinstance(outcome, HastenError):
            events.fail(outcome)
        else:
            events.end(stats)

    call.exchange.on_close = model.submit([request.text_input], [sampling], on_text_delta, on_done)


def _read(call: HttpCall) -> tuple[GenerateRequest, GenerativeModel, SamplingParams]:
    check_version(call.names.get("version", ""))
    model = require_generative(call.model_named(call.names["model"]))
    body = call.exchange.content()
    request, fields = read_json(body, GenerateRequest), read_json(body, dict[str, Any])
    # tritonserver treats unknown fields as parameters; clients of its TensorRT-LLM models rely on that.
    top_level = {name: value for name, value in fields.items() if name not in GenerateRequest.__struct_fields__}
    request.parameters = top_level | request.parameters
    for name in (STREAM, EXCLUDES):
        if not isinstance(value := request.parameters.get(name, False), bool):
            raise InputError(f"{name} is {value!r}: it must be true or false")
    options = {name: value for name, value in request.parameters.items() if name not in (STREAM, EXCLUDES)}
    return request, model, sampling_from(model, options)


def _response(model: GenerativeModel, request: GenerateRequest, text: str) -> GenerateResponse:
    response = GenerateResponse(model_name=model.name, model_version=VERSION, text_output=text)
    return {"id": request.id, **response} if request.id else response


_MODEL = "/v2/models/{model}"
_EVENTS = "Generate text as server-sent events (tritonserver)"
_route = partial(Route, body=GenerateRequest, answer=GenerateResponse)
ROUTES = (
    *with_version(_route("POST", f"{_MODEL}/generate", generate, "Generate text (tritonserver)")),
    *with_version(_route("POST", f"{_MODEL}/generate_stream", generate_stream, _EVENTS, streams=True)),
)
