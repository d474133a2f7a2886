"""Serve OpenAI's embeddings and model list: `POST /v1/embeddings`, `GET /v1/models`, `GET /v1/models/{model}`."""

from __future__ import annotations

import base64
from functools import partial
from typing import Any, Literal, TypedDict

import msgspec
import numpy as np

from hasten.core.errors import HastenError, InputError, OverloadedError, PlanError, UnauthorizedError
from hasten.core.tensors import FloatArray, Outputs
from hasten.server.http.exchange import Response, status_of
from hasten.server.models.registry import Model
from hasten.server.protocols.routes import HttpCall, Route
from hasten.server.protocols.tei import EMBEDDING, normalize
from hasten.tasks import Encoded

# Error codes, which OpenAI's client shows beside the message; the first match counts.
_CODES: tuple[tuple[type[HastenError], str | None], ...] = (
    (UnauthorizedError, "invalid_api_key"),
    (OverloadedError, "rate_limit_exceeded"),
    (PlanError, "model_not_found"),
    (HastenError, None),
)


class EmbeddingRequest(msgspec.Struct):
    """The body of `POST /v1/embeddings`."""

    input: str | list[str]
    model: str = ""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None


class Embedding(TypedDict):
    """The embedding of one text."""

    object: Literal["embedding"]
    index: int
    # In base64: little-endian float32.
    embedding: list[float] | str


class Usage(TypedDict):
    """Token counts of an embedding request."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    """The response of `POST /v1/embeddings`."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class ModelEntry(TypedDict):
    """A model as OpenAI lists it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(TypedDict):
    """The response of `GET /v1/models`."""

    object: Literal["list"]
    data: list[ModelEntry]


def embeddings(call: HttpCall) -> None:
    """Reply with the embeddings of texts."""
    request = call.exchange.read_json(EmbeddingRequest)
    encoder = call.encoder(request.model, EMBEDDING)
    if encoder.task.name != EMBEDDING:
        raise InputError(f"'{encoder.name}' does not support embeddings: its task is {encoder.task.name}")
    if request.dimensions is not None and request.dimensions < 1:
        raise InputError("dimensions must be at least 1")
    texts = [request.input] if isinstance(request.input, str) else request.input
    if not texts:
        raise InputError("input is empty")
    encoder.check_items(len(texts))

    def decode(outputs: Outputs, encoded: Encoded) -> Response:
        vectors = _shorten(outputs[encoder.task.outputs[0]], request.dimensions)
        data = [
            Embedding(object="embedding", index=index, embedding=_encode(vector, request.encoding_format))
            for index, vector in enumerate(vectors)
        ]
        tokens = encoded.batch.tokens
        usage = Usage(prompt_tokens=tokens, total_tokens=tokens)
        return Response.json(Embeddings(object="list", data=data, model=encoder.name, usage=usage))

    call.exchange.on_close = encoder.submit_payload(lambda: texts, decode, call.done)


def models(call: HttpCall) -> None:
    """Reply with all models."""
    call.exchange.reply(Response.json(ModelList(object="list", data=[_entry(model) for model in call.models])))


def model(call: HttpCall) -> None:
    """Reply with one model."""
    call.exchange.reply(Response.json(_entry(call.model_named(call.names["model"]))))


def _entry(model: Model) -> ModelEntry:
    return ModelEntry(id=model.name, object="model", created=int(model.since), owned_by="hasten")


class OpenAIError(TypedDict):
    """An error as OpenAI describes it."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorBody(TypedDict):
    """The JSON body of an error in OpenAI's API."""

    error: OpenAIError


def openai_error_body(error: HastenError) -> OpenAIErrorBody:
    """Return the JSON body of an error in the form of OpenAI's API."""
    code = next(code for kind, code in _CODES if isinstance(error, kind))
    kind = "invalid_request_error" if status_of(error) < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": code}}


def _shorten(vectors: FloatArray, dimensions: int | None) -> FloatArray:
    """Return the first dimensions, normalized again, as models with Matryoshka training allow."""
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    if dimensions > vectors.shape[1]:
        raise InputError(f"dimensions is {dimensions}, but the model's embeddings have {vectors.shape[1]}")
    return normalize(vectors[:, :dimensions])


def _encode(vector: FloatArray, form: str) -> Any:
    """Return the vector itself, which is written as JSON without a list, or its bytes in base64."""
    return vector if form == "float" else base64.b64encode(np.ascontiguousarray(vector, "<f4").data).decode()


_route = partial(Route, error_body=openai_error_body)
ROUTES = (
    _route("POST", "/v1/embeddings", embeddings, "Compute embeddings (OpenAI)", EmbeddingRequest, Embeddings),
    _route("GET", "/v1/models", models, "List models (OpenAI)", answer=ModelList),
    _route("GET", "/v1/models/{model}", model, "Describe a model (OpenAI)", answer=ModelEntry),
)
