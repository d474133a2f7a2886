"""Parse HTTP/1.1 requests incrementally with httptools, and bound the size of their headers."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from hasten.server.http.encoding import split_target

_MAX_HEADER_BYTES = 2**16
_MAX_HEADERS = 200
# uri-host [":" port] of RFC 3986; possibly empty.
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?", re.ASCII)


@dataclass(slots=True, eq=False)
class PartialRequest:
    """The part of a request that has been received so far."""

    started: float = field(default_factory=time.monotonic)
    url: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    # Trailers, which may follow a chunked body, are read and ignored.
    has_all_headers: bool = False
    # The client sends its body once it receives "100 Continue".
    expects_continue: bool = False
    # Bytes that the parser buffers internally: a header until it is complete.
    unparsed_bytes: int = 0
    header_bytes: int = 0
    header_count: int = 0

    @property
    def has_large_headers(self) -> bool:
        """Return whether the headers exceed their limit in size or number."""
        return max(self.header_bytes, self.unparsed_bytes) > _MAX_HEADER_BYTES or self.header_count > _MAX_HEADERS

    def fault(self, *, is_http10: bool) -> str:
        """Return why these headers are ambiguous: proxies could read them otherwise (RFC 9112, 3.2 and 6.1)."""
        host, encoding = self.headers.get("host"), self.headers.get("transfer-encoding")
        if host is None and not is_http10:
            return "the header 'host' is missing"
        if host is not None and not _is_valid_host(host):
            return "the header 'host' is repeated or invalid"
        if encoding is not None and is_http10:
            return "HTTP/1.0 has no transfer-encoding"
        if encoding is not None and encoding.lower() != "chunked":
            return "unsupported transfer-encoding: only 'chunked', once, is supported"
        return ""

    def head_without_upgrade(self, method: bytes, version: str) -> bytes:
        """Return the request line and headers without the `Upgrade` header."""
        lines = (f"{name}: {value}\r\n" for name, value in self.headers.items() if name != "upgrade")
        return b"%s %s HTTP/%s\r\n%s\r\n" % (method, self.url, version.encode(), "".join(lines).encode("latin-1"))


@lru_cache(256)
def _is_valid_host(host: str) -> bool:
    return _HOST.fullmatch(host) is not None


class RequestHandler(Protocol):
    """Receives the parts of a request from the parser."""

    def request_started(self) -> None:
        """Handle the first byte of a request."""

    def headers_too_large(self) -> None:
        """Handle headers that exceed their limit."""

    def headers_received(self) -> None:
        """Handle complete headers."""

    def body_received(self, data: bytes) -> None:
        """Handle a part of the body."""

    def request_received(self) -> None:
        """Handle the end of a request."""


class RequestParser:
    """An httptools parser with the request that it is receiving."""

    def __init__(self, handler: RequestHandler) -> None:
        import httptools

        self.httptools = httptools
        self.partial = PartialRequest()
        self._handler = handler
        self._parser: Any = httptools.HttpRequestParser(self)

    def feed(self, data: bytes) -> bool:
        """Parse received bytes. Return False if the client requested a tunnel: what follows is not HTTP."""
        self.partial.unparsed_bytes += len(data)
        rest: bytes | memoryview = data
        while True:
            try:
                self._parser.feed_data(rest)
            except self.httptools.HttpParserUpgrade as upgrade:
                if not self._is_optional_upgrade():
                    return False
                # A server may ignore an upgrade: parse it as the plain request it also is, which may have a body.
                head = self.partial.head_without_upgrade(self._parser.get_method(), self._parser.get_http_version())
                rest = memoryview(rest)[upgrade.args[0] :]
                self._parser = self.httptools.HttpRequestParser(self)
                self._parser.feed_data(head)
            else:
                return True

    @property
    def method(self) -> str:
        """Return the method of the current request."""
        return str(self._parser.get_method().decode())

    @property
    def path(self) -> str:
        """Return the path of the current request."""
        return split_target(self.partial.url)[0]

    @property
    def is_http10(self) -> bool:
        """Return whether the client speaks HTTP/1.0."""
        return bool(self._parser.get_http_version() == "1.0")

    @property
    def keep_alive(self) -> bool:
        """Return whether the client may send another request on this connection."""
        return self._parser.should_keep_alive() and not self._parser.should_upgrade()

    def _is_optional_upgrade(self) -> bool:
        return "upgrade" in self.partial.headers and self._parser.should_upgrade() and self.method != "CONNECT"

    def _count_header_bytes(self, size: int) -> None:
        self.partial.unparsed_bytes = 0
        self.partial.header_bytes += size
        if self.partial.has_large_headers:
            self._handler.headers_too_large()

    # Callbacks of httptools

    def on_message_begin(self) -> None:
        """Start a request."""
        self._handler.request_started()

    def on_url(self, url: bytes) -> None:
        """Append a part of the request target."""
        self.partial.url += url
        self._count_header_bytes(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header; trailers are counted but not kept."""
        partial = self.partial
        if not partial.has_all_headers:
            key, text = name.decode("latin-1").lower(), value.decode("latin-1")
            # A repeated header is a list (RFC 9110 5.3), which those that must not be repeated are then rejected for.
            partial.headers[key] = f"{partial.headers[key]}, {text}" if key in partial.headers else text
        partial.header_count += 1
        self._count_header_bytes(len(name) + len(value))

    def on_headers_complete(self) -> None:
        """Report complete headers, unless the request will be parsed again without an optional upgrade."""
        if not self._is_optional_upgrade():
            self.partial.has_all_headers = True
            self._handler.headers_received()

    def on_chunk_header(self) -> None:
        """Note that the parser has consumed all input so far."""
        self.partial.unparsed_bytes = 0

    def on_body(self, data: bytes) -> None:
        """Pass on a part of the body."""
        self.partial.unparsed_bytes = 0
        self._handler.body_received(data)

    def on_message_complete(self) -> None:
        """Report the end of the request."""
        if not self._is_optional_upgrade():
            self._handler.request_received()
