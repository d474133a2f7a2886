"""Texts as protocols give them: whole, or piece by piece as server-sent events while they are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from hasten.core.errors import HastenError
from hasten.core.generation import Finish
from hasten.generation.rows import Piece
from hasten.server.engine import Measured
from hasten.server.exchange import Response
from hasten.server.routes import Call
from hasten.server.stream import EVENTS, Stream
from hasten.server.writing import Written

Texts = Sequence[tuple[str, Written]]
Answer = TypeVar("Answer")

# What lies between would otherwise keep events until there are many.
_HEAD = Response(200, b"", f"{EVENTS}; charset=utf-8", {"cache-control": "no-cache", "x-accel-buffering": "no"})
OnPiece = Callable[[int, Piece], None]
OnDone = Callable[[Sequence[Written] | HastenError, Measured | None], None]


class Events:
    """Begun with the first of them, so that what goes wrong before that has a status of its own."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._stream: Stream | None = None

    def send(self, *values: object) -> None:
        self._write(b"".join(b"data: %s\n\n" % msgspec.json.encode(value) for value in values))

    def end(self, measured: Measured | None, last: bytes = b"") -> None:
        self._write(last)
        self._call.exchange.measured = measured
        if self._stream is not None:
            self._stream.end()

    def fail(self, error: HastenError) -> None:
        exchange = self._call.exchange
        if self._stream is None:
            exchange.fail(error)
            return
        self.send(exchange.tell(error))
        self._stream.end(exchange.status(error))

    def _write(self, data: bytes) -> None:
        if self._stream is None:
            self._stream = self._call.exchange.stream(_HEAD)
        self._stream.write(data)


class Whole:
    """Collects the pieces, for whoever wants all of them at once."""

    def __init__(self, done: Callable[[Texts | HastenError, Measured | None], None]) -> None:
        self._done = done
        self._pieces: dict[int, list[str]] = {}

    def on_piece(self, place: int, piece: Piece) -> None:
        self._pieces.setdefault(place, []).append(piece.text)

    def on_done(self, outcome: Sequence[Written] | HastenError, measured: Measured | None) -> None:
        if isinstance(outcome, HastenError):
            self._done(outcome, measured)
        else:
            self._done([("".join(self._pieces[place]), one) for place, one in enumerate(outcome)], measured)


def whole(call: Call, present: Callable[[Texts], object]) -> Whole:
    """Replied to with what is made of all texts."""

    def done(texts: Texts | HastenError, measured: Measured | None) -> None:
        call.done(texts if isinstance(texts, HastenError) else Response.json(present(texts)), measured)

    return Whole(done)


def reason(finish: Finish | None) -> str | None:
    return None if finish is None else finish.value
