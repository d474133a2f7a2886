"""The application: a request finds its route, is let in, and is answered, whatever goes wrong."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Iterable, Sequence

from hasten.core.errors import HastenError
from hasten.server import huggingface, openai, operations, tei, v2
from hasten.server.exchange import Exchange, Response
from hasten.server.metrics import Metrics
from hasten.server.models import Models
from hasten.server.routes import Call, NotFoundError, Route, Router

logger = logging.getLogger("hasten")

PROTOCOLS: tuple[tuple[str, Sequence[Route]], ...] = (
    ("v2", v2.ROUTES),
    ("huggingface", huggingface.ROUTES),
    ("openai", openai.ROUTES),
    ("tei", tei.ROUTES),
)


class App:
    """Called with an exchange, from the event loop; it never waits."""

    def __init__(self, models: Models, metrics: Metrics, *, keys: Iterable[str] = (), hang_s: float = 60.0) -> None:
        self.models = models
        self.metrics = metrics
        self.is_ready = False
        self._hang_s = hang_s
        self._keys = [key.encode() for key in keys]
        self._router = Router([route for _, routes in PROTOCOLS for route in routes] + operations.routes(self))

    def is_alive(self) -> bool:
        """Not where a session has been running for longer than any batch may take."""
        now = time.monotonic()
        return all(served.engine.hung_s(now) < self._hang_s for served in self.models)

    @property
    def routes(self) -> tuple[Route, ...]:
        return self._router.routes

    def __call__(self, exchange: Exchange) -> None:
        try:
            route, names = self._router.find(exchange.method, exchange.path)
            if self._keys and not route.is_open and not self._is_known(exchange):
                raise _Unauthorized
            route.handle(Call(exchange, self.models, names))
        except NotFoundError as error:
            exchange.reply(error.response())
        except _Unauthorized:
            headers = {"www-authenticate": "Bearer"}
            body = Response.json({"error": "the API key is missing or unknown"}).body
            exchange.reply(Response(401, body, headers=headers))
        except HastenError as error:
            exchange.fail(error)
        except Exception:
            logger.exception("%s %s failed", exchange.method, exchange.path)
            exchange.reply(Response.json({"error": "the server failed on this request; its log says why"}, 500))

    def _is_known(self, exchange: Exchange) -> bool:
        """All keys are compared, each in constant time: how long it takes tells nothing."""
        given = exchange.headers.get("authorization", "").removeprefix("Bearer ").strip().encode()
        return any([hmac.compare_digest(given, key) for key in self._keys])  # noqa: C419


class _Unauthorized(Exception):  # noqa: N818 – no error of anyone's program
    pass
