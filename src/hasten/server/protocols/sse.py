"""Send generated text to a client: complete, or as server-sent events while it is generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from hasten.core.errors import HastenError
from hasten.core.generation_types import SamplingParams
from hasten.server.http.exchange import Response
from hasten.server.http.stream import EVENTS, Stream
from hasten.server.models.generative_model import CompletedTexts, GenerativeModel
from hasten.server.protocols.routes import HttpCall
from hasten.server.request_records import RequestStats

# These headers keep proxies from buffering events.
_HEAD = Response(200, b"", f"{EVENTS}; charset=utf-8", {"cache-control": "no-cache", "x-accel-buffering": "no"})


class EventStream:
    """Server-sent events. The response begins with the first event, so that an error before it has its own status."""

    def __init__(self, call: HttpCall) -> None:
        self._call = call
        self._stream: Stream | None = None

    def send(self, *values: object) -> None:
        """Send each value as an event with JSON data."""
        self._write(b"".join(b"data: %s\n\n" % msgspec.json.encode(value) for value in values))

    def end(self, stats: RequestStats | None, last: bytes = b"") -> None:
        """Send the last bytes and end the response."""
        self._write(last)
        self._call.exchange.stats = stats
        if self._stream is not None:
            self._stream.end()

    def fail(self, error: HastenError) -> None:
        """Reply with the error or, if events were sent already, send it as the last event."""
        exchange = self._call.exchange
        if self._stream is None:
            exchange.fail(error)
            return
        self.send(exchange.error_body(error))
        self._stream.end(exchange.error_status(error))

    def _write(self, data: bytes) -> None:
        if self._stream is None:
            self._stream = self._call.exchange.stream(_HEAD)
        self._stream.write(data)


def reply_with_texts(
    call: HttpCall,
    model: GenerativeModel,
    prompts: Sequence[object],
    samplings: Sequence[SamplingParams],
    present: Callable[[CompletedTexts], object],
) -> None:
    """Generate texts, and reply with what `present` makes of them once they are complete."""

    def done(texts: CompletedTexts | HastenError, stats: RequestStats | None) -> None:
        call.done(texts if isinstance(texts, HastenError) else Response.json(present(texts)), stats)

    call.exchange.on_close = model.generate(prompts, samplings, done)
