"""Serve the API of text-embeddings-inference: `/embed`, `/embed_sparse`, `/rerank` and `/info`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NotRequired, TypedDict
from urllib.parse import parse_qs

import msgspec
import numpy as np

from hasten.core import errors
from hasten.core.errors import HastenError, InputError, TooLargeError, UnsupportedError
from hasten.core.tensors import FloatArray, Outputs
from hasten.core.version import __version__
from hasten.server.http.exchange import ErrorBody, Response, status_of
from hasten.server.models.encoder_model import EncoderModel
from hasten.server.protocols.routes import HttpCall, Route
from hasten.tasks import Encoded
from hasten.tasks.multi_vector_embedding import document_scores
from hasten.tasks.sparse_embedding import keep_largest, to_sparse
from hasten.tasks.text_classification import Scoring, apply_scoring

EMBEDDING, _SPARSE = "sentence-similarity", "sparse-embedding"
_RANKING, _MULTI_VECTOR = "text-ranking", "multi-vector-embedding"


class EmptyError(InputError):
    """The request contains no inputs."""


# Error type and status of text-embeddings-inference for each kind of error; the first match counts.
_KINDS: tuple[tuple[type[HastenError], str, int], ...] = (
    (errors.OverloadedError, "Overloaded", 429),
    (errors.UnavailableError, "Unhealthy", 503),
    (errors.TooLargeError, "Validation", 413),
    (EmptyError, "Empty", 400),
    (errors.InputError, "Tokenizer", 422),
    (errors.UnsupportedError, "Backend", 424),
    (errors.StageError, "Backend", 424),
)
_STATUSES = {422: "invalid request", 424: "the model failed, or does not support this route"}


class EmbedRequest(msgspec.Struct):
    """The body of `POST /embed`."""

    inputs: str | list[str]
    normalize: bool = True
    truncate: bool = False
    prompt_name: str | None = None
    model: str = ""


class SparseRequest(msgspec.Struct):
    """The body of `POST /embed_sparse`."""

    inputs: str | list[str]
    truncate: bool = False
    prompt_name: str | None = None
    model: str = ""


class Term(msgspec.Struct):
    """A term of a sparse embedding: its id in the vocabulary and its weight."""

    index: int
    value: float


class RerankRequest(msgspec.Struct):
    """The body of `POST /rerank`."""

    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool = False
    model: str = ""


class Rank(TypedDict):
    """A document with its relevance."""

    index: int
    score: float
    text: NotRequired[str]


class Info(TypedDict):
    """The response of `GET /info`."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_type: str
    max_input_length: int
    max_client_batch_size: int
    max_batch_tokens: int
    version: str


def embed(call: HttpCall) -> None:
    """Reply with the embeddings of texts."""
    request = call.exchange.read_json(EmbedRequest)
    model = _find_encoder(call, request.model, "support embeddings", EMBEDDING)

    def decode(outputs: Outputs, _: Encoded) -> Response:
        vectors = outputs[model.task.outputs[0]]
        return Response.json(normalize(vectors) if request.normalize else vectors)

    _embed(call, model, request, decode)


def embed_sparse(call: HttpCall) -> None:
    """Reply with the weighted terms of texts."""
    request = call.exchange.read_json(SparseRequest)
    model = _find_encoder(call, request.model, "support sparse embeddings", _SPARSE)

    def decode(outputs: Outputs, _: Encoded) -> Response:
        weights = keep_largest(outputs[model.task.outputs[0]], model.spec.max_active_dims)
        terms = [zip(text["indices"].tolist(), text["values"].tolist(), strict=True) for text in to_sparse(weights)]
        return Response.json([[Term(index, value) for index, value in text] for text in terms])

    _embed(call, model, request, decode)


def rerank(call: HttpCall) -> None:
    """Reply with documents in the order of their relevance to a query; a multi-vector model ranks them by MaxSim."""
    request = call.exchange.read_json(RerankRequest)
    model = _find_encoder(call, request.model, "rank documents", _RANKING, _MULTI_VECTOR)
    if not request.texts:
        raise EmptyError("texts is empty")
    model.check_items(len(request.texts))
    options = model.task.options(model.spec, {})

    def decode(outputs: Outputs, encoded: Encoded) -> Response:
        if model.task.name == _MULTI_VECTOR:
            scores = document_scores(outputs, encoded, model.spec)
        else:
            raw = outputs[model.task.outputs[0]][:, 0].astype(np.float64)
            scores = raw if request.raw_scores else apply_scoring(raw, Scoring.SIGMOID)
        ranks: list[Rank] = []
        for index in np.argsort(-scores, kind="stable").tolist():
            rank = Rank(index=index, score=float(scores[index]))
            ranks.append({**rank, "text": request.texts[index]} if request.return_text else rank)
        return Response.json(ranks)

    item = {"query": request.query, "documents": request.texts}
    check = _length_check(request.truncate, model)
    call.exchange.on_close = model.submit_payload(lambda: item, decode, call.done, options=options, check=check)


