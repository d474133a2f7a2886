"""Serve vLLM's scores of pairs of texts: `POST /score` and `POST /v1/score`."""

from __future__ import annotations

import time
from functools import partial
from typing import Literal, TypedDict
from uuid import uuid4

import msgspec

from hasten.core.errors import InputError
from hasten.core.tensors import Outputs
from hasten.server.http.exchange import Response
from hasten.server.protocols.openai_embeddings import Usage, openai_error_body
from hasten.server.protocols.routes import HttpCall, Route
from hasten.tasks import Encoded
from hasten.tasks.multi_vector_embedding import document_scores

_MULTI_VECTOR = "multi-vector-embedding"
# Tasks that answer a pair of texts with a number.
_TASKS = ("text-ranking", _MULTI_VECTOR, "sentence-similarity", "sparse-embedding")


class ScoreRequest(msgspec.Struct):
    """The body of `POST /score`: one text and several, or as many on each side."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str = ""


class Score(TypedDict):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class Scores(TypedDict):
    """The response of `POST /score`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: Usage


def score(call: HttpCall) -> None:
    """Reply with the scores of pairs: of a cross-encoder, MaxSim, or the similarity of two embeddings."""
    request = call.exchange.read_json(ScoreRequest)
    model = call.encoder(request.model)
    if model.task.name not in _TASKS or len(model.spec.labels) > 1:
        raise InputError(f"'{model.name}' does not score pairs of texts: its task is {model.task.name}")
    first, second = ([texts] if isinstance(texts, str) else texts for texts in (request.text_1, request.text_2))
    if not second or len(first) not in (1, len(second)):
        raise InputError(
            f"text_1 has {len(first)} texts and text_2 {len(second)}: pass one and several, or equally many"
        )
    model.check_items(len(second))
    is_multi_vector = model.task.name == _MULTI_VECTOR
    pairs = zip(first * len(second) if len(first) == 1 else first, second, strict=True)
    payload: object = [{"text": text, "text_pair": other} for text, other in pairs]
    if is_multi_vector and len(first) == 1:
        payload = {"query": first[0], "documents": second}  # the vectors of the query are computed once

    def decode(outputs: Outputs, encoded: Encoded) -> Response:
        if is_multi_vector:
            scores = document_scores(outputs, encoded, model.spec).tolist()
        else:
            scores = model.task.decode(outputs, encoded, model.default_options)
        data = [Score(index=index, object="score", score=float(value)) for index, value in enumerate(scores)]
        usage = Usage(prompt_tokens=encoded.batch.tokens, total_tokens=encoded.batch.tokens)
        answer = Scores(
            id=f"score-{uuid4().hex}",
            object="list",
            created=int(time.time()),
            model=model.name,
            data=data,
            usage=usage,
        )
        return Response.json(answer)

    call.exchange.on_close = model.submit_payload(lambda: payload, decode, call.done)


_route = partial(Route, "POST", handle=score, body=ScoreRequest, answer=Scores, error_body=openai_error_body)
ROUTES = (
    _route(path="/score", summary="Score pairs of texts (vLLM)"),
    _route(path="/v1/score", summary="Score pairs of texts (vLLM, the same)"),
)
