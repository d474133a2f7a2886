"""One HTTP request and its reply, whatever brought it: our own connection, or an ASGI server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, TypeVar

import msgspec

from hasten.core.errors import (
    DeadlineError,
    HastenError,
    InputError,
    OverloadedError,
    PlanError,
    TooLargeError,
    UnauthorizedError,
    UnavailableError,
    UnsupportedError,
)
from hasten.server.compression import decompress
from hasten.server.engine import Measured
from hasten.server.stream import Stream
from hasten.server.watch import Seen, Watcher, request_id

Body = TypeVar("Body")

JSON, TEXT, BINARY = "application/json", "text/plain", "application/octet-stream"
REQUEST_ID = "x-request-id"
# Of a body: whoever has no key may send as much as headers may have.
_MOST_UNASKED = 2**16
# What logs and metrics call a client that left before it was answered.
_GONE = 499

# What went wrong to what HTTP calls it; the first that fits counts. What is not here is our own fault.
_STATUS: tuple[tuple[type[HastenError], int], ...] = (
    (UnauthorizedError, 401),
    (TooLargeError, 413),
    (OverloadedError, 429),
    (DeadlineError, 504),
    (UnavailableError, 503),
    (InputError, 400),
    (PlanError, 404),
    (UnsupportedError, 501),
)


class Response(msgspec.Struct, frozen=True):
    status: int
    body: bytes
    content_type: str = JSON
    headers: Mapping[str, str] = {}

    @classmethod
    def json(cls, value: object, status: int = 200) -> Response:
        return cls(status, msgspec.json.encode(value, enc_hook=plain))

    @classmethod
    def text(cls, text: str, status: int = 200) -> Response:
        return cls(status, text.encode(), f"{TEXT}; charset=utf-8")


class Streamed(Response, frozen=True, kw_only=True):
    """Its body comes in parts, while it is sent."""

    stream: Stream


def status_of(error: HastenError) -> int:
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


class Failure(TypedDict):
    error: str


def tell_plainly(error: HastenError) -> Failure:
    """What was wrong, as most protocols write it."""
    return {"error": str(error)}


class Exchange(msgspec.Struct, eq=False):
    method: str
    path: str
    query: str
    # Names in lower case.
    headers: Mapping[str, str]
    body: bytes
    # Takes the reply, once, from any thread.
    send: Callable[[Response], None]
    # Of a body that comes compressed, when it no longer is.
    most_bytes: int = 32 * 2**20
    watch: Watcher | None = None
    # How its protocol writes what was wrong, and counts it.
    tell: Callable[[HastenError], Mapping[str, object]] = tell_plainly
    status: Callable[[HastenError], int] = status_of
    # What to do when the client leaves before it has all of its answer.
    on_close: Callable[[], None] | None = None
    is_closed: bool = False
    begin: float = msgspec.field(default_factory=time.monotonic)
    # For whoever watches: the model that was asked, and what it cost.
    model: str = ""
    measured: Measured | None = None
    # The client's own name for it, or one of ours.
    id: str = ""

    def __post_init__(self) -> None:
        self.id = request_id(self.headers.get(REQUEST_ID, ""))

    def reply(self, response: Response) -> None:
        if not self.is_closed:
            self.is_closed = True
            # It leads to the request and from there back here: a circle, for the garbage collector alone to find.
            self.on_close = None
            self.send(response)

    def stream(self, head: Response) -> Stream:
        """Begin a reply whose parts are written to what is returned, from any thread, until that is ended.

        Until then a client may leave.
        """
        stream = Stream(head.status, self._ended)
        if self.is_closed:
            stream.cut()
        else:
            self.send(Streamed(head.status, b"", head.content_type, head.headers, stream=stream))
        return stream

    def _ended(self) -> None:
        self.is_closed, self.on_close = True, None

    def fail(self, error: HastenError) -> None:
        self.reply(failure(error, self.tell, self.status))

    def leave(self) -> None:
        """The client has gone before it was sent all of its answer."""
        on_close, was_answered, self.is_closed = self.on_close, self.is_closed, True
        if on_close is not None and not was_answered:
            on_close()
        self.was_sent(Response(_GONE, b""))

    def content(self) -> bytes:
        """The body as it was before it was compressed."""
        encoding = self.headers.get("content-encoding")
        return self.body if encoding is None else decompress(self.body, encoding.lower(), self.most_bytes)

    def read_json(self, kind: type[Body]) -> Body:
        return read_json(self.content(), kind)

    def was_sent(self, response: Response) -> None:
        """Whoever sends calls it when all of it is: nobody waits for what is recorded."""
        if self.watch is not None:
            self.watch(self._seen(response))

    def _seen(self, response: Response) -> Seen:
        seconds = time.monotonic() - self.begin
        what, trace = f"{self.method} {self.path}", self.headers.get("traceparent", "")
        return Seen(self.id, what, self.model, response.status, seconds, self.measured, trace)


def declared_bytes(headers: Mapping[str, str]) -> int:
    """How long its body says it is. Python refuses numbers of thousands of digits; the first 20 are enough."""
    digits = headers.get("content-length", "").lstrip("0")
    return int(digits[:20]) if digits.isdecimal() else 0


def has_large_body(headers: Mapping[str, str]) -> bool:
    """Or one that does not say how large it is: it is not read before it is known that it will be answered."""
    return "transfer-encoding" in headers or declared_bytes(headers) > _MOST_UNASKED


def read_json(body: bytes | memoryview, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _misfit(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"the request is not JSON: {error}") from error


def fitted(given: object, kind: type[Body]) -> Body:
    """Of JSON that was read as it is, for who looks at both."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _misfit(error) from error


def _misfit(error: msgspec.ValidationError) -> InputError:
    what, _, where = str(error).replace("`", "").partition(" - at ")
    return InputError(f"the request does not fit: {what}" + (f" at {where}" if where else ""))


def failure(
    error: HastenError,
    tell: Callable[[HastenError], Mapping[str, object]] = tell_plainly,
    status: Callable[[HastenError], int] = status_of,
) -> Response:
    headers: dict[str, str] = {}
    if isinstance(error, OverloadedError):
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    elif isinstance(error, UnauthorizedError):
        headers["www-authenticate"] = "Bearer"
    return Response(status(error), msgspec.json.encode(tell(error)), headers=headers)


def plain(value: object) -> Any:
    """NumPy's numbers and arrays as JSON knows them."""
    tolist = getattr(value, "tolist", None)
    if tolist is None:
        raise TypeError(f"{type(value).__name__} has no JSON form")
    return tolist()
