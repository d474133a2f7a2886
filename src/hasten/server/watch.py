"""What logs, metrics and traces see of the requests, whatever protocol brought them."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from hasten.server.engine import Measured

logger = logging.getLogger("hasten")


class Seen(msgspec.Struct, frozen=True):
    """A request that was answered."""

    id: str
    # "POST /predict", or the name of a gRPC method.
    what: str
    # Empty where no model was asked, or none was found.
    model: str
    # As HTTP counts; a gRPC code has its counterpart.
    status: int
    seconds: float
    measured: Measured | None
    # The caller's span, as W3C's trace context writes it; empty where there is none.
    trace: str = ""
    # When it was.
    at_ns: int = msgspec.field(default_factory=time.time_ns)


Watcher = Callable[[Seen], None]

# So many are told at the latest, where nobody looks after them in time.
_MOST_UNTOLD = 1024


class Later:
    """What is recorded of a request when it is over, and nobody waits for: done at the next tick, and before a scrape.

    Done at once it would keep the interpreter from whoever asks again, which is most of what a server adds to a
    request (docs/decisions/http.md).
    """

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()

    def add(self, call: Callable[[], None]) -> None:
        """From any thread."""
        self._calls.append(call)
        if len(self._calls) > _MOST_UNTOLD:
            self.do()

    def do(self) -> None:
        """From any thread, all that is there; what goes wrong is not the request's fault, nor the thread's."""
        with self._lock:
            for _ in range(len(self._calls)):
                try:
                    self._calls.popleft()()
                except Exception:
                    logger.exception("a request could not be recorded")


_PROCESS = os.urandom(4).hex()
_numbers = itertools.count(1)
_LONGEST_ID = 128


def request_id(given: str) -> str:
    """The client's own name for its request, where it is fit to be written in a log, or one of ours."""
    if given and len(given) <= _LONGEST_ID and given.isascii() and given.isprintable() and " " not in given:
        return given
    return f"{_PROCESS}-{next(_numbers):x}"
