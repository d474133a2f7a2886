"""Routes for operators: liveness, readiness, metrics, and the description of the API."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, Protocol, get_type_hints

import msgspec

from hasten.core.version import __version__
from hasten.server.auth import ApiKeys
from hasten.server.http.exchange import BINARY, JSON, TEXT, ErrorBody, Response
from hasten.server.http.stream import EVENTS
from hasten.server.protocols.routes import HttpCall, Route, run_in_pool
from hasten.server.telemetry.metrics import Metrics


class ServerStatus(Protocol):
    """The part of the application that the operators' routes report on."""

    metrics: Metrics
    routes: tuple[Route, ...]
    keys: ApiKeys

    @property
    def readers(self) -> ThreadPoolExecutor:
        """Return the threads for what would block the event loop."""

    def is_alive(self) -> bool:
        """Return whether the process works; otherwise only a restart helps."""

    def can_serve(self) -> bool:
        """Return whether requests should be sent here."""

    def render_metrics(self) -> bytes:
        """Return the metrics of the server in Prometheus text format. May block."""


def routes(server: ServerStatus) -> list[Route]:
    """Return the operators' routes of a server."""

    def live(call: HttpCall) -> None:
        call.exchange.reply(Response.text("", 200 if server.is_alive() else 503))

    def ready(call: HttpCall) -> None:
        call.exchange.reply(Response.text("", 200 if server.can_serve() else 503))

    def metrics(call: HttpCall) -> None:
        # Queries the GPU driver and renders hundreds of lines.
        run_in_pool(server.readers, call, lambda: Response(200, server.render_metrics(), server.metrics.content_type))

    @cache
    def document(needs_key: bool) -> Response:
        return Response.json(openapi(server.routes, needs_key=needs_key))

    def openapi_json(call: HttpCall) -> None:
        # The first request builds it, in 13 to 36 ms.
        run_in_pool(server.readers, call, lambda: document(bool(server.keys)))

    def docs(call: HttpCall) -> None:
        call.exchange.reply(Response(200, docs_page(server.routes).encode(), "text/html; charset=utf-8"))

    probe = partial(Route, "GET", body=None, answer=str, forms=(TEXT,), is_open=True)
    return [
        probe("/v2/health/live", live, "Liveness check"),
        probe("/v2/health/ready", ready, "Readiness check"),
        probe("/health", ready, "Readiness check"),
        Route("GET", "/metrics", metrics, "Prometheus metrics", None, str, (TEXT,)),
        Route("GET", "/openapi.json", openapi_json, "OpenAPI description of this server", answer=dict[str, Any]),
        Route("GET", "/docs", docs, "HTML list of routes", None, str, ("text/html",)),
    ]


_BEARER = "apiKey"
# Error statuses of all routes, of those with a body, and of those that call or change a model.
_ANY_ROUTE = {401: "missing or unknown API key", 404: "no such route or model", 503: "not ready or shutting down"}
_WITH_BODY = {400: "invalid request", 408: "request not received in time", 413: "too large", 429: "overloaded"}
_WITH_MODEL = {500: "internal server error", 501: "not supported on this machine", 504: "deadline exceeded"}


def openapi(routes: tuple[Route, ...], *, needs_key: bool = False) -> dict[str, Any]:
    """Return the OpenAPI document, derived from the routes and the types they read and write."""
    error_types = {route: get_type_hints(route.error_body)["return"] for route in routes}
    body_types = [kind for route in routes for kind in (route.body, route.answer) if kind is not None]
    types = [ErrorBody, *error_types.values(), *body_types]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    # By name, not by identity: two types such as list[float] are different objects.
    by_type = dict(zip(map(str, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        # Errors before the route is known have the plain form.
        errors = {JSON: {"anyOf": [by_type[str(kind)] for kind in dict.fromkeys((error_types[route], ErrorBody))]}}
        answers = {form: by_type[str(route.answer)] if form != BINARY else {} for form in route.forms}
        if route.streams:
            # The schema of one event.
            answers[EVENTS] = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
        operation: dict[str, Any] = {
            "operationId": _operation_id(route),
            "summary": route.summary,
            "responses": {"200": {"description": "success", "content": _content(answers)}},
        }
        for status, description in _error_statuses(route).items():
            forms = {**errors, **({TEXT: {"type": "string"}} if route.is_open else {})}
            operation["responses"][str(status)] = {"description": description, "content": _content(forms)}
        if needs_key and route.is_open:
            operation["security"] = []
        names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
        if names:
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        if route.body is not None:
            bodies = {form: by_type[str(route.body)] if form != BINARY else {} for form in route.forms}
            operation["requestBody"] = {"required": True, "content": _content(bodies)}
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    schemes = {"securitySchemes": {_BEARER: {"type": "http", "scheme": "bearer"}}} if needs_key else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "hasten", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, **schemes},
        **({"security": [{_BEARER: []}]} if needs_key else {}),
    }


def _content(by_form: Mapping[str, Any]) -> dict[str, Any]:
    return {form: {"schema": schema} for form, schema in by_form.items()}


def _error_statuses(route: Route) -> dict[int, str]:
    if route.is_open:
        return {status: _ANY_ROUTE[status] for status in (404, 503)}
    if route.method == "GET":
        return {400: _WITH_BODY[400], **_ANY_ROUTE, **route.statuses}
    return dict(sorted({**_ANY_ROUTE, **_WITH_BODY, **_WITH_MODEL, **route.statuses}.items()))


def _operation_id(route: Route) -> str:
    """Return an id such as post_v2_models_model_infer."""
    return "_".join([route.method.lower(), *re.findall(r"[^/.{}]+", route.path)])


def docs_page(routes: tuple[Route, ...]) -> str:
    """Return an HTML page that lists the routes."""
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
