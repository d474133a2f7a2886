"""What those who run the server ask it: is it alive, is it ready, how is it doing, what does it offer."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec

from hasten.core.version import __version__
from hasten.server.exchange import BINARY, JSON, TEXT, Failure, Response
from hasten.server.routes import Call, Route, apart
from hasten.server.stream import EVENTS

if TYPE_CHECKING:
    from hasten.server.app import App


def routes(app: App) -> list[Route]:
    def live(call: Call) -> None:
        call.exchange.reply(Response.text("", 200 if app.is_alive() else 503))

    def ready(call: Call) -> None:
        call.exchange.reply(Response.text("", 200 if app.is_ready and app.is_alive() else 503))

    def metrics(call: Call) -> None:
        # Asks the driver of the GPUs, and writes some hundred lines.
        apart(call, lambda: Response(200, app.metrics.render(), app.metrics.content_type))

    def document(call: Call) -> None:
        call.exchange.reply(Response.json(openapi(app.routes)))

    def docs(call: Call) -> None:
        call.exchange.reply(Response(200, page(app.routes).encode(), "text/html; charset=utf-8"))

    return [
        Route("GET", "/v2/health/live", live, "Whether it is alive", None, str, (TEXT,), is_open=True),
        *(
            Route("GET", path, ready, "Whether it answers", None, str, (TEXT,), is_open=True)
            for path in ("/v2/health/ready", "/health")
        ),
        Route("GET", "/metrics", metrics, "Numbers for Prometheus", None, str, (TEXT,)),
        Route("GET", "/openapi.json", document, "All of this, for programs", answer=dict[str, Any]),
        Route("GET", "/docs", docs, "All of this, for people", None, str, ("text/html",)),
    ]


# What may go wrong, and where: everywhere, where there is a body, where a model is asked or changed.
_ANYWHERE = {401: "no key, or an unknown one", 404: "nothing there, or no such model", 503: "not ready, or stopping"}
_WITH_BODY = {400: "not understood", 408: "not whole in time", 413: "too large", 429: "too much at once: later"}
_WITH_MODEL = {500: "the server's own fault", 501: "not on this machine", 504: "not in the time that was given"}


def openapi(routes: tuple[Route, ...]) -> dict[str, Any]:
    """The description of the API, from the routes themselves and the types they read and write."""
    told = {route: get_type_hints(route.tell)["return"] for route in routes}
    asked = [kind for route in routes for kind in (route.body, route.answer) if kind is not None]
    kinds = [Failure, *told.values(), *asked]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    # By what they say, not by which they are: types such as list[float] have no identity.
    by_kind = dict(zip(map(str, kinds), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        # What goes wrong before its route is known is told plainly.
        failures = {JSON: {"anyOf": [by_kind[str(kind)] for kind in dict.fromkeys((told[route], Failure))]}}
        answers = {form: by_kind[str(route.answer)] if form != BINARY else {} for form in route.forms}
        if route.streams:
            # Of each event.
            answers[EVENTS] = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
        operation: dict[str, Any] = {
            "operationId": _name(route),
            "summary": route.summary,
            "responses": {"200": {"description": "the answer", "content": _content(answers)}},
        }
        for status, what in _failures(route).items():
            form = {**failures, **({TEXT: {"type": "string"}} if route.is_open else {})}
            operation["responses"][str(status)] = {"description": what, "content": _content(form)}
        names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
        if names:
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        if route.body is not None:
            bodies = {form: by_kind[str(route.body)] if form != BINARY else {} for form in route.forms}
            operation["requestBody"] = {"required": True, "content": _content(bodies)}
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "hasten", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _content(by_form: Mapping[str, Any]) -> dict[str, Any]:
    return {form: {"schema": schema} for form, schema in by_form.items()}


def _failures(route: Route) -> dict[int, str]:
    if route.is_open:
        return {status: _ANYWHERE[status] for status in (404, 503)}
    if route.method == "GET":
        return {400: _WITH_BODY[400], **_ANYWHERE, **route.statuses}
    return dict(sorted({**_ANYWHERE, **_WITH_BODY, **_WITH_MODEL, **route.statuses}.items()))


def _name(route: Route) -> str:
    """As in post_v2_models_model_infer."""
    words = [word.strip("{}") for word in route.path.replace(".", "/").split("/") if word]
    return "_".join([route.method.lower(), *words])


def page(routes: tuple[Route, ...]) -> str:
    rows = "".join(
        f"<tr><td>{route.method}</td><td><code>{html.escape(route.path)}</code></td>"
        f"<td>{html.escape(route.summary)}</td></tr>"
        for route in routes
    )
    style = "body{font:16px sans-serif;margin:2em}td{padding:.3em 1em .3em 0}"
    return (
        f"<!doctype html><title>hasten</title><style>{style}</style><h1>hasten {__version__}</h1>"
        f'<p><a href="openapi.json">openapi.json</a></p><table>{rows}</table>'
    )
