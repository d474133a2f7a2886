"""Paths to what answers them. A protocol is a file that lists its routes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import msgspec

from hasten.core.errors import HastenError, InputError, PlanError, StageError
from hasten.server.engine import Measured
from hasten.server.exchange import JSON, Exchange, Response, status_of, tell_plainly
from hasten.server.models import Model, Models
from hasten.server.served import Served
from hasten.server.served_writer import ServedWriter

logger = logging.getLogger("hasten")

_REMEMBERED = 256


def answering(model: Model) -> Served:
    if isinstance(model, Served):
        return model
    hint = "/v1/completions, /v1/chat/completions, /v2/models/{model}/generate and /predict ask it to write"
    raise InputError(f"'{model.name}' writes text, and answers nothing else", hint=hint.replace("{model}", model.name))


def writing(model: Model) -> ServedWriter:
    if isinstance(model, ServedWriter):
        return model
    task = model.bundle.manifest.task.name
    raise InputError(f"'{model.name}' answers {task}, and does not write text", hint="/predict asks it")


class Call(msgspec.Struct, frozen=True):
    """A request at a route: the names in its path, and what the server has."""

    exchange: Exchange
    models: Models
    names: Mapping[str, str]

    def named(self, name: str) -> Model:
        return self._asked(self.models.named(name))

    def any(self, name: str = "") -> Model:
        """The model of that name, or the only one there is."""
        return self._asked(self.models.only(name))

    def only(self, name: str = "", what: Callable[[Served], bool] = lambda _: True) -> Served:
        """One that answers."""
        model = self.models.only(name, lambda one: isinstance(one, Served) and what(one))
        return answering(self._asked(model))

    def writer(self, name: str = "") -> ServedWriter:
        model = self.models.only(name, lambda one: isinstance(one, ServedWriter))
        return writing(self._asked(model))

    def _asked(self, model: Model) -> Model:
        self.exchange.model = model.name
        return model

    def done(self, answer: Response | HastenError, measured: Measured | None) -> None:
        """What the engine calls, from a thread of its own."""
        self.exchange.measured = measured
        if isinstance(answer, HastenError):
            self.exchange.fail(answer)
        else:
            self.exchange.reply(answer)


def apart(call: Call, answer: Callable[[], Response]) -> None:
    """What would hold up the event loop happens on a thread of its own, and is answered when it is done."""

    def run() -> None:
        try:
            response = answer()
        except HastenError as error:
            call.exchange.fail(error)
        except Exception:
            logger.exception("%s failed", call.exchange.path)
            call.exchange.fail(StageError("it failed; the server's log says why"))
        else:
            call.exchange.reply(response)

    threading.Thread(target=run, daemon=True).start()


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    # As in /v2/models/{model}/infer.
    path: str
    handle: Callable[[Call], None]
    summary: str
    # What its body is, for the API's description; None where it has none.
    body: Any = None
    # What it answers, in one of these forms.
    answer: Any = Any
    forms: tuple[str, ...] = (JSON,)
    # Health and the like are answered to anyone.
    is_open: bool = False
    tell: Callable[[HastenError], Mapping[str, object]] = tell_plainly
    status: Callable[[HastenError], int] = status_of
    # What it may be answered with beside what all are.
    statuses: Mapping[int, str] = field(default_factory=dict, hash=False)
    # Whether it may answer in server-sent events.
    streams: bool = False


class Router:
    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        # Most ask at the same few paths.
        self.find = lru_cache(_REMEMBERED)(self._find)
        self._fixed: dict[tuple[str, str], Route] = {}
        self._open: dict[tuple[str, int], list[tuple[list[str], Route]]] = {}
        for route in self.routes:
            parts = route.path.strip("/").split("/")
            if "{" in route.path:
                self._open.setdefault((route.method, len(parts)), []).append((parts, route))
            else:
                self._fixed[route.method, route.path] = route

    def _find(self, method: str, path: str) -> tuple[Route, Mapping[str, str]]:
        method = "GET" if method == "HEAD" else method
        path = path.rstrip("/") or "/"
        found = self._at(method, path)
        if found is None:
            methods = sorted({route.method for route in self.routes})
            allowed = tuple(other for other in methods if self._at(other, path) is not None)
            raise NotFoundError(f"there is nothing at {method} {path}", allowed=allowed)
        return found

    def _at(self, method: str, path: str) -> tuple[Route, dict[str, str]] | None:
        fixed = self._fixed.get((method, path))
        if fixed is not None:
            return fixed, {}
        parts = path.strip("/").split("/")
        for pattern, route in self._open.get((method, len(parts)), ()):
            names = _match(pattern, parts)
            if names is not None:
                return route, names
        return None


def _match(pattern: Sequence[str], parts: Sequence[str]) -> dict[str, str] | None:
    """The names in a path, of as many parts as the pattern has; None where it is another."""
    names: dict[str, str] = {}
    for wanted, given in zip(pattern, parts, strict=True):
        if wanted.startswith("{"):
            names[wanted[1:-1]] = unquote(given) if "%" in given else given
        elif wanted != given:
            return None
    return names


class NotFoundError(PlanError):
    """Carries the methods that the path does have."""

    def __init__(self, message: str, *, allowed: tuple[str, ...]) -> None:
        super().__init__(message, hint=f"it takes {' and '.join(allowed)}" if allowed else "GET /docs lists all")
        self.allowed = allowed

    def response(self) -> Response:
        if not self.allowed:
            return Response.json({"error": str(self)}, 404)
        return Response(405, Response.json({"error": str(self)}).body, headers={"allow": ", ".join(self.allowed)})
