"""What the server writes about itself and its requests: lines for people, or one JSON object a line for machines."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any

from hasten.server.watch import Seen, Watcher

logger = logging.getLogger("hasten")

_SERVER_FAULT = 500
# Paths are the clients' own: nobody fills the log with one.
_LONGEST = 200
_TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
# What ends a line or moves a terminal's cursor.
_CONTROLS = {code: f"\\u{code:04x}" for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}


def set_up(form: str) -> None:
    """Of `text` and `json`; in JSON, what libraries say too, and what nobody has caught."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO)
    if form == "json":
        logging.getLogger().handlers[:] = [handler]
        logging.captureWarnings(capture=True)
        sys.excepthook = _died
        threading.excepthook = lambda about: _died(about.exc_type, about.exc_value, about.exc_traceback)


def access_log() -> Watcher:
    """One line a request. Texts are never written: they are the users' own."""

    def write(seen: Seen) -> None:
        # Not ready yet, stopping, out of time: nobody's fault.
        is_fault = seen.status >= _SERVER_FAULT and seen.status not in (503, 504)
        level = logging.ERROR if is_fault else logging.INFO
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
        if trace := _TRACE.fullmatch(seen.trace):
            about["trace"] = trace[1]
        logger.log(level, "%s", seen.what[:_LONGEST], extra={"about": about})

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
        # ASCII alone, so that nothing in a message can end the line, in whatever way it is read.
        return json.dumps(line)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        about: dict[str, Any] = getattr(record, "about", {})
        words = [record.getMessage(), *(f"{name}={value}" for name, value in about.items() if value != "")]
        line = f"{record.levelname}: {' '.join(words).translate(_CONTROLS)}"
        if not record.exc_info:
            return line
        # Further in: whatever an exception says, and on how many lines, none of them looks like one of the log's own.
        told = self.formatException(record.exc_info).split("\n")
        return "\n".join([line, *(f"    {part.translate(_CONTROLS)}" for part in told)])


def _died(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    logger.critical("the server has failed", exc_info=(kind, error or kind(), trace))
