"""A model that writes, being served: texts wait for slots, are written a token at a time all together, and leave.

request ─▶ encoder: prompts to tokens ─▶ queue ─▶ writing thread: one token for everybody ─▶ pieces ─▶ … ─▶ the end
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from hasten.backends import Decoder
from hasten.core.errors import DeadlineError, HastenError, OverloadedError, StageError, UnavailableError
from hasten.core.generation import Finish, Sampling
from hasten.generation.prompts import Prompt
from hasten.generation.rows import Piece, Row
from hasten.generation.writing import Writer
from hasten.server.engine import Measured, RetiredError
from hasten.server.fairness import Seat, Turns
from hasten.server.queue import Limits

logger = logging.getLogger("hasten")

# Where models take turns, by tokens: a step reads all weights for one token of each text, which takes as long as to
# read several of a prompt, and counts as so many.
_STEP_TOKENS = 16
# How long a text takes is that of the last few: models are asked for a word, or for pages.
_MEMORY = 0.9
_CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A text to be written."""

    prompt: Prompt
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Written:
    """What became of it, but for the text itself, which was told piece by piece."""

    finish: Finish
    prompt_tokens: int
    tokens: int


@dataclass(slots=True, eq=False)
class WritingRequest:
    """What a protocol asks for. What it is told comes from a thread of the engine, which must not be made to wait."""

    # Runs off the event loop.
    read: Callable[[], Sequence[Asked]]
    # Which text it belongs to, and the piece; the last of each text says why it ends.
    on_piece: Callable[[int, Piece], None]
    # Called once: after all pieces, or where something went wrong.
    on_done: Callable[[Sequence[Written] | HastenError, Measured | None], None]
    deadline: float | None = None
    # Only its beginning has a deadline: whoever reads along sees that it goes on.
    is_stream: bool = False
    texts: list[_Text] = field(default_factory=list)
    arrived: float = field(default_factory=time.monotonic)
    encode_s: float = 0.0
    begun: float | None = None
    # Answered, or given up.
    is_over: bool = False

    def is_late(self, now: float) -> bool:
        is_free = self.is_stream and self.begun is not None
        return self.deadline is not None and now > self.deadline and not is_free


@dataclass(slots=True, eq=False)
class _Text:
    request: WritingRequest
    row: Row = field(init=False)
    begun: float | None = None
    written: Written | None = None


@dataclass(slots=True, eq=False)
class _Desk:
    """A decoder, the thread that owns it, and the texts it has in hand."""

    writer: Writer
    decoder: Decoder
    thread: threading.Thread = field(init=False)
    texts: list[_Text] = field(default_factory=list)
    # When it took the step it takes, or waits to take; None while there is nothing.
    busy_since: float | None = None


class WritingObserver:
    """What metrics see of texts in the making; the default sees nothing."""

    def on_begin(self, seconds: float) -> None:
        """The first piece of a text, so long after it was asked for."""

    def on_step(self, rows: int, seconds: float) -> None: ...

    def on_end(self, written: Written, seconds: float) -> None:
        """A text, so long after its first token was chosen."""


