"""The application: route requests, authenticate them and answer each one, whatever fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from hasten.core.errors import HastenError, StageError, TooLargeError
from hasten.server import health
from hasten.server.auth import ApiKeys
from hasten.server.http.exchange import Exchange, Response, error_response
from hasten.server.models.control import ModelControl
from hasten.server.models.registry import ModelRegistry, fault_of
from hasten.server.protocols import (
    huggingface,
    oip_http,
    openai_completions,
    openai_embeddings,
    tei,
    triton_generate,
    vllm_score,
)
from hasten.server.protocols.routes import HttpCall, NotFoundError, Route, Router
from hasten.server.request_records import RequestListener, RequestRecord
from hasten.server.scheduling.engine_lifecycle import RetiredError, ThreadPool
from hasten.server.telemetry.metrics import Metrics

logger = logging.getLogger("hasten")

Argument = TypeVar("Argument")
Result = TypeVar("Result")

PROTOCOLS: tuple[Sequence[Route], ...] = (
    oip_http.ROUTES,
    triton_generate.ROUTES,
    huggingface.ROUTES,
    openai_embeddings.ROUTES,
    openai_completions.ROUTES,
    tei.ROUTES,
    vllm_score.ROUTES,
)

# Parsing a larger body on the event loop would delay other requests noticeably.
LARGE_BYTES = 2**16


class App:
    """The application that servers call with each exchange, on the event loop; it never blocks."""

    def __init__(
        self,
        models: ModelRegistry,
        metrics: Metrics,
        keys: ApiKeys,
        listeners: Sequence[RequestListener] = (),
        *,
        model_control: bool = False,
        stall_timeout_s: float = 60.0,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.models = models
        self.metrics = metrics
        self.keys = keys
        self.control = ModelControl(models, is_enabled=model_control)
        # Whether all models are loaded and the server is not shutting down.
        self.is_ready = False
        self._listeners = (metrics.on_request, *listeners)
        self._stall_timeout_s = stall_timeout_s
        self._on_close = on_close
        # One thread: decoding holds the interpreter lock, so a second would only delay the event loop.
        self.readers = ThreadPool(1, "read")
        self._failed_task: str | None = None
        self._router = Router([route for routes in PROTOCOLS for route in routes] + health.routes(self))
        self.routes = self._router.routes

    def is_alive(self) -> bool:
        """Return whether the process works; otherwise only a restart helps."""
        return self.fault() is None

    def can_serve(self) -> bool:
        """Return whether requests should be sent here: models are loaded, and none of their sessions fails."""
        return self.is_ready and self.is_alive() and not any(model.engine.is_recovering for model in self.models)

    def fault(self) -> str | None:
        """Return why only a restart helps: a stalled or broken session, or a thread or task that has ended."""
        if (fault := fault_of(self.models, self._stall_timeout_s)) is not None:
            return fault
        if not all(thread.is_alive() for thread in self.readers.threads):
            return "a thread that reads requests has ended"
        return self._failed_task

    def render_metrics(self) -> bytes:
        """Return the metrics in Prometheus text format."""
        return self.metrics.render()

    def supervise(self, task: asyncio.Future[Any]) -> None:
        """Report a fault if a background task raises an error: nothing would run it again."""

        def check(task: asyncio.Future[Any]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._failed_task = f"a background task failed: {type(error).__name__}: {error}"
                logger.error("%s", self._failed_task, exc_info=error)

        task.add_done_callback(check)

    def __call__(self, exchange: Exchange) -> None:
        exchange.watch = self.watch
        if len(exchange.body) > LARGE_BYTES or "content-encoding" in exchange.headers:
            self.readers.submit(self._read, exchange)
        else:
            self._answer(exchange)

    def _read(self, exchange: Exchange) -> None:
        self._answer(exchange)
        if exchange.is_closed and exchange.on_close is not None:
            # The client may have disconnected before there was anything to cancel.
            exchange.on_close()

    def _answer(self, exchange: Exchange) -> None:
        try:
            route, names = self._router.find(exchange.method, exchange.path)
            exchange.error_body, exchange.error_status = route.error_body, route.error_status
            if not route.is_open:
                self.keys.check(exchange.headers.get("authorization", ""))
            call = HttpCall(exchange, self.models, names, self.control)
            retry_if_retired(route.handle, call)
        except NotFoundError as error:
            exchange.reply(error.response())
        except HastenError as error:
            exchange.fail(error)
        except Exception:
            logger.exception("%s %s failed", exchange.method, exchange.path)
            exchange.fail(StageError("the server failed on this request; its log says why"))

    def refusal(self, method: str, path: str, headers: Mapping[str, str]) -> Response | None:
        """Return the error of a request whose large body need not be read, or None to read it."""
        try:
            route, _ = self._router.find(method, path)
        except NotFoundError as error:
            return error.response()
        try:
            if route.is_open:
                raise TooLargeError(f"{path} does not accept a body")
            self.keys.check(headers.get("authorization", ""))
        except HastenError as error:
            return error_response(error, route.error_body, route.error_status)
        return None

    def watch(self, record: RequestRecord) -> None:
        """Pass the record of an answered request to metrics, logs and traces. Thread-safe."""
        for listener in self._listeners:
            self.metrics.deferred.add(partial(listener, record))

    def close(self, drain_s: float) -> bool:
        """Drain and close all models; return whether all requests were answered in time."""
        is_idle = self.control.close()
        is_done = self.models.close(drain_s) and is_idle
        self.metrics.deferred.run()
        self._on_close()
        return is_done


def retry_if_retired(handle: Callable[[Argument], Result], argument: Argument) -> Result:
    """Call a handler again if its model was replaced between lookup and submission."""
    try:
        return handle(argument)
    except RetiredError:
        return handle(argument)
