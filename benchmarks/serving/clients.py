"""Clients that each wait for their answers before they ask again, in one process: the same for all contenders."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httptools
import numpy as np
import uvloop


@dataclass(slots=True)
class Answers:
    """What came back, in the order in which it came."""

    places: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    bad: list[tuple[int, bytes]] = field(default_factory=list)
    elapsed_s: float = 0.0
    # The share of one core that the clients themselves took.
    client_share: float = 0.0

    @property
    def per_second(self) -> float:
        return len(self.places) / self.elapsed_s

    def percentile_ms(self, level: float) -> float:
        return float(np.percentile(self.seconds, level)) * 1e3


# Of an answer: which request it is to, its head in lower case, its body.
OnAnswer = Callable[[int, bytes, bytes], None]


def closed_loop(
    port: int,
    requests: Iterator[tuple[int, bytes]],
    *,
    clients: int,
    seconds: float | None = None,
    ahead: int = 1,
    on_answer: OnAnswer = lambda *_: None,
) -> Answers:
    """Until the requests are over, or the time; `ahead`: how many a client sends before it has the first answer."""
    return uvloop.run(_closed_loop(port, requests, clients, seconds, ahead, on_answer))


async def _closed_loop(
    port: int,
    requests: Iterator[tuple[int, bytes]],
    clients: int,
    seconds: float | None,
    ahead: int,
    on_answer: OnAnswer,
) -> Answers:
    loop, answers = asyncio.get_running_loop(), Answers()
    begin, used = time.perf_counter(), time.process_time()
    until = begin + seconds if seconds is not None else float("inf")
    made = []
    for _ in range(clients):
        client = _Client(requests, until, ahead, answers, on_answer)
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)
        made.append(client)
    await asyncio.gather(*(client.is_done for client in made))
    answers.elapsed_s = time.perf_counter() - begin
    answers.client_share = (time.process_time() - used) / answers.elapsed_s
    return answers


class _Client(asyncio.Protocol):
    def __init__(
        self,
        requests: Iterator[tuple[int, bytes]],
        until: float,
        ahead: int,
        answers: Answers,
        on_answer: OnAnswer,
    ) -> None:
        self._requests, self._until, self._ahead = requests, until, ahead
        self._answers, self._on_answer = answers, on_answer
        self._parser = httptools.HttpResponseParser(self)
        self._under_way: deque[tuple[int, float]] = deque()
        self._head: list[bytes] = []
        self._body: list[bytes] = []
        self.is_done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        self._answers.bad += [(0, b"the connection broke")] * len(self._under_way)
        if not self.is_done.done():
            self.is_done.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        self._send()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head.append(b"\r\n%s: %s" % (name.lower(), value))

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        place, sent = self._under_way.popleft()
        head, body = b"".join(self._head), b"".join(self._body)
        self._head, self._body = [], []
        status = self._parser.get_status_code()
        if status == 200:
            self._answers.places.append(place)
            self._answers.seconds.append(time.perf_counter() - sent)
            self._on_answer(place, head, body)
        else:
            self._answers.bad.append((status, body))

    def _send(self) -> None:
        """As many as may be ahead, in one write."""
        now, wanted = time.perf_counter(), self._ahead - len(self._under_way)
        batch: list[bytes] = []
        while len(batch) < wanted and now < self._until and (request := next(self._requests, None)) is not None:
            self._under_way.append((request[0], now))
            batch.append(request[1])
        if batch:
            self._transport.write(b"".join(batch))
        elif not self._under_way:
            self._transport.close()
