"""text-embeddings-inference's own paths: `POST /embed`, `POST /rerank`, `GET /info`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NotRequired, TypedDict
from urllib.parse import parse_qs

import msgspec
import numpy as np

from hasten.core.errors import (
    HastenError,
    InputError,
    OverloadedError,
    StageError,
    TooLargeError,
    UnavailableError,
    UnsupportedError,
)
from hasten.core.tensors import Outputs
from hasten.core.version import __version__
from hasten.server.exchange import Failure, Response, status_of
from hasten.server.routes import Call, Route
from hasten.server.served import Served
from hasten.tasks import Encoded
from hasten.tasks.text_classification import Scoring, apply_scoring


class EmptyError(InputError):
    """Nothing was asked for."""


# What went wrong to what text-embeddings-inference calls it, and its status; the first that fits counts.
_KINDS: tuple[tuple[type[HastenError], str, int], ...] = (
    (OverloadedError, "Overloaded", 429),
    (UnavailableError, "Unhealthy", 503),
    (TooLargeError, "Validation", 413),
    (EmptyError, "Empty", 400),
    (InputError, "Tokenizer", 422),
    (UnsupportedError, "Backend", 424),
    (StageError, "Backend", 424),
)
_STATUSES = {422: "not understood", 424: "the model failed, or is of another kind"}


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
    served = _fitting(call, request.model, gives_embeddings, "gives embeddings")
    given = {} if request.prompt_name is None else {"prompt_name": request.prompt_name}
    options = served.task.options(served.spec, given)
    texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs
    if not texts:
        raise EmptyError("inputs is empty")

    def decode(outputs: Outputs, _: Encoded) -> Response:
        vectors = outputs[served.task.outputs[0]]
        if request.normalize:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = vectors / np.where(lengths == 0, 1, lengths)
        return Response.json(vectors)

    check = _length_check(request.truncate, served)
    call.exchange.on_close = served.ask(lambda: texts, decode, call.done, options=options, check=check)


def rerank(call: Call) -> None:
    request = call.exchange.read_json(RerankRequest)
    served = _fitting(call, request.model, is_ranker, "ranks documents")
    if not request.texts:
        raise EmptyError("texts is empty")
    if len(request.texts) > served.settings.items:
        raise TooLargeError(f"{len(request.texts)} texts are more than {served.settings.items}")
    options = served.task.options(served.spec, {})

    def decode(outputs: Outputs, _: Encoded) -> Response:
        raw = outputs[served.task.outputs[0]][:, 0].astype(np.float64)
        scores = raw if request.raw_scores else apply_scoring(raw, Scoring.SIGMOID)
        ranks: list[Rank] = []
        for place in np.argsort(-scores, kind="stable").tolist():
            rank = Rank(index=place, score=float(scores[place]))
            ranks.append({**rank, "text": request.texts[place]} if request.return_text else rank)
        return Response.json(ranks)

    item = {"query": request.query, "documents": request.texts}
    check = _length_check(request.truncate, served)
    call.exchange.on_close = served.ask(lambda: item, decode, call.done, options=options, check=check)


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
    kind = next((kind for known, kind, _ in _KINDS if isinstance(error, known)), None)
    return {"error": str(error), "error_type": kind or ("Validation" if status_of(error) < 500 else "Backend")}


def count(error: HastenError) -> int:
    """The status, as text-embeddings-inference counts."""
    return next((status for known, _, status in _KINDS if isinstance(error, known)), status_of(error))


def gives_embeddings(served: Served) -> bool:
    return served.task.name == "sentence-similarity"


def is_ranker(served: Served) -> bool:
    return served.task.name == "text-ranking"


def _fitting(call: Call, model: str, what: Callable[[Served], bool], does: str) -> Served:
    """The model that is named, or the only one that does it."""
    answering = [one for one in call.models if isinstance(one, Served)]
    if not model and call.models.is_complete and not any(map(what, answering)):
        raise UnsupportedError(f"no model here {does}")
    served = call.only(model, what)
    if not what(served):
        raise UnsupportedError(f"'{served.name}' answers {served.task.name}: it is none that {does}")
    return served


def _length_check(truncates: bool, served: Served) -> Callable[[Encoded], None]:
    """Before anything is computed."""

    def check(encoded: Encoded) -> None:
        if encoded.truncated and not truncates:
            most = served.signature.max_length
            raise TooLargeError(f"an input is longer than the model's {most} tokens", hint='"truncate": true cuts it')

    return check


ROUTES = (
    Route(
        "POST",
        "/embed",
        embed,
        "Embeddings as text-embeddings-inference gives them",
        EmbedRequest,
        list[list[float]],
        tell=tell,
        status=count,
        statuses=_STATUSES,
    ),
    Route(
        "POST",
        "/rerank",
        rerank,
        "Documents in the order of their relevance",
        RerankRequest,
        list[Rank],
        tell=tell,
        status=count,
        statuses=_STATUSES,
    ),
    Route("GET", "/info", info, "What is served here", answer=Info, tell=tell, status=count, statuses=_STATUSES),
)
