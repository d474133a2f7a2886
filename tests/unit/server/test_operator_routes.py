"""Routes for operators cost the event loop next to nothing."""

from __future__ import annotations

from hasten.server.http.exchange import Exchange, Response
from hasten.server.run import make_app
from hasten.server.settings import Settings


def test_openapi_document_is_encoded_once() -> None:
    app = make_app(Settings(bundles=("unused",)))
    answers: list[Response] = []
    for _ in range(2):
        app(Exchange("GET", "/openapi.json", "", {}, b"", answers.append))
    assert answers[0].status == 200
    assert answers[0].body is answers[1].body
