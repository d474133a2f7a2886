"""Encode HTTP/1.1 responses and split request targets."""

from __future__ import annotations

from contextlib import suppress
from http import HTTPStatus
from urllib.parse import urlsplit

from hasten.server.http.exchange import REQUEST_ID, Response

CHUNKED = b"transfer-encoding: chunked\r\n"
LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


def split_target(url: bytes) -> tuple[str, str]:
    """Return path and query, still percent-encoded, of /path?query or http://host/path?query."""
    text = url.decode("latin-1")
    if not text.startswith("/") and "://" in text:
        with suppress(ValueError):
            parts = urlsplit(text)
            return parts.path or "/", parts.query
    path, _, query = text.partition("?")
    return path, query


def encode_response(
    response: Response, keep_alive: bool, *, has_body: bool, request_id: str = "", framing: bytes | None = None
) -> bytes:
    """Return the response as bytes. `framing` replaces the content-length header of a body of unknown length."""
    if framing is None:
        framing = b"content-length: %d\r\n" % len(response.body)
    parts = [
        b"HTTP/1.1 %d %s\r\ncontent-type: %s\r\n%s"
        % (response.status, _REASONS.get(response.status, b""), response.content_type.encode(), framing)
    ]
    parts += [f"{name}: {value}\r\n".encode("latin-1") for name, value in response.headers.items()]
    if request_id:
        parts.append(f"{REQUEST_ID}: {request_id}\r\n".encode())
    if not keep_alive:
        parts.append(b"connection: close\r\n")
    parts.append(b"\r\n")
    if has_body:
        parts.append(response.body)
    return b"".join(parts)


def encode_chunk(data: bytes) -> bytes:
    """Return data as a chunk. It must not be empty: an empty chunk ends the body."""
    return b"%x\r\n%s\r\n" % (len(data), data)
