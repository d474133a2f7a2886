"""Map paths to handlers. A protocol is a module that lists its routes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import msgspec

from hasten.core.errors import HastenError, InputError, PlanError, StageError
from hasten.server.http.exchange import JSON, Exchange, Response, plain_error_body, status_of
from hasten.server.models.control import ModelControl
from hasten.server.models.encoder_model import EncoderModel
from hasten.server.models.generative_model import GenerativeModel
from hasten.server.models.registry import Model, ModelRegistry
from hasten.server.request_records import RequestStats

logger = logging.getLogger("hasten")

_CACHED_PATHS = 256


def require_encoder(model: Model) -> EncoderModel:
    """Return the model if it is an encoder, or raise with the routes that serve it."""
    if isinstance(model, EncoderModel):
        return model
    paths = f"/v1/completions, /v1/chat/completions, /v2/models/{model.name}/generate or /predict"
    raise InputError(f"'{model.name}' is a text generation model: this route does not support it", hint=f"use {paths}")


def require_generative(model: Model) -> GenerativeModel:
    """Return the model if it generates text, or raise."""
    if isinstance(model, GenerativeModel):
        return model
    task = model.bundle.manifest.task.name
    raise InputError(f"'{model.name}' does not generate text: its task is {task}", hint="use /predict")


class HttpCall(msgspec.Struct, frozen=True):
    """A request at a route, with the names in its path, the models of the server, and who may change them."""

    exchange: Exchange
    models: ModelRegistry
    names: Mapping[str, str]
    control: ModelControl

    def model_named(self, name: str) -> Model:
        """Return the model of that name."""
        return self._recorded(self.models.named(name))

    def any_model(self, name: str = "") -> Model:
        """Return the model of that name or, without a name, the only model."""
        return self._recorded(self.models.only(name))

    def encoder(self, name: str = "", task: str = "") -> EncoderModel:
        """Return the encoder of that name or, without a name, the only encoder, or the only one with this task."""
        model = self.models.only(name, lambda model: isinstance(model, EncoderModel) and task in ("", model.task.name))
        return require_encoder(self._recorded(model))

    def generative_model(self, name: str = "") -> GenerativeModel:
        """Return the text generation model of that name or, without a name, the only one."""
        model = self.models.only(name, lambda model: isinstance(model, GenerativeModel))
        return require_generative(self._recorded(model))

    def _recorded(self, model: Model) -> Model:
        self.exchange.model = model.name
        return model

    def done(self, answer: Response | HastenError, stats: RequestStats | None) -> None:
        """Reply with the result. Called by the engine, on one of its threads."""
        self.exchange.stats = stats
        if isinstance(answer, HastenError):
            self.exchange.fail(answer)
        else:
            self.exchange.reply(answer)


def run_in_pool(pool: Executor, call: HttpCall, answer: Callable[[], Response]) -> None:
    """Reply with the response from a thread of the pool: it would block the event loop."""

    def run() -> None:
        try:
            response = answer()
        except HastenError as error:
            call.exchange.fail(error)
        except Exception:
            logger.exception("%s failed.", call.exchange.path)
            call.exchange.fail(StageError("internal server error: see the server's log"))
        else:
            call.exchange.reply(response)

    # A client that disconnects withdraws a request that has not begun.
    call.exchange.on_close = pool.submit(run).cancel


@dataclass(frozen=True, slots=True)
class Route:
    """A method and path, their handler, and their description for the API document."""

    method: str
    # Such as /v2/models/{model}/infer.
    path: str
    handle: Callable[[HttpCall], None]
    summary: str
    # Type of the request body; None if the route takes none.
    body: Any = None
    # Type of the response body, and the content types in which it is available.
    answer: Any = Any
    forms: tuple[str, ...] = (JSON,)
    # Whether no API key is needed, as for health checks.
    is_open: bool = False
    # Body and status of an error in this protocol.
    error_body: Callable[[HastenError], Mapping[str, object]] = plain_error_body
    error_status: Callable[[HastenError], int] = status_of
    # Error statuses of this route in addition to those that all routes have.
    statuses: Mapping[int, str] = field(default_factory=dict, hash=False)
    # Whether it may respond with server-sent events.
    streams: bool = False


def with_version(route: Route) -> tuple[Route, Route]:
    """Return a route of a model, and the same route with the version of the model in its path."""
    path = route.path.replace("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
    return route, replace(route, path=path, summary=f"{route.summary} (with a version)")


class Router:
    """Finds the route of a request. Thread-safe."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        # Most requests are for the same few paths.
        self.find = lru_cache(_CACHED_PATHS)(self._find)
        self._fixed: dict[tuple[str, str], Route] = {}
        self._patterns: dict[tuple[str, int], list[tuple[list[str], Route]]] = {}
        for route in self.routes:
            parts = route.path.strip("/").split("/")
            if "{" in route.path:
                self._patterns.setdefault((route.method, len(parts)), []).append((parts, route))
            else:
                self._fixed[route.method, route.path] = route

    def _find(self, method: str, path: str) -> tuple[Route, Mapping[str, str]]:
        method = "GET" if method == "HEAD" else method
        path = path.rstrip("/") or "/"
        match = self._match(method, path)
        if match is None:
            methods = sorted({route.method for route in self.routes})
            allowed = tuple(other for other in methods if self._match(other, path) is not None)
            raise NotFoundError(f"no route for {method} {path}", allowed=allowed)
        return match

    def _match(self, method: str, path: str) -> tuple[Route, dict[str, str]] | None:
        fixed = self._fixed.get((method, path))
        if fixed is not None:
            return fixed, {}
        parts = path.strip("/").split("/")
        for pattern, route in self._patterns.get((method, len(parts)), ()):
            pairs = list(zip(pattern, parts, strict=True))
            if all(name.startswith("{") or name == part for name, part in pairs):
                return route, {name[1:-1]: unquote(part) for name, part in pairs if name.startswith("{")}
        return None


class NotFoundError(PlanError):
    """No route matches; carries the methods that the path does support."""

    def __init__(self, message: str, *, allowed: tuple[str, ...]) -> None:
        hint = f"supported: {' and '.join(allowed)}" if allowed else "GET /docs lists all routes"
        super().__init__(message, hint=hint)
        self.allowed = allowed

    def response(self) -> Response:
        """Return 405 with the supported methods, or 404 if there are none."""
        status, headers = (405, {"allow": ", ".join(self.allowed)}) if self.allowed else (404, {})
        return Response(status, msgspec.json.encode({"error": str(self)}), headers=headers)
