"""What logs, metrics and traces see of the requests, whatever protocol brought them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass

from hasten.server.engine import Measured


@dataclass(frozen=True, slots=True)
class Seen:
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


Watcher = Callable[[Seen], None]

_PROCESS = os.urandom(4).hex()
_numbers = itertools.count(1)
_LONGEST_ID = 128


def request_id(given: str) -> str:
    """The client's own name for its request, where it is fit to be written in a log, or one of ours."""
    if given and len(given) <= _LONGEST_ID and given.isascii() and given.isprintable() and " " not in given:
        return given
    return f"{_PROCESS}-{next(_numbers):x}"