def info(call: HttpCall) -> None:
    """Reply with a description of the model and its limits."""
    model = call.encoder(parse_qs(call.exchange.query).get("model", [""])[0])
    manifest = model.bundle.manifest
    description = Info(
        model_id=manifest.model.id,
        model_sha=manifest.model.revision,
        model_dtype=model.variant.precision,
        model_type=manifest.task.name,
        max_input_length=model.signature.max_length,
        max_client_batch_size=model.settings.max_client_batch_size,
        max_batch_tokens=model.limits.tokens_per_batch,
        version=__version__,
    )
    call.exchange.reply(Response.json(description))


class TeiErrorBody(ErrorBody):
    """The JSON body of an error in text-embeddings-inference."""

    error_type: str


def tei_error_body(error: HastenError) -> TeiErrorBody:
    """Return the JSON body of an error in the form of text-embeddings-inference."""
    kind = next((kind for known, kind, _ in _KINDS if isinstance(error, known)), None)
    return {"error": str(error), "error_type": kind or ("Validation" if status_of(error) < 500 else "Backend")}


def tei_status(error: HastenError) -> int:
    """Return the HTTP status that text-embeddings-inference gives an error."""
    return next((status for known, _, status in _KINDS if isinstance(error, known)), status_of(error))


def normalize(vectors: FloatArray) -> FloatArray:
    """Scale vectors to unit length, except zero vectors."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(lengths == 0, 1, lengths)


def _find_encoder(call: HttpCall, name: str, ability: str, *tasks: str) -> EncoderModel:
    """Return the model of that name or, without a name, the only model with the first of these tasks that there is."""
    served = {model.bundle.manifest.task.name for model in call.models}
    if not name and call.models.is_complete and served.isdisjoint(tasks):
        raise UnsupportedError(f"the models of this server do not {ability}")
    model = call.encoder(name, next((task for task in tasks if task in served), tasks[0]))
    if model.task.name not in tasks:
        raise UnsupportedError(f"'{model.name}' does not {ability}: its task is {model.task.name}")
    return model


def _embed(
    call: HttpCall,
    model: EncoderModel,
    request: EmbedRequest | SparseRequest,
    decode: Callable[[Outputs, Encoded], Response],
) -> None:
    """Submit the texts of a request for embeddings."""
    prompt = {} if request.prompt_name is None else {"prompt_name": request.prompt_name}
    options = model.task.options(model.spec, prompt)
    texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs
    if not texts:
        raise EmptyError("inputs is empty")
    model.check_items(len(texts))
    check = _length_check(request.truncate, model)
    call.exchange.on_close = model.submit_payload(lambda: texts, decode, call.done, options=options, check=check)


def _length_check(truncates: bool, model: EncoderModel) -> Callable[[Encoded], None]:
    """Return a check that rejects truncated inputs before anything is computed."""

    def check(encoded: Encoded) -> None:
        if encoded.truncated and not truncates:
            late, limits = model.spec.late_interaction, f"{model.signature.max_length} tokens"
            if late is not None:
                limits = f"{late.query_length} tokens of a query and {late.document_length} of a document"
            raise TooLargeError(f"an input is longer than the model's {limits}", hint='set "truncate": true')

    return check


_route = partial(Route, error_body=tei_error_body, error_status=tei_status, statuses=_STATUSES)
_SERVER = "(text-embeddings-inference)"
ROUTES = (
    _route("POST", "/embed", embed, f"Compute embeddings {_SERVER}", EmbedRequest, list[list[float]]),
    _route(
        "POST",
        "/embed_sparse",
        embed_sparse,
        f"Compute sparse embeddings {_SERVER}",
        SparseRequest,
        list[list[Term]],
    ),
    _route("POST", "/rerank", rerank, f"Rank documents by relevance {_SERVER}", RerankRequest, list[Rank]),
    _route("GET", "/info", info, f"Model and limits {_SERVER}", answer=Info),
)
