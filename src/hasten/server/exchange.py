"""One HTTP request and its reply, whatever brought it: our own connection, or an ASGI server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from hasten.core.errors import (
    DeadlineError,
    HastenError,
    InputError,
    OverloadedError,
    PlanError,
    TooLargeError,
    UnavailableError,
    UnsupportedError,
)

Body = TypeVar("Body")

JSON = "application/json"

# What went wrong to what HTTP calls it; the first that fits counts. What is not here is our own fault.
_STATUS: tuple[tuple[type[HastenError], int], ...] = (
    (TooLargeError, 413),
    (OverloadedError, 429),
    (DeadlineError, 504),
    (UnavailableError, 503),
    (InputError, 400),
    (PlanError, 404),
    (UnsupportedError, 501),
)


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    body: bytes
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def json(cls, value: object, status: int = 200) -> Response:
        return cls(status, msgspec.json.encode(value, enc_hook=plain))

    @classmethod
    def text(cls, text: str, status: int = 200) -> Response:
        return cls(status, text.encode(), "text/plain; charset=utf-8")


@dataclass(slots=True, eq=False)
class Exchange:
    method: str
    path: str
    query: str
    # Names in lower case.
    headers: Mapping[str, str]
    body: bytes
    # Takes the reply, once, from any thread.
    send: Callable[[Response], None]
    is_closed: bool = False
    # What to do when the client leaves before it is answered.
    on_close: Callable[[], None] | None = None

    def reply(self, response: Response) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.send(response)

    def fail(self, error: HastenError) -> None:
        self.reply(failure(error))

    def leave(self) -> None:
        """The client has gone."""
        if not self.is_closed:
            self.is_closed = True
            if self.on_close is not None:
                self.on_close()

    def read_json(self, kind: type[Body]) -> Body:
        return read_json(self.body, kind)


def read_json(body: bytes | memoryview, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).replace("`", "").partition(" - at ")
        raise InputError(f"the request does not fit: {what}" + (f" at {where}" if where else "")) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"the request is not JSON: {error}") from error


def status_of(error: HastenError) -> int:
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def failure(error: HastenError) -> Response:
    headers = {"retry-after": str(max(1, round(error.retry_after_s)))} if isinstance(error, OverloadedError) else {}
    status = status_of(error)
    body = msgspec.json.encode({"error": str(error)})
    return Response(status, body, headers=headers)


def plain(value: object) -> Any:
    """NumPy's numbers and arrays as JSON knows them."""
    tolist = getattr(value, "tolist", None)
    if tolist is None:
        raise TypeError(f"{type(value).__name__} has no JSON form")
    return tolist()
