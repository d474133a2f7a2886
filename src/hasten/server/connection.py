"""HTTP/1.1 over httptools, straight to the application: no coroutine, no task, no dictionary a request need not have.

Measured against uvicorn with the same application: docs/decisions/http.md.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from hasten.core.errors import InputError, OverloadedError, TooLargeError
from hasten.server.exchange import REQUEST_ID, Exchange, Response, Streamed, declared_bytes, failure, has_large_body
from hasten.server.incoming import Incoming, Reader
from hasten.server.outlet import Outlet
from hasten.server.stream import Stream
from hasten.server.timer import Timer
from hasten.server.watch import Seen, request_id
from hasten.server.wire import CHUNKED, CONTINUE, LAST_CHUNK, chunk, target, to_bytes

if TYPE_CHECKING:
    from hasten.server.connections import Connections

logger = logging.getLogger("hasten")

# What a client may send ahead of its answers before it is not read from any more, not even to see whether it leaves.
_MOST_AHEAD = 64
_MOST_AHEAD_BYTES = 2**20
# For who is refused, or would have a tunnel, to take its answer and close.
_LINGER_S = 2.0
# How often to find out whether a client that sends no more is still there.
_PROBE_S = 0.25


class Connection(asyncio.Protocol):
    def __init__(self, owner: Connections) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._reader = Reader(self)
        self._transport: Any = None
        # For the client to send, and for it to take what it was sent.
        self._timer, self._write_timer = Timer(self._loop), Timer(self._loop)
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
        # Nothing more is taken from it; it has sent all it will; the last that is answered has come; a request has
        # begun and not ended.
        self._is_deaf = self._has_ended = self._has_last = self._is_within = False
        # The client does not read what it is sent; it is not read from.
        self._is_stuck = self._is_paused = False

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
            self._timer.start(owner.limits.idle_s, self._leave)

    def connection_lost(self, error: Exception | None) -> None:
        self._owner.open.discard(self)
        self._outlet.close()
        self._timer.stop()
        self._write_timer.stop()
        if self._stream is not None:
            self._stream.cut()
            self._stream = None
        # One that was sent its answer is still to be settled, and is counted then.
        if not self._outlet.has_sent and (current := self._let_go()) is not None:
            current.leave()
        for exchange, _, _ in self._waiting:
            self._owner.held_bytes -= len(exchange.body)
            exchange.leave()
        self._waiting.clear()
        self._is_deaf = True
        self._reset()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        reader, httptools = self._reader, self._reader.httptools
        try:
            is_ours = reader.feed(data)
        except httptools.HttpParserCallbackError:
            logger.exception("a request could not be taken")
            self._refuse(Response.json({"error": "the server failed on this request; its log says why"}, 500))
        except httptools.HttpParserError as error:
            self._refuse(failure(InputError(f"this is not HTTP/1.1: {error}")))
        else:
            self._is_deaf = self._is_deaf or not is_ours
            if reader.incoming.has_large_headers:
                self.headers_too_large()
            elif self._is_within and not self._timer.is_set:
                self._timer.start(self._owner.limits.read_s, self._give_up)

    def eof_received(self) -> bool:
        """A client that has sent all it will may still wait for its answers, except where TLS cannot tell that."""
        self._is_deaf = self._has_ended = True
        self._is_within = False
        is_awaited = self._current is not None or bool(self._waiting)
        if not is_awaited or self._transport.get_extra_info("ssl_object") is not None:
            self._leave()
            return False
        self._timer.start(_PROBE_S, self._probe)
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

    # What comes in

    def request_began(self) -> None:
        if not self._is_deaf:
            self._reset()
            self._is_within = True
            self._timer.stop()

    def headers_too_large(self) -> None:
        self._refuse(Response.json({"error": "the headers are too large"}, 431))

    def headers_came(self) -> None:
        reader, headers = self._reader, self._reader.incoming.headers
        if declared_bytes(headers) > self._owner.limits.body_bytes:
            self._too_large()
        elif headers.get("transfer-encoding", "chunked").lower() != "chunked":
            self._refuse(failure(InputError("a body comes in chunks, and in no other transfer-encoding")))
        elif has_large_body(headers) and (refusal := self._owner.refusal(reader.method, reader.path, headers)):
            self._refuse(refusal)
        elif "expect" in headers and not self._is_deaf and not reader.is_old:
            reader.incoming.expects = headers["expect"].lower() == "100-continue"
            if self._current is None and not self._waiting:
                self._call_for_body()

    def body_came(self, data: bytes) -> None:
        if self._is_deaf:
            return
        body = self._reader.incoming.body
        body += data
        self._owner.held_bytes += len(data)
        if len(body) > self._owner.limits.body_bytes:
            self._too_large()
        elif self._owner.held_bytes > self._owner.limits.held_bytes:
            self._refuse(failure(OverloadedError("too much is being sent at once", retry_after_s=1.0)))

    def request_came(self) -> None:
        if self._is_deaf:
            return
        self._timer.stop()
        self._is_within = False
        reader, limit = self._reader, self._owner.limits.body_bytes
        incoming, reader.incoming = reader.incoming, Incoming()
        path, query = target(incoming.url)
        body = bytes(incoming.body)
        exchange = Exchange(reader.method, path, query, incoming.headers, body, self._answered, limit)
        # Of older clients none is told how to know that the connection stays.
        is_old = reader.is_old
        is_kept = not is_old and reader.is_kept
        self._has_last = not is_kept
        self._waiting.append((exchange, is_kept, is_old))
        self._ahead_bytes += len(body)
        # Not sooner: the answer before this one would be the last, and close.
        self._owner.settle()
        if self._current is None and not self._transport.is_closing():
            self._next()
        self._regulate()

    def _call_for_body(self) -> None:
        if self._reader.incoming.expects:
            self._reader.incoming.expects = False
            self._outlet.write(CONTINUE)

    def _too_large(self) -> None:
        limit = self._owner.limits.body_bytes
        self._refuse(failure(TooLargeError(f"the body is larger than {limit} bytes")))

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
            self._regulate()
            self._owner.under_way += 1
            self._owner.app(self._current)
        elif self._refusal is not None:
            self._say_why()
        elif self._is_within:
            self._call_for_body()
        elif not self._is_deaf:
            self._timer.start(self._owner.limits.idle_s, self._leave)

    def _answered(self, response: Response) -> None:
        """From any thread, which sends it where few are waited for and others may follow; the loop does the rest."""
        exchange, owner = self._current, self._owner
        announce = partial(owner.answered.append, (self, response))
        is_followed = self._is_kept and not self._is_deaf and not owner.is_draining
        is_whole = self._outlet.is_plain and not isinstance(response, Streamed)
        if exchange is not None and is_followed and is_whole and owner.has_few:
            self._outlet.send(_written(response, exchange), announce)
        else:
            announce()
        owner.call(self._loop)

    def settle(self, response: Response) -> None:
        """Write what was not sent, count it, and go on to the next."""
        if isinstance(response, Streamed):
            self._begin_stream(response)
            return
        was_sent = self._outlet.settle()
        exchange = self._let_go()
        if exchange is None:
            return
        if self._transport.is_closing():
            exchange.was_sent(response)
            return
        # Who was sent its answer was not told that it is the last, and may have asked again.
        is_last = self._is_last(may_close=not was_sent)
        self._outlet.write(b"" if was_sent else _written(response, exchange, is_keeping=not is_last))
        exchange.was_sent(response)
        self._go_on(is_last)

    def _let_go(self) -> Exchange | None:
        """Of what is being answered: it is over."""
        exchange, self._current = self._current, None
        if exchange is not None:
            self._owner.under_way -= 1
            self._owner.held_bytes -= len(exchange.body)
        return exchange

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
        self._stream = None
        self._let_go()
        exchange.was_sent(Response(stream.status, b""))
        self._go_on(self._is_last_stream or self._is_last(may_close=False))

    def _refuse(self, response: Response) -> None:
        """Answer what cannot be read to its end, after all that came before it, and close."""
        if self._is_deaf or self._has_last or self._transport.is_closing():
            return
        if not self._is_within:  # nothing of a request: its time begins now
            self._reset()
        incoming = self._reader.incoming
        what = f"{self._reader.method} {self._reader.path}" if incoming.url else "HTTP"
        self._refused = request_id(incoming.headers.get(REQUEST_ID, ""))
        self._owner.watch(Seen(self._refused, what, "", response.status, time.monotonic() - incoming.begin, None))
        self._is_deaf, self._is_within = True, False
        self._timer.stop()
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
        self._timer.start(_LINGER_S, self._leave)

    # Time and size

    def _reset(self) -> None:
        self._owner.held_bytes -= len(self._reader.incoming.body)
        self._reader.incoming = Incoming()

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
            self._timer.start(read_s, self._give_up)
        else:
            self._refuse(Response.json({"error": f"the request did not come to its end in {read_s:g} s"}, 408))

    def _probe(self) -> None:
        """An interim response means nothing to a client that waits, and tells of one that is gone: it breaks."""
        # Who is sent an answer in parts is found to be gone by them.
        if not self._is_stuck and self._stream is None and not self._reader.is_old:
            self._outlet.write(CONTINUE)
        self._timer.start(_PROBE_S, self._probe)

    def _leave(self) -> None:
        self._timer.stop()
        self._transport.close()
        self._watch_reader()

    def _watch_reader(self) -> None:
        """Cut off whoever takes nothing of what it was sent."""
        self._write_timer.start(self._owner.limits.read_s, partial(self._check_reader, self._outlet.unread()))

    def _check_reader(self, before: int) -> None:
        if self._outlet.unread() < before:
            self._watch_reader()
        elif self._is_stuck or self._transport.is_closing():
            self._transport.abort()


def _written(response: Response, exchange: Exchange, *, is_keeping: bool = True) -> bytes:
    return to_bytes(response, is_keeping, has_body=exchange.method != "HEAD", request=exchange.id)
