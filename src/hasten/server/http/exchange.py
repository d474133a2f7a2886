"""An HTTP request and its response, independent of the transport: our own connection or an ASGI server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, TypeVar

import msgspec
import numpy as np

from hasten.core import errors
from hasten.core.errors import HastenError
from hasten.server.http.compression import decompress
from hasten.server.http.stream import Stream
from hasten.server.request_records import RequestListener, RequestRecord, RequestStats, request_id

Body = TypeVar("Body")

JSON, TEXT, BINARY = "application/json", "text/plain", "application/octet-stream"
REQUEST_ID = "x-request-id"
# What the default --max-request-tokens needs: 2**18 tokens are 1 to 3 MB of text, and 3 MB as three int32 tensors.
# text-embeddings-inference allows 2 MB. Decoding holds the interpreter lock, here for some 50 ms at worst.
DEFAULT_BODY_BYTES = 4 * 2**20
# Lists and objects in a JSON body. A request has a few for each of its items, while `[],` takes 27 times its bytes once
# it is decoded, and holds the interpreter lock meanwhile.
_MAX_CONTAINERS = 2**14
# They are counted in parts of this size, up to the first that exceeds the maximum.
_COUNTED_BYTES = 2**16
_QUOTE, _LIST, _OBJECT = b'"[{'
# A body up to this size is read before the client's API key is checked: it costs no more than headers may.
_MAX_UNAUTHORIZED_BYTES = 2**16
# Status in logs and metrics of a request whose client disconnected before it was answered (nginx's code).
CLIENT_DISCONNECTED = 499


class DisconnectedError(HastenError):
    """The client disconnected before it was answered."""


# HTTP status of each kind of error; the first match counts. Anything else is an internal error.
_STATUS: tuple[tuple[type[HastenError], int], ...] = (
    (errors.UnauthorizedError, 401),
    (errors.ForbiddenError, 403),
    (errors.TooLargeError, 413),
    (errors.OverloadedError, 429),
    (errors.DeadlineError, 504),
    (errors.UnavailableError, 503),
    (errors.InputError, 400),
    (errors.PlanError, 404),
    (errors.UnsupportedError, 501),
    (DisconnectedError, CLIENT_DISCONNECTED),
)


class Response(msgspec.Struct, frozen=True):
    """A complete HTTP response."""

    status: int
    body: bytes
    content_type: str = JSON
    headers: Mapping[str, str] = {}

    @classmethod
    def json(cls, value: object, status: int = 200) -> Response:
        """Return a JSON response; the value may contain NumPy scalars and arrays."""
        return cls(status, msgspec.json.encode(value, enc_hook=to_json_value))

    @classmethod
    def text(cls, text: str, status: int = 200) -> Response:
        """Return a plain-text response."""
        return cls(status, text.encode(), f"{TEXT}; charset=utf-8")


class StreamedResponse(Response, frozen=True, kw_only=True):
    """A response whose body is produced while it is sent."""

    stream: Stream


def status_of(error: HastenError) -> int:
    """Return the HTTP status of an error."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


class ErrorBody(TypedDict):
    """The JSON body of an error in most protocols."""

    error: str


def plain_error_body(error: HastenError) -> ErrorBody:
    """Return the JSON body of an error in the form that most protocols use."""
    return {"error": str(error)}


