"""The application: a request finds its route, is let in, and is answered, whatever goes wrong."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from functools import partial
from typing import TypeVar

from hasten.core.errors import HastenError, StageError, TooLargeError
from hasten.server import generate, huggingface, openai, openai_text, operations, tei, v2
from hasten.server.engine import RetiredError
from hasten.server.exchange import Exchange, Response, failure
from hasten.server.keys import Keys
from hasten.server.metrics import Metrics
from hasten.server.models import Models
from hasten.server.routes import Call, NotFoundError, Route, Router
from hasten.server.watch import Seen, Watcher

logger = logging.getLogger("hasten")

Asked = TypeVar("Asked")
Found = TypeVar("Found")

PROTOCOLS: tuple[Sequence[Route], ...] = (
    v2.ROUTES,
    generate.ROUTES,
    huggingface.ROUTES,
    openai.ROUTES,
    openai_text.ROUTES,
    tei.ROUTES,
)

# A body that is larger takes long enough to read for others to notice, where the event loop does it.
_LARGE_BYTES = 2**16
_READERS = 2


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class App:
    """Called with an exchange, from the event loop; it never waits."""

    def __init__(
        self,
        models: Models,
        metrics: Metrics,
        keys: Keys,
        watchers: Sequence[Watcher] = (),
        *,
        hang_s: float = 60.0,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.models = models
        self.metrics = metrics
        self.keys = keys
        self.state = State.STARTING
        self._watchers = (metrics.on_seen, *watchers)
        self._hang_s = hang_s
        self._on_close = on_close
        self._readers = ThreadPoolExecutor(_READERS, "read")
        self._router = Router([route for routes in PROTOCOLS for route in routes] + operations.routes(self))

    @property
    def is_ready(self) -> bool:
        return self.state is State.READY

    def is_alive(self) -> bool:
        """Not where a session has been running for longer than any batch may take."""
        now = time.monotonic()
        return all(served.engine.hung_s(now) < self._hang_s for served in self.models)

    @property
    def routes(self) -> tuple[Route, ...]:
        return self._router.routes

    def __call__(self, exchange: Exchange) -> None:
        exchange.watch = self.watch
        if len(exchange.body) > _LARGE_BYTES or "content-encoding" in exchange.headers:
            self._readers.submit(self._read, exchange)
        else:
            self._answer(exchange)

    def _read(self, exchange: Exchange) -> None:
        self._answer(exchange)
        if exchange.is_closed and exchange.on_close is not None:
            # The client may have left before there was anything to withdraw.
            exchange.on_close()

    def _answer(self, exchange: Exchange) -> None:
        try:
            route, names = self._router.find(exchange.method, exchange.path)
            exchange.tell, exchange.status = route.tell, route.status
            if not route.is_open:
                self.keys.check(exchange.headers.get("authorization", ""))
            call = Call(exchange, self.models, names)
            once_more(route.handle, call)
        except NotFoundError as error:
            exchange.reply(error.response())
        except HastenError as error:
            exchange.fail(error)
        except Exception:
            logger.exception("%s %s failed", exchange.method, exchange.path)
            exchange.fail(StageError("the server failed on this request; its log says why"))

    def refusal(self, method: str, path: str, headers: Mapping[str, str]) -> Response | None:
        """Of a request whose body is still to come, and is large: what it is not read for."""
        try:
            route, _ = self._router.find(method, path)
        except NotFoundError as error:
            return error.response()
        try:
            if route.is_open:
                raise TooLargeError(f"{path} takes no body")
            self.keys.check(headers.get("authorization", ""))
        except HastenError as error:
            return failure(error, route.tell, route.status)
        return None

    def watch(self, seen: Seen) -> None:
        """From any thread."""
        for watcher in self._watchers:
            self.metrics.later.add(partial(watcher, seen))

    def close(self, drain_s: float) -> bool:
        """Answer what was taken, then stop; whether all of it was answered in time."""
        is_done = self.models.close(drain_s)
        self.metrics.later.do()
        self._on_close()
        return is_done


def once_more(ask: Callable[[Asked], Found], asked: Asked) -> Found:
    """Where a model is replaced between being found and being asked, the one in its place is asked."""
    try:
        return ask(asked)
    except RetiredError:
        return ask(asked)
