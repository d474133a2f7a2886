"""What the server writes about itself and its requests: lines for people, or one JSON object a line for machines."""

from __future__ import annotations

import logging
import sys
import time
import traceback
from typing import Any

import msgspec

from hasten.server.watch import Seen, Watcher

logger = logging.getLogger("hasten")
_SERVER_FAULT = 500


def set_up(form: str) -> None:
    """Of `text` and `json`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else logging.Formatter("%(levelname)s: %(message)s"))
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO)


def access_log() -> Watcher:
    """One line a request. Texts are never written: they are the users' own."""

    def write(seen: Seen) -> None:
        level = logging.ERROR if seen.status >= _SERVER_FAULT else logging.INFO
        about: dict[str, Any] = {
            "request": seen.id,
            "model": seen.model,
            "status": seen.status,
            "ms": round(seen.seconds * 1e3, 3),
        }
        if seen.measured is not None:
            cost = seen.measured
            about |= {
                "rows": cost.rows,
                "tokens": cost.tokens,
                "encode_ms": round(cost.encode_s * 1e3, 3),
                "queue_ms": round(cost.queue_s * 1e3, 3),
                "compute_ms": round(cost.compute_s * 1e3, 3),
            }
        if seen.trace:
            about["trace"] = seen.trace
        logger.log(level, "%s", seen.what, extra={"about": about})

    return write


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "about", {}),
        }
        if record.exc_info:
            line["exception"] = "".join(traceback.format_exception(*record.exc_info))
        return msgspec.json.encode(line).decode()
