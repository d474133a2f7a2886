"""HTTP/1.1 over httptools, straight to the application: no coroutine, no task, no dictionary a request need not have.

Measured against uvicorn with the same application: docs/decisions/http.md.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from hasten.core.errors import InputError, OverloadedError, TooLargeError
from hasten.server.exchange import MOST_UNASKED, REQUEST_ID, Exchange, Response, Streamed, declared_bytes, failure
from hasten.server.outlet import Outlet
from hasten.server.stream import Stream
from hasten.server.watch import Seen, request_id
from hasten.server.wire import CHUNKED, CONTINUE, LAST_CHUNK, chunk, target, to_bytes

if TYPE_CHECKING:
    from hasten.server.connections import Connections

logger = logging.getLogger("hasten")

_MOST_HEADER_BYTES = 2**16
_MOST_HEADERS = 200
# What a client may send ahead of its answers before it is not read from any more, not even to see whether it leaves.
_MOST_AHEAD = 64
_MOST_AHEAD_BYTES = 2**20
# For who is refused, or would upgrade, to take its answer and close.
_LINGER_S = 2.0
# How often to find out whether a client that sends no more is still there.
_PROBE_S = 0.25


class Connection(asyncio.Protocol):
    def __init__(self, owner: Connections) -> None:
        import httptools

        self._httptools = httptools
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        # Answered in the order they came, one at a time, each with whether others may follow, and whether it is of a
        # client that knows no chunks; a refusal is the last.
        self._waiting: deque[tuple[Exchange, bool, bool]] = deque()
        self._current: Exchange | None = None
        # What is being sent in parts, and whether the client was told that it is the last.
        self._stream: Stream | None = None
        self._is_last_stream = self._is_old = False
        self._ahead_bytes = 0
        self._is_kept = True
        self._refusal: Response | None = None
        self._refused = ""
        # Nothing more is taken from it; it has sent all it will; a request has begun and not ended.
        self._is_deaf = self._has_ended = self._is_within = False
        # The client does not read what it is sent; it is not read from.
        self._is_stuck = self._is_paused = False
        self._body = bytearray()
        self._size = self._header_bytes = 0
        self._reset()

    # asyncio

    def connection_made(self, transport: Any) -> None:
        self._transport, self._outlet = transport, Outlet(transport)
        owner = self._owner
        owner.open.add(self)
        if len(owner.open) > 2 * owner.limits.connections:
            transport.abort()
        elif len(owner.open) > owner.limits.connections or owner.is_draining:
            self._refuse(Response.json({"error": "too many connections"}, 503))
        else:
            self._wait(owner.limits.idle_s, self._leave)

    def connection_lost(self, error: Exception | None) -> None:
        self._owner.open.discard(self)
        self._outlet.close()
        self._stop_waiting()
        if self._write_timer is not None:
            self._write_timer.cancel()
        if self._stream is not None:
            self._stream.cut()
            self._stream = None
        leaving = [exchange for exchange, _, _ in self._waiting]
        # One that was sent its answer is still to be settled, and is counted then.
        if self._current is not None and not self._outlet.has_sent:
            leaving.insert(0, self._current)
            self._current = None
        for exchange in leaving:
            self._owner.held_bytes -= len(exchange.body)
            exchange.leave()
        self._waiting.clear()
        self._is_deaf = True
        self._reset()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        httptools = self._httptools
        self._unseen += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Read as the plain request that it also is, and the last: what follows may be another protocol.
            self._is_deaf = True
        except httptools.HttpParserCallbackError:
            logger.exception("a request could not be taken")
            self._refuse(Response.json({"error": "the server failed on this request; its log says why"}, 500))
        except httptools.HttpParserError:
            self._refuse(failure(InputError("this is not HTTP")))
        else:
            # The parser keeps a header to itself until it is whole.
            if self._unseen > _MOST_HEADER_BYTES:
                self._refuse_headers()
            elif self._is_within and self._timer is None:
                self._wait(self._owner.limits.read_s, self._give_up)

    def eof_received(self) -> bool:
        """A client that has sent all it will may still wait for its answers, except where TLS cannot tell that."""
        self._is_deaf = self._has_ended = True
        self._is_within = False
        is_awaited = self._current is not None or bool(self._waiting)
        if not is_awaited or self._transport.get_extra_info("ssl_object") is not None:
            self._leave()
            return False
        self._wait(_PROBE_S, self._probe)
        return True

    def pause_writing(self) -> None:
        self._is_stuck = True
        self._regulate()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._is_stuck = False
        self._regulate()
        if self._current is None and not self._transport.is_closing():
            self._next()
        self._send_parts()

    # httptools

    def on_message_begin(self) -> None:
        if not self._is_deaf:
            self._reset()
            self._is_within = True
            self._stop_waiting()

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._unseen = 0
        self._header_bytes += len(url)
        if self._header_bytes > _MOST_HEADER_BYTES:
            self._refuse_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_headed:
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        self._unseen = 0
        self._header_bytes += len(name) + len(value)
        self._header_count += 1
        if self._header_bytes > _MOST_HEADER_BYTES or self._header_count > _MOST_HEADERS:
            self._refuse_headers()

    def on_headers_complete(self) -> None:
        # Headers behind a body, which chunks may have, are read and mean nothing.
        self._is_headed = True
        size = declared_bytes(self._headers)
        if self._owner.limits.body_bytes < size < math.inf:
            self._too_large()
        elif size > MOST_UNASKED and (refusal := self._unwanted()):
            # It is not read before it is known that it will be answered.
            self._refuse(refusal)
        elif "expect" in self._headers and not self._is_deaf and self._headers["expect"].lower() == "100-continue":
            self._outlet.write(CONTINUE)

    def on_chunk_header(self) -> None:
        self._unseen = 0

    def on_body(self, data: bytes) -> None:
        self._unseen = 0
        if self._is_deaf:
            return
        self._size += len(data)
        self._owner.held_bytes += len(data)
        self._body += data
        if self._size > self._owner.limits.body_bytes:
            self._too_large()
        elif self._owner.held_bytes > self._owner.limits.held_bytes:
            self._refuse(failure(OverloadedError("too much is being sent at once", retry_after_s=1.0)))

    def on_message_complete(self) -> None:
        if self._is_deaf:
            return
        self._stop_waiting()
        self._is_within = False
        path, query = target(self._url)
        body = bytes(self._body)
        # From here on the exchange holds it.
        self._body, self._size = bytearray(), 0
        method, limit = self._parser.get_method().decode(), self._owner.limits.body_bytes
        exchange = Exchange(method, path, query, self._headers, body, self._answered, limit)
        # Of older clients none is told how to know that the connection stays.
        is_old = self._parser.get_http_version() == "1.0"
        is_kept = not is_old and self._parser.should_keep_alive()
        # What follows an upgrade may be another protocol.
        is_kept = is_kept and not self._parser.should_upgrade()
        self._waiting.append((exchange, is_kept, is_old))
        self._ahead_bytes += len(body)
        # Not sooner: the answer before this one would be the last, and close.
        if self._owner.answered:
            self._owner.settle()
        if self._current is None and not self._transport.is_closing():
            self._next()
        if self._waiting:
            self._regulate()

    # The way back

    def close_if_idle(self) -> None:
        # Who is refused has a while to read why.
        if self._current is None and not self._waiting and not self._is_within and not self._is_deaf:
            self._leave()

    def abort(self) -> None:
        self._transport.abort()

    def _next(self) -> None:
        if self._is_stuck:
            return
        if self._waiting:
            self._current, self._is_kept, self._is_old = self._waiting.popleft()
            self._ahead_bytes -= len(self._current.body)
            if self._is_paused:
                self._regulate()
            self._owner.app(self._current)
        elif self._refusal is not None:
            self._say_why()
        elif not self._is_within:
            self._wait(self._owner.limits.idle_s, self._leave)

    def _answered(self, response: Response) -> None:
        """From any thread, which sends it where others may follow; the loop does the rest."""
        exchange, owner = self._current, self._owner
        announce = partial(owner.answered.append, (self, response))
        is_followed = self._is_kept and not self._is_deaf and not owner.is_draining
        if exchange is not None and is_followed and self._outlet.is_plain and not isinstance(response, Streamed):
            self._outlet.send(_written(response, exchange), announce)
        else:
            announce()
        try:
            self._loop.call_soon_threadsafe(owner.settle)
        except RuntimeError:
            logger.debug("the loop is closed, and with it the connection")

    def settle(self, response: Response) -> None:
        """Write what was not sent, count it, and go on to the next."""
        if isinstance(response, Streamed):
            self._begin_stream(response)
            return
        was_sent = self._outlet.settle()
        exchange, self._current = self._current, None
        if exchange is None:
            return
        self._owner.held_bytes -= len(exchange.body)
        if self._transport.is_closing():
            exchange.was_sent(response)
            return
        # Who was sent its answer was not told that it is the last, and may have asked again.
        is_last = self._is_last(may_close=not was_sent)
        self._outlet.write(b"" if was_sent else _written(response, exchange, is_keeping=not is_last))
        exchange.was_sent(response)
        self._go_on(is_last)

    def _is_last(self, *, may_close: bool) -> bool:
        """Whether nothing follows the answer that is given now."""
        is_ending = self._is_deaf or (self._owner.is_draining and may_close)
        return not self._is_kept or (is_ending and not self._waiting and self._refusal is None)

    def _go_on(self, is_last: bool) -> None:
        if not is_last:
            self._next()
            if self._owner.is_drained:
                self.close_if_idle()
        elif self._is_deaf and not self._has_ended:
            self._linger()
        else:
            self._leave()

    # Answers in parts

    def _begin_stream(self, response: Streamed) -> None:
        exchange, stream = self._current, response.stream
        if exchange is None or self._transport.is_closing():
            stream.cut()  # whoever waits is told when the connection is lost
            return
        self._stream, self._is_last_stream = stream, self._is_last(may_close=True)
        # An older client knows the end by that of the connection.
        framing = b"" if self._is_old else CHUNKED
        is_keeping = not self._is_last_stream
        self._outlet.write(to_bytes(response, is_keeping, has_body=False, request=exchange.id, framing=framing))
        stream.follow(self._parts_came)
        self._send_parts()

    def _parts_came(self) -> None:
        """From any thread."""
        with suppress(RuntimeError):  # the loop is closed, and with it the connection
            self._loop.call_soon_threadsafe(self._send_parts)

    def _send_parts(self) -> None:
        """What there is of them, unless the client has yet to take what it was sent."""
        exchange, stream = self._current, self._stream
        if exchange is None or stream is None or self._transport.is_closing():
            return
        if stream.is_overfull:
            self.abort()
        elif not self._is_stuck:
            data, is_over = stream.take()
            data = data if self._is_old or not data else chunk(data)
            data += LAST_CHUNK if is_over and not self._is_old else b""
            self._outlet.write(data if exchange.method != "HEAD" else b"")
            if is_over:
                self._end_stream(exchange, stream)

    def _end_stream(self, exchange: Exchange, stream: Stream) -> None:
        self._current = self._stream = None
        self._owner.held_bytes -= len(exchange.body)
        exchange.was_sent(Response(stream.status, b""))
        self._go_on(self._is_last_stream or self._is_last(may_close=False))

    def _refuse(self, response: Response) -> None:
        """Answer what cannot be read to its end, after all that came before it, and close."""
        if self._is_deaf:
            return
        if not self._is_within:  # what is there is of the request before
            self._reset()
        what = f"{self._parser.get_method().decode()} {target(self._url)[0]}" if self._url else "HTTP"
        self._refused = request_id(self._headers.get(REQUEST_ID, ""))
        self._owner.watch(Seen(self._refused, what, "", response.status, time.monotonic() - self._begin, None))
        self._is_deaf, self._is_within = True, False
        self._stop_waiting()
        self._reset()
        self._refusal = response
        if self._current is None and not self._waiting:
            self._next()

    def _say_why(self) -> None:
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            self._outlet.write(to_bytes(refusal, is_keeping=False, has_body=True, request=self._refused))
            self._linger()

    def _linger(self) -> None:
        """Who still sends would be reset, were it closed now, before it has read its answer."""
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._wait(_LINGER_S, self._leave)

    def _unwanted(self) -> Response | None:
        path, _ = target(self._url)
        return self._owner.refusal(self._parser.get_method().decode(), path, self._headers)

    def _too_large(self) -> None:
        limit = self._owner.limits.body_bytes
        self._refuse(failure(TooLargeError(f"the body is larger than {limit} bytes")))

    def _refuse_headers(self) -> None:
        self._refuse(Response.json({"error": "the headers are too large"}, 431))

    # Time and size

    def _reset(self) -> None:
        self._owner.held_bytes -= self._size
        self._begin = time.monotonic()
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self._size = self._header_bytes = self._header_count = self._unseen = 0
        self._is_headed = False

    def _regulate(self) -> None:
        """Read not too far ahead, and nothing from a client that does not read."""
        is_far_ahead = len(self._waiting) > _MOST_AHEAD or self._ahead_bytes > _MOST_AHEAD_BYTES
        is_paused = self._is_stuck or is_far_ahead
        if is_paused != self._is_paused and not self._has_ended and not self._transport.is_closing():
            self._is_paused = is_paused
            if is_paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _give_up(self) -> None:
        """A request does not come to its end; while another is being answered, nobody looks for it."""
        read_s = self._owner.limits.read_s
        if self._current is not None or self._waiting:
            self._wait(read_s, self._give_up)
        else:
            self._refuse(Response.json({"error": f"the request did not come to its end in {read_s:g} s"}, 408))

    def _probe(self) -> None:
        """An interim response means nothing to a client that waits, and tells of one that is gone: it breaks."""
        # Who is sent an answer in parts is found to be gone by them.
        if not self._is_stuck and self._stream is None and self._parser.get_http_version() != "1.0":
            self._outlet.write(CONTINUE)
        self._wait(_PROBE_S, self._probe)

    def _leave(self) -> None:
        self._stop_waiting()
        self._transport.close()
        self._watch_reader()

    def _watch_reader(self) -> None:
        """Cut off whoever takes nothing of what it was sent."""
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._write_timer = self._loop.call_later(self._owner.limits.read_s, self._check_reader, self._outlet.unread())

    def _check_reader(self, before: int) -> None:
        if self._outlet.unread() < before:
            self._watch_reader()
        elif self._is_stuck or self._transport.is_closing():
            self._transport.abort()

    def _wait(self, seconds: float, then: Callable[[], None]) -> None:
        self._stop_waiting()
        self._timer = self._loop.call_later(seconds, then)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _written(response: Response, exchange: Exchange, *, is_keeping: bool = True) -> bytes:
    return to_bytes(response, is_keeping, has_body=exchange.method != "HEAD", request=exchange.id)
