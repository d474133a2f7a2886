"""Requests on their way in: what came of one so far, and how much."""

from __future__ import annotations

import time
from typing import Any, Protocol

from hasten.server.wire import target

_MOST_HEADER_BYTES = 2**16
_MOST_HEADERS = 200


class Incoming:
    __slots__ = ("_header_bytes", "_header_count", "begin", "body", "expects", "headers", "is_headed", "unseen", "url")

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.url = b""
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        # Headers behind a body, which chunks may have, are read and mean nothing.
        self.is_headed = False
        # The client sends its body when it is told to.
        self.expects = False
        # Bytes that the parser keeps to itself: a header until it is whole.
        self.unseen = 0
        self._header_bytes = self._header_count = 0

    def add_url(self, url: bytes) -> None:
        self.url += url
        self.unseen = 0
        self._header_bytes += len(url)

    def add_header(self, name: bytes, value: bytes) -> None:
        if not self.is_headed:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        self.unseen = 0
        self._header_bytes += len(name) + len(value)
        self._header_count += 1

    @property
    def has_large_headers(self) -> bool:
        return max(self._header_bytes, self.unseen) > _MOST_HEADER_BYTES or self._header_count > _MOST_HEADERS

    def plain(self, method: bytes, version: str) -> bytes:
        """Its head, as of one that would not upgrade."""
        kept = (f"{name}: {value}\r\n" for name, value in self.headers.items() if name != "upgrade")
        return b"%s %s HTTP/%s\r\n%s\r\n" % (method, self.url, version.encode(), "".join(kept).encode("latin-1"))


class Taker(Protocol):
    """Is told of a request: that it begins, that its headers are too many or whole, its body in parts, its end."""

    def request_began(self) -> None: ...

    def headers_too_large(self) -> None: ...

    def headers_came(self) -> None: ...

    def body_came(self, data: bytes) -> None: ...

    def request_came(self) -> None: ...


class Reader:
    """httptools, and what it has read of the request that is coming."""

    def __init__(self, taker: Taker) -> None:
        import httptools

        self.httptools = httptools
        self.incoming = Incoming()
        self._taker = taker
        self._parser: Any = httptools.HttpRequestParser(self)

    def feed(self, data: bytes) -> bool:
        """False where a tunnel was asked for: what follows is not for us."""
        self.incoming.unseen += len(data)
        rest: bytes | memoryview = data
        while True:
            try:
                self._parser.feed_data(rest)
            except self.httptools.HttpParserUpgrade as upgrade:
                if not self._would_upgrade():
                    return False
                # Nobody has to: it is read as the plain request that it also is, which may have a body.
                head = self.incoming.plain(self._parser.get_method(), self._parser.get_http_version())
                rest = memoryview(rest)[upgrade.args[0] :]
                self._parser = self.httptools.HttpRequestParser(self)
                self._parser.feed_data(head)
            else:
                return True

    @property
    def method(self) -> str:
        return str(self._parser.get_method().decode())

    @property
    def path(self) -> str:
        return target(self.incoming.url)[0]

    @property
    def is_old(self) -> bool:
        return bool(self._parser.get_http_version() == "1.0")

    @property
    def is_kept(self) -> bool:
        """Whether the client may go on to ask."""
        return self._parser.should_keep_alive() and not self._parser.should_upgrade()

    def _would_upgrade(self) -> bool:
        return "upgrade" in self.incoming.headers and self._parser.should_upgrade() and self.method != "CONNECT"

    # httptools

    def on_message_begin(self) -> None:
        self._taker.request_began()

    def on_url(self, url: bytes) -> None:
        self.incoming.add_url(url)
        if self.incoming.has_large_headers:
            self._taker.headers_too_large()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.incoming.add_header(name, value)
        if self.incoming.has_large_headers:
            self._taker.headers_too_large()

    def on_headers_complete(self) -> None:
        if not self._would_upgrade():
            self.incoming.is_headed = True
            self._taker.headers_came()

    def on_chunk_header(self) -> None:
        self.incoming.unseen = 0

    def on_body(self, data: bytes) -> None:
        self.incoming.unseen = 0
        self._taker.body_came(data)

    def on_message_complete(self) -> None:
        if not self._would_upgrade():
            self._taker.request_came()
