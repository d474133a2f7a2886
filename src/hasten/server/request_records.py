"""Records of answered requests for logs, metrics and traces, whichever protocol they came by."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

logger = logging.getLogger("hasten")


class RequestStats(msgspec.Struct, frozen=True):
    """The cost of one request."""

    rows: int
    tokens: int
    encode_s: float
    queue_s: float
    compute_s: float


class RequestRecord(msgspec.Struct, frozen=True):
    """A request that was answered."""

    id: str
    # "POST /predict", or the name of a gRPC method.
    operation: str
    # Empty if the request names no model or an unknown one.
    model: str
    # The HTTP status; gRPC codes are mapped to it.
    status: int
    seconds: float
    stats: RequestStats | None
    # The caller's span as a W3C `traceparent`; empty if there is none.
    trace: str = ""
    # When the request was answered.
    at_ns: int = msgspec.field(default_factory=time.time_ns)


RequestListener = Callable[[RequestRecord], None]

# Calls that may be pending; beyond this the thread that adds one runs them all.
_MAX_PENDING = 1024


class DeferredRecorder:
    """Runs calls that record answered requests at the next tick and before each scrape. Thread-safe.

    Run at once, they would hold the interpreter while the client's next request waits, which is most of the latency
    that a server adds to a request (docs/decisions/http.md).
    """

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()

    def add(self, call: Callable[[], None]) -> None:
        """Defer a call."""
        self._calls.append(call)
        if len(self._calls) > _MAX_PENDING:
            self.run()

    def run(self) -> None:
        """Run all pending calls; one that fails is logged and affects neither the request nor the thread."""
        with self._lock:
            for _ in range(len(self._calls)):
                try:
                    self._calls.popleft()()
                except Exception:
                    logger.exception("a request could not be recorded")


_PROCESS_ID = os.urandom(4).hex()
_numbers = itertools.count(1)
_MAX_ID_CHARS = 128


def request_id(client_id: str) -> str:
    """Return the client's request id if it can be logged safely, otherwise a new one."""
    is_short = 0 < len(client_id) <= _MAX_ID_CHARS
    if is_short and client_id.isascii() and client_id.isprintable() and " " not in client_id:
        return client_id
    return f"{_PROCESS_ID}-{next(_numbers):x}"
