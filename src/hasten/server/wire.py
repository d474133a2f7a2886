"""HTTP/1.1 as bytes: where a request goes, and how an answer is written."""

from __future__ import annotations

from contextlib import suppress
from http import HTTPStatus
from urllib.parse import urlsplit

from hasten.server.exchange import REQUEST_ID, Response

CHUNKED = b"transfer-encoding: chunked\r\n"
LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


def target(url: bytes) -> tuple[str, str]:
    """Path and query, as a client wrote them, of /path?query or http://host/path?query."""
    text = url.decode("latin-1")
    if not text.startswith("/") and "://" in text:
        with suppress(ValueError):
            parts = urlsplit(text)
            return parts.path or "/", parts.query
    path, _, query = text.partition("?")
    return path, query


def to_bytes(
    response: Response, is_keeping: bool, *, has_body: bool, request: str = "", framing: bytes | None = None
) -> bytes:
    """With a header that tells where the body ends, where that is not known by its length."""
    if framing is None:
        framing = b"content-length: %d\r\n" % len(response.body)
    head = [
        b"HTTP/1.1 %d %s\r\ncontent-type: %s\r\n%s"
        % (response.status, _REASONS.get(response.status, b""), response.content_type.encode(), framing)
    ]
    head += [f"{name}: {value}\r\n".encode("latin-1") for name, value in response.headers.items()]
    if request:
        head.append(f"{REQUEST_ID}: {request}\r\n".encode())
    if not is_keeping:
        head.append(b"connection: close\r\n")
    head.append(b"\r\n")
    if has_body:
        head.append(response.body)
    return b"".join(head)


def chunk(data: bytes) -> bytes:
    """One that is empty would be the last."""
    return b"%x\r\n%s\r\n" % (len(data), data)