class WritingEngine:
    """One model's. `submit` and `cancel` may be called from any thread."""

    def __init__(
        self,
        desks: Sequence[tuple[Writer, Decoder]],
        limits: Limits,
        *,
        encoders: int = 1,
        seat: Seat | None = None,
        observer: WritingObserver | None = None,
    ) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._change = threading.Condition(self._lock)
        self._queue: deque[_Text] = deque()
        self._open: set[WritingRequest] = set()
        self._is_closing = False
        self._text_s = 0.0
        self._seat = seat or Turns(len(desks)).join()
        self._observer = observer or WritingObserver()
        self._encoders = ThreadPoolExecutor(encoders, "encode")
        self._desks = [_Desk(writer, decoder) for writer, decoder in desks]
        self._slots = sum(desk.decoder.slots for desk in self._desks)
        for desk in self._desks:
            desk.thread = threading.Thread(target=self._work, args=[desk], daemon=True)
            desk.thread.start()

    # What protocols call

    def submit(self, request: WritingRequest) -> None:
        with self._lock:
            if self._is_closing:
                raise RetiredError("the model is being taken away")
            self._admit()
            self._open.add(request)
        self._encoders.submit(self._read, request)

    def cancel(self, request: WritingRequest) -> None:
        """The client has left: its slots are others' before the next token. Nobody is told."""
        self._close(request)

    def expire(self, now: float) -> None:
        """Tell those that wait, and whose time is over, also while a step takes long."""
        with self._lock:
            late = {text.request for text in self._queue if text.request.is_late(now)}
        for request in late:
            self._fail(request, _too_late(request, now))

    @property
    def waiting(self) -> int:
        return len(self._queue) + sum(desk.writer.waiting for desk in self._desks)

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def running(self) -> int:
        """Texts that have a slot."""
        return sum(desk.writer.running for desk in self._desks)

    def hung_s(self, now: float) -> float:
        """How long the step that was begun first, and is not done, has been running or waiting for its turn."""
        return max((now - since for desk in self._desks if (since := desk.busy_since) is not None), default=0.0)

    def drain(self, timeout_s: float) -> bool:
        """Take nothing more, and wait until all that was taken is answered."""
        until = time.monotonic() + timeout_s
        with self._lock:
            self._is_closing = True
            self._change.notify_all()
            while self._open and (left := until - time.monotonic()) > 0:
                self._change.wait(left)
            return not self._open

    def close(self) -> None:
        with self._lock:
            self._is_closing = True
            left = set(self._open)
            self._change.notify_all()
        for request in left:
            self._fail(request, UnavailableError("the model was taken away before it was answered"))
        self._encoders.shutdown(wait=False, cancel_futures=True)
        for desk in self._desks:
            desk.thread.join(_CLOSE_S)
            if not desk.thread.is_alive():
                desk.decoder.close()
        if not any(desk.thread.is_alive() for desk in self._desks):
            self._seat.turns.retire(self._seat)

    # The way of a request

    def _admit(self) -> None:
        wait_s, limits = self._wait_s(), self._limits
        is_slow = limits.slowdown is not None and 0 < (limits.slowdown - 1) * self._text_s < wait_s
        if len(self._open) >= limits.requests or wait_s > limits.wait_s or is_slow:
            raise OverloadedError(f"{len(self._open)} requests are waiting", retry_after_s=max(0.1, wait_s))

    def _wait_s(self) -> float:
        """How long another would wait for a slot, by what texts took lately; nothing while there are free ones."""
        ahead = self.waiting
        return 0.0 if ahead + self.running < self._slots else (ahead + 1) / self._slots * self._text_s

    def _read(self, request: WritingRequest) -> None:
        try:
            if request.is_over:
                return
            if request.is_late(begin := time.monotonic()):
                raise DeadlineError("its time was over before it was begun")
            asked = request.read()
            texts = [_Text(request) for _ in asked]
            for place, (text, one) in enumerate(zip(texts, asked, strict=True)):
                text.row = self._row(place, text, one)
            request.encode_s = time.monotonic() - begin
            self._line_up(request, texts)
        except HastenError as error:
            self._fail(request, error)
        except BaseException as error:  # a panic of the tokenizer is not an Exception
            logger.exception("a prompt could not be read")
            self._fail(request, StageError(f"the prompt could not be read: {type(error).__name__}"))

    def _line_up(self, request: WritingRequest, texts: list[_Text]) -> None:
        with self._lock:
            if not request.is_over:
                request.texts = texts
                self._queue += texts
                self._change.notify_all()

    def _row(self, place: int, text: _Text, asked: Asked) -> Row:
        return self._desks[0].writer.row(
            asked.prompt.ids,
            asked.sampling,
            lambda piece: self._told(place, text, piece),
            continues=asked.prompt.continues,
        )

    def _told(self, place: int, text: _Text, piece: Piece) -> None:
        request, now = text.request, time.monotonic()
        if request.is_over:
            return
        if text.begun is None:
            text.begun = now
            self._observe(lambda: self._observer.on_begin(now - request.arrived))
        request.begun = request.begun or now
        try:
            request.on_piece(place, piece)
        except Exception:
            # Whoever asked is told no more; all others still are.
            logger.exception("a piece of a text could not be given")
            self._fail(request, StageError("the server failed on this request; its log says why"))
            return
        if piece.finish is not None:
            written = text.written = Written(piece.finish, len(text.row.prompt), len(text.row.ids))
            seconds = now - text.begun
            with self._lock:
                self._text_s = _MEMORY * self._text_s + (1 - _MEMORY) * seconds if self._text_s else seconds
            self._observe(lambda: self._observer.on_end(written, seconds))
            ended = [one.written for one in request.texts if one.written is not None]
            if len(ended) == len(request.texts):
                self._finish(request, ended, now)

    def _finish(self, request: WritingRequest, written: Sequence[Written], now: float) -> None:
        if self._close(request):
            begun = request.begun or now
            tokens = sum(one.prompt_tokens + one.tokens for one in written)
            queue_s = max(0.0, begun - request.arrived - request.encode_s)
            measured = Measured(len(written), tokens, request.encode_s, queue_s, now - begun)
            self._tell(request, written, measured)

    def _fail(self, request: WritingRequest, error: HastenError) -> None:
        if self._close(request):
            self._tell(request, error, None)

    def _tell(
        self, request: WritingRequest, outcome: Sequence[Written] | HastenError, measured: Measured | None
    ) -> None:
        try:
            request.on_done(outcome, measured)
        except Exception:
            logger.exception("an answer could not be given")

    def _close(self, request: WritingRequest) -> bool:
        """Whether it was open until now."""
        with self._lock:
            if request.is_over:
                return False
            request.is_over = True
            if any(text.written is None for text in request.texts):
                for text in request.texts:
                    text.row.cancel()
                if self._queue:
                    self._queue = deque(text for text in self._queue if text.request is not request)
            # They know each other: without this only the garbage collector, which stops all threads, frees them.
            request.texts = []
            self._open.discard(request)
            self._change.notify_all()
            return True

    # What its threads do

    def _work(self, desk: _Desk) -> None:
        while True:
            with self._lock:
                while not self._queue and desk.writer.is_idle:
                    if self._is_closing and not self._open:
                        return
                    self._change.wait()
                tokens = self._seat_texts(desk)
            self._step(desk, tokens)

    def _seat_texts(self, desk: _Desk) -> int:
        """Hand over as many as there are slots for: how many tokens the next step reads, about."""
        writer, tokens = desk.writer, _STEP_TOKENS
        while self._queue and writer.running + writer.waiting < desk.decoder.slots:
            text = self._queue.popleft()
            desk.texts.append(text)
            writer.add(text.row)
            tokens += len(text.row.prompt)
        return tokens

    def _step(self, desk: _Desk, tokens: int) -> None:
        desk.busy_since = time.monotonic()
        try:
            with self._seat.turn(tokens):
                begin = time.monotonic()
                desk.writer.step()
                seconds = time.monotonic() - begin
        except BaseException as error:
            self._isolate(desk, error)
        else:
            if rows := desk.writer.running:
                self._observe(lambda: self._observer.on_step(rows, seconds))
        finally:
            desk.busy_since = None
            desk.texts = [text for text in desk.texts if not text.row.is_over]
        now = time.monotonic()
        for request in {text.request for text in desk.texts if text.request.is_late(now)}:
            self._fail(request, _too_late(request, now))

    def _isolate(self, desk: _Desk, error: BaseException) -> None:
        """A prompt or logits that could not be read are one text's; other steps leave all caches as nobody knows."""
        logger.error("a step failed: %s", error)
        failure = error if isinstance(error, HastenError) else StageError(f"the model failed: {type(error).__name__}")
        # The writer cancels a row that it could not begin or go on with; we cancel those only whose request is over.
        at_fault = [text for text in desk.texts if text.row.is_cancelled and not text.request.is_over]
        for request in {text.request for text in at_fault or desk.texts}:
            self._fail(request, failure)
        try:
            desk.writer.free()
        except Exception:
            logger.exception("slots could not be freed")

    def _observe(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception:
            logger.exception("a text could not be counted")


def _too_late(request: WritingRequest, now: float) -> DeadlineError:
    what = "waited" if request.begun is None else "took"
    return DeadlineError(f"it {what} {now - request.arrived:.3f} s, longer than it was given")
