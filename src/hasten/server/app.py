"""Paths to what answers them. The same application behind our own connections and behind any ASGI server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from hasten.core.errors import HastenError, InputError, PlanError
from hasten.core.tensors import Outputs
from hasten.core.version import __version__
from hasten.server import v2
from hasten.server.engine import Measured
from hasten.server.exchange import Exchange, Response
from hasten.server.served import Served
from hasten.tasks import Encoded

logger = logging.getLogger("hasten")


class PredictRequest(msgspec.Struct):
    inputs: Any
    parameters: dict[str, Any] = {}  # noqa: RUF012


class App:
    def __init__(self, models: Mapping[str, Served]) -> None:
        self.models = dict(models)
        self.is_ready = True

    def __call__(self, exchange: Exchange) -> None:
        try:
            self._route(exchange)
        except HastenError as error:
            exchange.fail(error)
        except Exception:
            logger.exception("%s %s failed", exchange.method, exchange.path)
            exchange.reply(Response.json({"error": "the server failed on this request; its log says why"}, 500))

    def _route(self, exchange: Exchange) -> None:
        parts = exchange.path.strip("/").split("/")
        match (exchange.method, parts):
            case ("POST", ["v2", "models", name, "infer"]) | ("POST", ["v2", "models", name, "versions", _, "infer"]):
                v2.infer(self.model(name), exchange)
            case ("POST", ["predict"]):
                self._predict(self.model(None), exchange)
            case ("GET" | "HEAD", ["v2", "health", "live"]):
                exchange.reply(Response.text(""))
            case ("GET" | "HEAD", ["v2", "health", "ready"]):
                exchange.reply(Response.text("", 200 if self.is_ready else 503))
            case ("GET", ["v2"]):
                exchange.reply(Response.json({"name": "hasten", "version": __version__, "extensions": ["binary_tensor_data"]}))
            case _:
                raise PlanError(f"there is nothing at {exchange.method} {exchange.path}")

    def model(self, name: str | None) -> Served:
        if name is None:
            if len(self.models) != 1:
                raise InputError("there is more than one model", hint=f"name one of {', '.join(self.models)}")
            return next(iter(self.models.values()))
        if name not in self.models:
            raise PlanError(f"there is no model '{name}'", hint=f"there is {', '.join(self.models)}")
        return self.models[name]

    def _predict(self, served: Served, exchange: Exchange) -> None:
        request = exchange.read_json(PredictRequest)
        options = served.task.options(served.spec, request.parameters)

        def decode(outputs: Outputs, encoded: Encoded) -> Response:
            answers = served.task.decode(outputs, encoded, options)
            return Response.json(served.task.present(request.inputs, answers, options))

        exchange.on_close = served.ask(lambda: request.inputs, decode, replier(exchange), options=options)


def replier(exchange: Exchange) -> Callable[[Response | HastenError, Measured | None], None]:
    def done(answer: Response | HastenError, measured: Measured | None) -> None:
        if isinstance(answer, HastenError):
            exchange.fail(answer)
        else:
            exchange.reply(answer)

    return done
