"""The server's log and access log: text lines, or one JSON object per line."""

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

from hasten.server.request_records import RequestRecord

logger = logging.getLogger("hasten")

_SERVER_FAULT = 500
# Clients choose the path; a long one must not fill the log.
_MAX_OPERATION_CHARS = 200
_TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
# Characters that end a line or move a terminal's cursor.
_CONTROLS = {code: f"\\u{code:04x}" for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}


def set_up(form: str) -> None:
    """Log to stderr as `text` or `json`; JSON includes the log of libraries, warnings and uncaught exceptions."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO)
    if form == "json":
        logging.getLogger().handlers[:] = [handler]
        logging.captureWarnings(capture=True)
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def log_request(record: RequestRecord) -> None:
    """Log a request in one line. Texts are never logged: they are private."""
    # 503 (not ready or stopping) and 504 (deadline exceeded) are not faults of the server.
    is_fault = record.status >= _SERVER_FAULT and record.status not in (503, 504)
    level = logging.ERROR if is_fault else logging.INFO
    fields: dict[str, Any] = {
        "request": record.id,
        "model": record.model,
        "status": record.status,
        "ms": round(record.seconds * 1e3, 3),
    }
    if record.stats is not None:
        stats = record.stats
        fields |= {
            "rows": stats.rows,
            "tokens": stats.tokens,
            "encode_ms": round(stats.encode_s * 1e3, 3),
            "queue_ms": round(stats.queue_s * 1e3, 3),
            "compute_ms": round(stats.compute_s * 1e3, 3),
        }
    if trace := _TRACE.fullmatch(record.trace):
        fields["trace"] = trace[1]
    logger.log(level, "%s", record.operation[:_MAX_OPERATION_CHARS], extra={"fields": fields})


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = "".join(traceback.format_exception(*record.exc_info))
        # ASCII only, so that nothing in a message can end the line for any reader.
        return json.dumps(line)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        parts = [record.getMessage(), *(f"{name}={value}" for name, value in fields.items() if value != "")]
        line = f"{record.levelname}: {' '.join(parts).translate(_CONTROLS)}"
        if not record.exc_info:
            return line
        # Indented, so that no line of an exception's text looks like a line of the log.
        trace = self.formatException(record.exc_info).split("\n")
        return "\n".join([line, *(f"    {part.translate(_CONTROLS)}" for part in trace)])


def _log_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    logger.critical("the server has failed", exc_info=(kind, error or kind(), trace))
