"""OpenAI's embeddings, as its own client asks for them: `POST /v1/embeddings`, `GET /v1/models`, and one of them."""

from __future__ import annotations

import base64
from typing import Literal, TypedDict

import msgspec
import numpy as np

from hasten.core.errors import HastenError, InputError, OverloadedError, PlanError, UnauthorizedError
from hasten.core.tensors import FloatArray, Outputs
from hasten.server.exchange import Response, status_of
from hasten.server.models import Model
from hasten.server.routes import Call, Route
from hasten.server.tei import gives_embeddings
from hasten.tasks import Encoded

# What OpenAI's client shows beside the message; the first that fits counts.
_CODES: tuple[tuple[type[HastenError], str | None], ...] = (
    (UnauthorizedError, "invalid_api_key"),
    (OverloadedError, "rate_limit_exceeded"),
    (PlanError, "model_not_found"),
    (HastenError, None),
)


class EmbeddingRequest(msgspec.Struct):
    input: str | list[str]
    model: str = ""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    # In base64: the numbers as little-endian floats of 32 bits.
    embedding: list[float] | str


class Usage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class ModelEntry(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelEntry]


def embeddings(call: Call) -> None:
    request = call.exchange.read_json(EmbeddingRequest)
    served = call.only(request.model, gives_embeddings)
    if not gives_embeddings(served):
        raise InputError(f"'{served.name}' answers {served.task.name}, and gives no embeddings")
    if request.dimensions is not None and request.dimensions < 1:
        raise InputError("dimensions must be at least 1")
    texts = [request.input] if isinstance(request.input, str) else request.input
    if not texts:
        raise InputError("input is empty")

    def decode(outputs: Outputs, encoded: Encoded) -> Response:
        vectors = _shortened(outputs[served.task.outputs[0]], request.dimensions)
        data = [
            Embedding(object="embedding", index=place, embedding=_written(vector, request.encoding_format))
            for place, vector in enumerate(vectors)
        ]
        tokens = encoded.batch.tokens
        usage = Usage(prompt_tokens=tokens, total_tokens=tokens)
        return Response.json(Embeddings(object="list", data=data, model=served.name, usage=usage))

    call.exchange.on_close = served.ask(lambda: texts, decode, call.done)


def models(call: Call) -> None:
    call.exchange.reply(Response.json(ModelList(object="list", data=[_entry(served) for served in call.models])))


def model(call: Call) -> None:
    call.exchange.reply(Response.json(_entry(call.named(call.names["model"]))))


def _entry(served: Model) -> ModelEntry:
    return ModelEntry(id=served.name, object="model", created=int(served.since), owned_by="hasten")


class Wrong(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIFailure(TypedDict):
    error: Wrong


def tell(error: HastenError) -> OpenAIFailure:
    """What was wrong, as OpenAI writes it."""
    code = next(code for kind, code in _CODES if isinstance(error, kind))
    kind = "invalid_request_error" if status_of(error) < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": code}}


def _shortened(vectors: FloatArray, dimensions: int | None) -> FloatArray:
    """The first so many numbers, of length one again: what models trained for it (Matryoshka) allow."""
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    if dimensions > vectors.shape[1]:
        raise InputError(f"dimensions is {dimensions}, and the model gives {vectors.shape[1]}")
    short = vectors[:, :dimensions]
    lengths = np.linalg.norm(short, axis=1, keepdims=True)
    return short / np.where(lengths == 0, 1, lengths)


def _written(vector: FloatArray, form: str) -> list[float] | str:
    if form == "float":
        return list(vector.tolist())
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


ROUTES = (
    Route(
        "POST", "/v1/embeddings", embeddings, "Embeddings as OpenAI gives them", EmbeddingRequest, Embeddings, tell=tell
    ),
    Route("GET", "/v1/models", models, "The models served here", answer=ModelList, tell=tell),
    Route("GET", "/v1/models/{model}", model, "One of them", answer=ModelEntry, tell=tell),
)