class Exchange(msgspec.Struct, eq=False):
    """A request, with callbacks for its response."""

    method: str
    path: str
    query: str
    # Names in lower case.
    headers: Mapping[str, str]
    body: bytes
    # Takes the response, once, from any thread.
    send: Callable[[Response], None]
    # Limit of a decompressed body.
    max_body_bytes: int = DEFAULT_BODY_BYTES
    # The bytes that the server counts for the body, and the function that counts more of them or raises an error.
    reserved_bytes: int = 0
    is_released: bool = False
    reserve: Callable[[int, Exchange], None] = lambda *_: None
    _is_decompressed: bool = False
    watch: RequestListener | None = None
    # Body and status of an error in the protocol of the request.
    error_body: Callable[[HastenError], Mapping[str, object]] = plain_error_body
    error_status: Callable[[HastenError], int] = status_of
    # Called when the client disconnects before it has received the whole response.
    on_close: Callable[[], object] | None = None
    is_closed: bool = False
    started: float = msgspec.field(default_factory=time.monotonic)
    # For the request record: the model that was called, and what the request cost.
    model: str = ""
    stats: RequestStats | None = None
    # The client's own id of the request, or a generated one.
    id: str = ""

    def __post_init__(self) -> None:
        self.id = request_id(self.headers.get(REQUEST_ID, ""))

    def reply(self, response: Response) -> None:
        """Send the response; ignored if the exchange is closed. Thread-safe."""
        if not self.is_closed:
            self.is_closed = True
            # on_close refers to the request and from there back to this exchange: break the reference cycle here, so
            # that it is not left to the garbage collector.
            self.on_close = None
            self.send(response)

    def stream(self, head: Response) -> Stream:
        """Begin a streamed response. Any thread may write to the returned stream until it is ended.

        Until then `on_close` is called if the client disconnects.
        """
        stream = Stream(head.status, self._close)
        if self.is_closed:
            stream.discard()
        else:
            self.send(StreamedResponse(head.status, b"", head.content_type, head.headers, stream=stream))
        return stream

    def _close(self) -> None:
        self.is_closed, self.on_close = True, None

    def fail(self, error: HastenError) -> None:
        """Reply with an error in the form of the request's protocol."""
        self.reply(error_response(error, self.error_body, self.error_status))

    def disconnect(self) -> None:
        """Cancel the request: the client disconnected before it was sent the whole response."""
        on_close, was_answered, self.is_closed = self.on_close, self.is_closed, True
        # A request that waits to be read is no longer counted: let go of its body at once.
        self.body = b""
        if on_close is not None and not was_answered:
            on_close()
        self.record(Response(CLIENT_DISCONNECTED, b""))

    def content(self) -> bytes:
        """Return the body, decompressed."""
        encoding = self.headers.get("content-encoding")
        if encoding is not None and not self._is_decompressed:
            limit = self.max_body_bytes
            self.body = decompress(self.body, encoding.lower(), limit, lambda size: self.reserve(size, self))
            self._is_decompressed = True
        return self.body

    def read_json(self, kind: type[Body]) -> Body:
        """Return the body as a value of this type."""
        return read_json(self.content(), kind)

    def record(self, response: Response) -> None:
        """Record the request. Called once the whole response is sent, so that no client waits for the records."""
        if self.watch is not None:
            seconds = time.monotonic() - self.started
            name, trace = f"{self.method} {self.path}", self.headers.get("traceparent", "")
            self.watch(RequestRecord(self.id, name, self.model, response.status, seconds, self.stats, trace))


def declared_bytes(headers: Mapping[str, str]) -> int:
    """Return the declared content length, or 0. Python rejects numbers of thousands of digits; the first 20 suffice."""
    digits = headers.get("content-length", "").lstrip("0")
    return int(digits[:20]) if digits.isdecimal() else 0


def has_large_body(headers: Mapping[str, str]) -> bool:
    """Return whether the body is large or of unknown size, so that it is read only if the request will be answered."""
    return "transfer-encoding" in headers or declared_bytes(headers) > _MAX_UNAUTHORIZED_BYTES


def check_containers(body: bytes | memoryview) -> None:
    """Raise an error if JSON has more lists and objects than any request needs, before they are built."""
    if len(body) < 2 * _MAX_CONTAINERS:
        return
    # Counting those within strings too takes next to no time, and few bodies have that many.
    text = bytes(body)
    if text.count(b"[") + text.count(b"{") <= _MAX_CONTAINERS:
        return
    # Without escapes, a byte is outside strings after an even number of quotes. With NumPy, since a loop over millions
    # of strings would compete with the event loop for the interpreter lock for a quarter of a second.
    codes = np.frombuffer(text.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    count = quotes = 0
    for begin in range(0, len(codes), _COUNTED_BYTES):
        part = codes[begin : begin + _COUNTED_BYTES]
        quotes_before = np.cumsum(part == _QUOTE, dtype=np.uint32) + quotes
        count += int(np.count_nonzero(((part == _LIST) | (part == _OBJECT)) & (quotes_before & 1 == 0)))
        if count > _MAX_CONTAINERS:
            raise errors.TooLargeError(f"the JSON has more than {_MAX_CONTAINERS} lists and objects")
        quotes = int(quotes_before[-1]) & 1


def read_json(body: bytes | memoryview, kind: type[Body]) -> Body:
    """Decode JSON into a value of this type."""
    check_containers(body)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).replace("`", "").partition(" - at ")
        raise errors.InputError(f"invalid request: {reason}" + (f" at {path}" if path else "")) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        raise errors.InputError(f"the request is not JSON: {reason}") from error


def error_response(
    error: HastenError,
    error_body: Callable[[HastenError], Mapping[str, object]] = plain_error_body,
    error_status: Callable[[HastenError], int] = status_of,
) -> Response:
    """Return the response that reports an error."""
    headers: dict[str, str] = {}
    if isinstance(error, errors.OverloadedError):
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    elif isinstance(error, errors.UnauthorizedError):
        headers["www-authenticate"] = "Bearer"
    return Response(error_status(error), msgspec.json.encode(error_body(error)), headers=headers)


def to_json_value(value: object) -> Any:
    """Convert a NumPy scalar or array to what JSON can represent; arrays of floats are written as they are.

    In a third of the time of a list and half of the bytes: in as few digits as give the same float32 again.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        import orjson

        return msgspec.Raw(orjson.dumps(np.ascontiguousarray(value), option=orjson.OPT_SERIALIZE_NUMPY))
    tolist = getattr(value, "tolist", None)
    if tolist is None:
        raise TypeError(f"{type(value).__name__} has no JSON form")
    return tolist()
