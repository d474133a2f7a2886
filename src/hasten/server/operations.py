"""What those who run the server ask it: is it alive, is it ready, how is it doing, what does it offer."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import msgspec

from hasten.core.version import __version__
from hasten.server.exchange import Response
from hasten.server.routes import Call, Route

if TYPE_CHECKING:
    from hasten.server.app import App


def routes(app: App) -> list[Route]:
    def live(call: Call) -> None:
        call.exchange.reply(Response.text("", 200 if app.is_alive() else 503))

    def ready(call: Call) -> None:
        call.exchange.reply(Response.text("", 200 if app.is_ready and app.is_alive() else 503))

    def metrics(call: Call) -> None:
        call.exchange.reply(Response(200, app.metrics.render(), app.metrics.content_type))

    def document(call: Call) -> None:
        call.exchange.reply(Response.json(openapi(app.routes)))

    def docs(call: Call) -> None:
        call.exchange.reply(Response(200, page(app.routes).encode(), "text/html; charset=utf-8"))

    return [
        *(Route("GET", path, live, "Whether it is alive", is_open=True) for path in ("/v2/health/live", "/health")),
        Route("GET", "/v2/health/ready", ready, "Whether it answers", is_open=True),
        Route("GET", "/metrics", metrics, "Numbers for Prometheus"),
        Route("GET", "/openapi.json", document, "All of this, for programs"),
        Route("GET", "/docs", docs, "All of this, for people"),
    ]


def openapi(routes: tuple[Route, ...]) -> dict[str, Any]:
    """The description of the API, from the routes themselves and the types they read."""
    bodies = [route.body for route in routes if route.body is not None]
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    by_body = dict(zip(map(id, bodies), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation: dict[str, Any] = {
            "summary": route.summary,
            "responses": {"200": {"description": "the answer"}, "4XX": {"description": "what was wrong, in `error`"}},
        }
        names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
        if names:
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        if route.body is not None:
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": by_body[id(route.body)]}},
            }
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "hasten", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


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
