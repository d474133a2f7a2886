"""Serve HTTP/1.1 connections with httptools, without a coroutine, task or scope dictionary per request.

Measured against uvicorn with the same application: docs/decisions/http.md.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from typing import Any

from hasten.core.errors import InputError, OverloadedError, TooLargeError
from hasten.server.http.encoding import CHUNKED, CONTINUE, LAST_CHUNK, encode_chunk, encode_response, split_target
from hasten.server.http.exchange import (
    REQUEST_ID,
    Exchange,
    Response,
    StreamedResponse,
    declared_bytes,
    error_response,
    has_large_body,
)
from hasten.server.http.known_heads import RequestHead
from hasten.server.http.parser import PartialRequest, RequestParser
from hasten.server.http.socket_writer import SocketWriter
from hasten.server.http.state import HttpState
from hasten.server.http.stream import Stream
from hasten.server.http.timer import Timer
from hasten.server.request_records import RequestRecord, request_id

logger = logging.getLogger("hasten")

# Requests a client may pipeline before reading from it pauses, which also means not noticing that it disconnects.
_MAX_PIPELINED = 64
_MAX_PIPELINED_BYTES = 2**20
# Time for a client that was rejected, or asked for a tunnel, to read its response and close.
_LINGER_S = 2.0
# How often to check whether a client that has closed its sending side is still connected.
_PROBE_S = 0.25


class ReadState(Enum):
    """The state of the read side: what the connection accepts from the client."""

    IDLE = auto()
    IN_REQUEST = auto()
    # The last request that will be answered was received; what follows is ignored.
    LAST_REQUEST = auto()
    # The rest of the input is discarded: a request was rejected, a tunnel was requested, or the connection is lost.
    CLOSED = auto()
    # The client has closed its sending side.
    EOF = auto()


class Connection(asyncio.Protocol):
    """One client connection. Requests are answered one at a time, in the order in which they arrive."""

    def __init__(self, server: HttpState) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._parser = RequestParser(self)
        self._transport: Any = None
        # Limits the time in which the client sends, and the time in which it reads.
        self._timer, self._write_timer = Timer(self._loop), Timer(self._loop)
        # Pipelined requests, each with whether others may follow and whether its client speaks HTTP/1.0. A rejection
        # comes after all of them.
        self._waiting: deque[tuple[Exchange, bool, bool]] = deque()
        self._waiting_bytes = 0
        self._current: Exchange | None = None
        self._keep_alive, self._is_http10 = True, False
        # The streamed response that is being sent.
        self._stream: Stream | None = None
        # The encoded response to a request that was rejected.
        self._rejection = b""
        self._read_state = ReadState.IDLE
        # What was received last, if it begins with a request.
        self._received = b""
        self._read_paused = self._write_paused = False

    @property
    def is_receiving(self) -> bool:
        """Return whether a request has begun and not ended."""
        return self._read_state is ReadState.IN_REQUEST

    @property
    def _accepts_input(self) -> bool:
        return self._read_state in (ReadState.IDLE, ReadState.IN_REQUEST)

    @property
    def _is_read_side_closed(self) -> bool:
        return self._read_state in (ReadState.CLOSED, ReadState.EOF)

    # asyncio.Protocol

    def connection_made(self, transport: Any) -> None:
        self._transport, self._writer = transport, SocketWriter(transport)
        server = self._server
        server.open.add(self)
        if len(server.open) > 2 * server.limits.connections:
            transport.abort()
        elif len(server.open) > server.limits.connections or server.is_draining:
            self._reject(Response.json({"error": "too many connections"}, 503))
        else:
            self._timer.start(server.limits.idle_s, self.close)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.open.discard(self)
        self._writer.close()
        for timer in (self._timer, self._write_timer):
            timer.stop()
            timer.cancel()
        if self._stream is not None:
            self._stream.discard()
            self._stream = None
        # A response that was sent is still to be settled, and is counted then.
        if not self._writer.has_sent and (current := self._release_current()) is not None:
            current.disconnect()
        for exchange, _, _ in self._waiting:
            self._server.release(exchange)
            exchange.disconnect()
        self._waiting.clear()
        self._read_state = ReadState.CLOSED
        self._reset_partial()

    def data_received(self, data: bytes) -> None:
        if not self._accepts_input:
            return
        parser, httptools = self._parser, self._parser.httptools
        self._received = b""
        if self._read_state is ReadState.IDLE and not parser.partial.unparsed_bytes:
            if self._receive_known(data):
                return
            self._received = data
        try:
            is_http = parser.feed(data)
        except httptools.HttpParserCallbackError:
            logger.exception("Failed to receive a request.")
            self._reject(Response.json({"error": "internal server error: see the server's log"}, 500))
        except httptools.HttpParserError as error:
            self._reject(error_response(InputError(f"invalid HTTP request: {error}")))
        else:
            if not is_http:
                self._read_state = ReadState.CLOSED
            if parser.partial.has_large_headers:
                self.headers_too_large()
            elif self.is_receiving and not self._timer.is_set:
                self._timer.start(self._server.limits.read_s, self._read_timed_out)

    def eof_received(self) -> bool:
        """Keep a half-closed connection open while responses are pending, except with TLS, which cannot half-close."""
        self._read_state = ReadState.EOF
        has_pending = self._current is not None or bool(self._waiting)
        if self._transport.get_extra_info("ssl_object") is not None:
            self.close()
            return False
        if not has_pending:
            self._server.close_soon(self)
            return True
        self._timer.start(_PROBE_S, self._probe)
        return True

    def pause_writing(self) -> None:
        self._write_paused = True
        self._regulate_reading()
        self._watch_write_progress()

    def resume_writing(self) -> None:
        self._write_paused = False
        self._regulate_reading()
        if self._current is None and not self._transport.is_closing():
            self._next()
        self._send_parts()

    # RequestHandler

    def request_started(self) -> None:
        if self._accepts_input:
            self._reset_partial()
            self._read_state = ReadState.IN_REQUEST
            self._timer.stop()

    def headers_too_large(self) -> None:
        self._reject(Response.json({"error": "the headers are too large"}, 431))

    def headers_received(self) -> None:
        if not self._accepts_input:
            return
        parser, headers = self._parser, self._parser.partial.headers
        if fault := parser.partial.fault(is_http10=parser.is_http10):
            self._reject(error_response(InputError(fault)))
        elif declared_bytes(headers) > self._server.limits.body_bytes:
            self._reject_large_body()
        elif has_large_body(headers) and (rejection := self._server.reject_early(parser.method, parser.path, headers)):
            self._reject(rejection)
        elif "expect" in headers and not parser.is_http10:
            parser.partial.expects_continue = headers["expect"].lower() == "100-continue"
            if self._current is None and not self._waiting:
                self._send_continue()

    def body_received(self, data: bytes) -> None:
        if not self._accepts_input:
            return
        body = self._parser.partial.body
        if len(body) + len(data) > self._server.limits.body_bytes:
            self._reject_large_body()
            return
        try:
            self._server.reserve(len(data))
        except OverloadedError as error:
            self._reject(error_response(error))
        else:
            body += data

    def request_received(self) -> None:
        if not self._accepts_input:
            return
        parser = self._parser
        request, parser.partial = parser.partial, PartialRequest()
        # Responses carry no "connection: keep-alive", without which an HTTP/1.0 client expects the connection to close.
        is_http10 = parser.is_http10
        keep_alive = not is_http10 and parser.keep_alive
        head = RequestHead(parser.method, *split_target(request.url), request.headers)
        received, self._received = self._received, b""
        if received and keep_alive:
            self._server.heads.add(received, head, len(request.body))
        self._take(head, bytes(request.body), keep_alive=keep_alive, is_http10=is_http10)

    def _receive_known(self, data: bytes) -> bool:
        """Take a request whose head is the same as that of an earlier one; return whether it was."""
        head, size = self._server.heads.find(data)
        if head is None:
            return False
        body = data[size:]
        try:
            self._server.reserve(len(body))
        except OverloadedError:
            return False  # rejected as any other request
        self._take(head, body, keep_alive=True, is_http10=False)
        return True

    def _take(self, head: RequestHead, body: bytes, *, keep_alive: bool, is_http10: bool) -> None:
        """Queue a complete request, whose body is reserved, and answer it if it is the first."""
        self._timer.stop()
        exchange = Exchange(
            head.method,
            head.path,
            head.query,
            head.headers,
            body,
            self._on_response,
            self._server.limits.body_bytes,
            reserved_bytes=len(body),
            reserve=self._server.reserve,
        )
        self._read_state = ReadState.IDLE if keep_alive else ReadState.LAST_REQUEST
        self._waiting.append((exchange, keep_alive, is_http10))
        self._waiting_bytes += len(body)
        # Not before the request is queued: otherwise the previous response would be the last, and close the connection.
        self._server.settle()
        if self._current is None and not self._transport.is_closing():
            self._next()
        self._regulate_reading()

    def _send_continue(self) -> None:
        if self._parser.partial.expects_continue:
            self._parser.partial.expects_continue = False
            self._writer.write(CONTINUE)

    def _reject_large_body(self) -> None:
        limit = self._server.limits.body_bytes
        self._reject(error_response(TooLargeError(f"the body is larger than {limit} bytes (--max-body)")))

    # ManagedConnection

    def close_if_idle(self) -> None:
        # A rejected client (ReadState.CLOSED) has some time to read the reason.
        if self._current is None and not self._waiting and self._read_state is ReadState.IDLE:
            self.close()

    def close(self) -> None:
        self._timer.stop()
        self._transport.close()
        # The kernel sends the rest of what was written without a buffer here.
        if self._transport.get_write_buffer_size():
            self._watch_write_progress()

    def abort(self) -> None:
        self._transport.abort()

    def settle(self, response: Response) -> None:
        """Write what was not sent, record the exchange, and go on to the next request."""
        if isinstance(response, StreamedResponse):
            self._begin_stream(response)
            return
        was_sent = self._writer.settle()
        exchange = self._release_current()
        if exchange is None:
            return
        if self._transport.is_closing():
            exchange.record(response)
            return
        # A response that was already sent did not announce that the connection closes: the client may have sent more.
        is_last = self._is_last(may_close=not was_sent)
        self._writer.write(b"" if was_sent else _encode(response, exchange, keep_alive=not is_last))
        exchange.record(response)
        self._go_on(is_last)

    # Responses

    def _next(self) -> None:
        if self._write_paused:
            return
        if self._waiting:
            self._current, self._keep_alive, self._is_http10 = self._waiting.popleft()
            self._waiting_bytes -= len(self._current.body)
            self._regulate_reading()
            self._server.in_flight += 1
            self._server.app(self._current)
        elif self._rejection:
            self._writer.write(self._rejection)
            self._rejection = b""
            self._linger()
        elif self.is_receiving:
            self._send_continue()
        elif self._read_state is ReadState.IDLE:
            self._timer.start(self._server.limits.idle_s, self.close)

    def _on_response(self, response: Response) -> None:
        """Take the response from any thread, which also sends it if load is light and more requests may follow."""
        exchange, server = self._current, self._server
        announce = partial(server.answered.append, (self, response))
        stays_open = self._keep_alive and not self._is_read_side_closed and not server.is_draining
        is_sendable = self._writer.is_plain and not isinstance(response, StreamedResponse)
        if exchange is not None and stays_open and is_sendable and server.is_lightly_loaded:
            self._writer.send(_encode(response, exchange), announce)
        else:
            announce()
        server.schedule_settle(self._loop)

    def _release_current(self) -> Exchange | None:
        exchange, self._current = self._current, None
        if exchange is not None:
            self._server.in_flight -= 1
            self._server.release(exchange)
        return exchange

    def _is_last(self, *, may_close: bool) -> bool:
        """Return whether the current response is the last of the connection."""
        is_ending = self._is_read_side_closed or (self._server.is_draining and may_close)
        return not self._keep_alive or (is_ending and not self._waiting and not self._rejection)

    def _go_on(self, is_last: bool) -> None:
        if not is_last:
            self._next()
            if self._server.is_drained:
                self.close_if_idle()
        elif self._read_state is ReadState.CLOSED:
            self._linger()
        else:
            self.close()

    # Streamed responses

    def _begin_stream(self, response: StreamedResponse) -> None:
        exchange, stream = self._current, response.stream
        if exchange is None or self._transport.is_closing():
            stream.discard()  # the exchange is informed when the connection is lost
            return
        # The headers announce whether the connection closes after the stream.
        self._stream, self._keep_alive = stream, not self._is_last(may_close=True)
        # An HTTP/1.0 client knows no chunks: the body ends with the connection.
        framing = b"" if self._is_http10 else CHUNKED
        head = encode_response(response, self._keep_alive, has_body=False, request_id=exchange.id, framing=framing)
        self._writer.write(head)
        stream.follow(self._on_parts)
        self._send_parts()

    def _on_parts(self) -> None:
        """Have the loop send new parts of the stream. Thread-safe."""
        with suppress(RuntimeError):  # the loop is closed, and with it the connection
            self._loop.call_soon_threadsafe(self._send_parts)

    def _send_parts(self) -> None:
        """Send what the stream holds, unless the client has yet to read what it was sent."""
        exchange, stream = self._current, self._stream
        if exchange is None or stream is None or self._transport.is_closing():
            return
        if stream.is_overfull:
            self.abort()
        elif not self._write_paused:
            data, is_ended = stream.read()
            data = data if self._is_http10 or not data else encode_chunk(data)
            data += LAST_CHUNK if is_ended and not self._is_http10 else b""
            self._writer.write(data if exchange.method != "HEAD" else b"")
            if is_ended:
                self._end_stream(exchange, stream)

    def _end_stream(self, exchange: Exchange, stream: Stream) -> None:
        self._stream = None
        self._release_current()
        exchange.record(Response(stream.status, b""))
        self._go_on(self._is_last(may_close=False))

    # Rejections

    def _reject(self, response: Response) -> None:
        """Answer a request that is not read to its end, after all requests before it, and close the connection."""
        if not self._accepts_input or self._transport.is_closing():
            return
        if not self.is_receiving:  # no part of a request was parsed: its time begins now
            self._reset_partial()
        request = self._parser.partial
        name = f"{self._parser.method} {self._parser.path}" if request.url else "HTTP"
        identifier = request_id(request.headers.get(REQUEST_ID, ""))
        seconds = time.monotonic() - request.started
        self._server.on_record(RequestRecord(identifier, name, "", response.status, seconds, None))
        self._read_state = ReadState.CLOSED
        self._timer.stop()
        self._reset_partial()
        self._rejection = encode_response(response, keep_alive=False, has_body=True, request_id=identifier)
        if self._current is None and not self._waiting:
            self._next()

    def _linger(self) -> None:
        """Close later: closing now would reset a client that is still sending before it has read its response."""
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._timer.start(_LINGER_S, self.close)

    # Flow control and timeouts

    def _reset_partial(self) -> None:
        self._server.buffered_bytes.remove(len(self._parser.partial.body))
        self._parser.partial = PartialRequest()

    def _regulate_reading(self) -> None:
        """Pause reading from a client that pipelines too much or does not read its responses."""
        is_far_ahead = len(self._waiting) > _MAX_PIPELINED or self._waiting_bytes > _MAX_PIPELINED_BYTES
        should_pause = self._write_paused or is_far_ahead
        is_readable = self._read_state is not ReadState.EOF and not self._transport.is_closing()
        if should_pause != self._read_paused and is_readable:
            self._read_paused = should_pause
            if should_pause:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _read_timed_out(self) -> None:
        """Reject an incomplete request, but not while another is being processed: reading may be paused then."""
        read_s = self._server.limits.read_s
        if self._current is not None or self._waiting:
            self._timer.start(read_s, self._read_timed_out)
        else:
            self._reject(Response.json({"error": f"the request was not complete within {read_s:g} s"}, 408))

    def _probe(self) -> None:
        """Send an interim response: a waiting client ignores it, and to a disconnected one the write fails."""
        # A client that is sent a stream is found to be disconnected by its parts.
        if not self._write_paused and self._stream is None and not self._parser.is_http10:
            self._writer.write(CONTINUE)
        self._timer.start(_PROBE_S, self._probe)

    def _watch_write_progress(self) -> None:
        """Abort the connection if the client reads nothing for `read_s`."""
        check = partial(self._check_write_progress, self._writer.unread_bytes())
        self._write_timer.start(self._server.limits.read_s, check)

    def _check_write_progress(self, unread_before: int) -> None:
        if self._writer.unread_bytes() < unread_before:
            self._watch_write_progress()
        elif self._write_paused or self._transport.is_closing():
            self._transport.abort()


def _encode(response: Response, exchange: Exchange, *, keep_alive: bool = True) -> bytes:
    return encode_response(response, keep_alive, has_body=exchange.method != "HEAD", request_id=exchange.id)
