"""text-embeddings-inference's own paths: `POST /embed`, `POST /rerank`, `GET /info`."""

from __future__ import annotations

from typing import NotRequired, TypedDict
from urllib.parse import parse_qs

import msgspec
import numpy as np

from hasten.core.errors import HastenError, InputError, OverloadedError, UnavailableError
from hasten.core.tensors import Outputs
from hasten.core.version import __version__
from hasten.server.exchange import Failure, Response, status_of
from hasten.server.routes import Call, Route
from hasten.server.served import Served
from hasten.tasks import Encoded
from hasten.tasks.text_classification import Scoring, apply_scoring


class EmbedRequest(msgspec.Struct):
    inputs: str | list[str]
    normalize: bool = True
    truncate: bool = False
    prompt_name: str | None = None
    model: str = ""


class RerankRequest(msgspec.Struct):
    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool = False
    model: str = ""


class Rank(TypedDict):
    index: int
    score: float
    text: NotRequired[str]


class Info(TypedDict):
    model_id: str
    model_sha: str | None
    model_dtype: str
    model_type: str
    max_input_length: int
    max_client_batch_size: int
    max_batch_tokens: int
    version: str


def embed(call: Call) -> None:
    request = call.exchange.read_json(EmbedRequest)
    served = call.only(request.model, gives_embeddings)
    if not gives_embeddings(served):
        raise InputError(f"'{served.name}' answers {served.task.name}, and gives no embeddings")
    given = {} if request.prompt_name is None else {"prompt_name": request.prompt_name}
    options = served.task.options(served.spec, given)
    texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs

    def decode(outputs: Outputs, encoded: Encoded) -> Response:
        _refuse_long(encoded, request.truncate, served)
        vectors = outputs[served.task.outputs[0]]
        if request.normalize:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = vectors / np.where(lengths == 0, 1, lengths)
        return Response.json(vectors)

    call.exchange.on_close = served.ask(lambda: texts, decode, call.done, options=options)


def rerank(call: Call) -> None:
    request = call.exchange.read_json(RerankRequest)
    served = call.only(request.model, is_ranker)
    if not is_ranker(served):
        raise InputError(f"'{served.name}' answers {served.task.name}, and ranks nothing")
    if not request.texts:
        raise InputError("texts is empty")
    options = served.task.options(served.spec, {})

    def decode(outputs: Outputs, encoded: Encoded) -> Response:
        _refuse_long(encoded, request.truncate, served)
        raw = outputs[served.task.outputs[0]][:, 0].astype(np.float64)
        scores = raw if request.raw_scores else apply_scoring(raw, Scoring.SIGMOID)
        ranks: list[Rank] = []
        for place in np.argsort(-scores, kind="stable").tolist():
            rank = Rank(index=place, score=float(scores[place]))
            ranks.append({**rank, "text": request.texts[place]} if request.return_text else rank)
        return Response.json(ranks)

    item = {"query": request.query, "documents": request.texts}
    call.exchange.on_close = served.ask(lambda: item, decode, call.done, options=options)


def info(call: Call) -> None:
    served = call.only(parse_qs(call.exchange.query).get("model", [""])[0])
    about = served.bundle.manifest
    call.exchange.reply(
        Response.json(
            Info(
                model_id=about.model.id,
                model_sha=about.model.revision,
                model_dtype=served.variant.precision,
                model_type=about.task.name,
                max_input_length=served.signature.max_length,
                max_client_batch_size=served.settings.items,
                max_batch_tokens=served.limits.tokens_per_batch,
                version=__version__,
            )
        )
    )


class TeiFailure(Failure):
    error_type: str


def tell(error: HastenError) -> TeiFailure:
    """What was wrong, as text-embeddings-inference writes it."""
    if isinstance(error, OverloadedError):
        kind = "Overloaded"
    elif isinstance(error, UnavailableError):
        kind = "Unhealthy"
    else:
        kind = "Validation" if status_of(error) < 500 else "Backend"
    return {"error": str(error), "error_type": kind}


def gives_embeddings(served: Served) -> bool:
    return served.task.name == "sentence-similarity"


def is_ranker(served: Served) -> bool:
    return served.task.name == "text-ranking"


def _refuse_long(encoded: Encoded, truncates: bool, served: Served) -> None:
    if encoded.truncated and not truncates:
        raise InputError(
            f"an input is longer than the model's {served.signature.max_length} tokens", hint='"truncate": true cuts it'
        )


ROUTES = (
    Route(
        "POST",
        "/embed",
        embed,
        "Embeddings as text-embeddings-inference gives them",
        EmbedRequest,
        list[list[float]],
        tell=tell,
    ),
    Route("POST", "/rerank", rerank, "Documents in the order of their relevance", RerankRequest, list[Rank], tell=tell),
    Route("GET", "/info", info, "What is served here", answer=Info, tell=tell),
)
