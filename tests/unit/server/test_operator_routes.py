"""Routes for operators cost the event loop next to nothing."""

from __future__ import annotations

import threading

from hasten.server.http.exchange import Exchange, Response
from hasten.server.settings import Settings
from hasten.server.startup import make_app
from support.wait import wait_until


def test_openapi_document_is_encoded_once_off_the_event_loop() -> None:
    app = make_app(Settings(bundles=("unused",)))
    answers: list[Response] = []
    threads: list[str] = []

    def answer(response: Response) -> None:
        answers.append(response)
        threads.append(threading.current_thread().name)

    for _ in range(2):
        app(Exchange("GET", "/openapi.json", "", {}, b"", answer))
    wait_until(lambda: len(answers) == 2)
    assert answers[0].status == 200
    assert answers[0].body is answers[1].body
    assert {thread.name for thread in app.readers.threads} == set(threads)
