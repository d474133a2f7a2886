"""The application: a request finds its route, is let in, and is answered, whatever goes wrong."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum

from hasten.core.errors import HastenError, UnavailableError
from hasten.server import huggingface, openai, operations, tei, v2
from hasten.server.exchange import Exchange, Response
from hasten.server.keys import Keys
from hasten.server.metrics import Metrics
from hasten.server.models import Models
from hasten.server.routes import Call, NotFoundError, Route, Router
from hasten.server.watch import Seen, Watcher

logger = logging.getLogger("hasten")

PROTOCOLS: tuple[tuple[str, Sequence[Route]], ...] = (
    ("v2", v2.ROUTES),
    ("huggingface", huggingface.ROUTES),
    ("openai", openai.ROUTES),
    ("tei", tei.ROUTES),
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
        self, models: Models, metrics: Metrics, keys: Keys, watchers: Sequence[Watcher] = (), *, hang_s: float = 60.0
    ) -> None:
        self.models = models
        self.metrics = metrics
        self.keys = keys
        self.state = State.STARTING
        self._watchers = (metrics.on_seen, *watchers)
        self._hang_s = hang_s
        self._readers = ThreadPoolExecutor(_READERS, "read")
        self._router = Router([route for _, routes in PROTOCOLS for route in routes] + operations.routes(self))

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
        if len(exchange.body) > _LARGE_BYTES:
            self._readers.submit(self._read, exchange)
        else:
            self._answer(exchange)

    def watch(self, seen: Seen) -> None:
        for watcher in self._watchers:
            watcher(seen)

    def _read(self, exchange: Exchange) -> None:
        self._answer(exchange)
        if exchange.is_closed and exchange.on_close is not None:
            # The client may have left before there was anything to withdraw.
            exchange.on_close()

    def _answer(self, exchange: Exchange) -> None:
        try:
            route, names = self._router.find(exchange.method, exchange.path)
            if not route.is_open:
                if self.state is State.STARTING:
                    raise UnavailableError("the models are not loaded yet")
                self.keys.check(exchange.headers.get("authorization", ""))
            route.handle(Call(exchange, self.models, names))
        except NotFoundError as error:
            exchange.reply(error.response())
        except HastenError as error:
            exchange.fail(error)
        except Exception:
            logger.exception("%s %s failed", exchange.method, exchange.path)
            exchange.reply(Response.json({"error": "the server failed on this request; its log says why"}, 500))
