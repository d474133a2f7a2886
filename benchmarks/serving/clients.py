"""Closed-loop HTTP clients in one process; the same for all contenders."""

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
    """The responses, in order of arrival: the index and the latency of each request, and the errors."""

    indices: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    errors: list[tuple[int, bytes]] = field(default_factory=list)
    # The number of answers that each client got.
    per_client: list[int] = field(default_factory=list)
    elapsed_s: float = 0.0
    # The share of one core that the clients used.
    client_share: float = 0.0

    @property
    def per_second(self) -> float:
        """Return the throughput."""
        return len(self.indices) / self.elapsed_s

    def percentile_ms(self, level: float) -> float:
        """Return a percentile of the latency."""
        return float(np.percentile(self.seconds, level)) * 1e3


# The index of the request, the head of the response in lower case, and its body.
OnAnswer = Callable[[int, bytes, bytes], None]


def closed_loop(
    port: int,
    requests: Iterator[tuple[int, bytes]],
    *,
    clients: int,
    seconds: float | None = None,
    pipelined: int = 1,
    on_answer: OnAnswer = lambda *_: None,
) -> Answers:
    """Send requests until they or the time run out, up to `pipelined` at once per client."""
    return uvloop.run(_closed_loop(port, requests, clients, seconds, pipelined, on_answer))


async def _closed_loop(
    port: int,
    requests: Iterator[tuple[int, bytes]],
    clients: int,
    seconds: float | None,
    pipelined: int,
    on_answer: OnAnswer,
) -> Answers:
    loop, answers = asyncio.get_running_loop(), Answers()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    deadline = begin + seconds if seconds is not None else float("inf")
    protocols = []
    for _ in range(clients):
        client = _Client(requests, deadline, pipelined, answers, on_answer)
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)
        protocols.append(client)
    await asyncio.gather(*(client.is_done for client in protocols))
    answers.elapsed_s = time.perf_counter() - begin
    answers.client_share = (time.process_time() - cpu_begin) / answers.elapsed_s
    answers.per_client = [client.answered for client in protocols]
    return answers


class _Client(asyncio.Protocol):
    def __init__(
        self,
        requests: Iterator[tuple[int, bytes]],
        deadline: float,
        pipelined: int,
        answers: Answers,
        on_answer: OnAnswer,
    ) -> None:
        self._requests, self._deadline, self._pipelined = requests, deadline, pipelined
        self._answers, self._on_answer = answers, on_answer
        self._parser = httptools.HttpResponseParser(self)
        self._in_flight: deque[tuple[int, float]] = deque()
        self._head: list[bytes] = []
        self._body: list[bytes] = []
        self.answered = 0
        self.is_done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        self._answers.errors += [(0, b"the connection broke")] * len(self._in_flight)
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
        index, sent = self._in_flight.popleft()
        head, body = b"".join(self._head), b"".join(self._body)
        self._head, self._body = [], []
        status = self._parser.get_status_code()
        if status == 200:
            self._answers.indices.append(index)
            self._answers.seconds.append(time.perf_counter() - sent)
            self.answered += 1
            self._on_answer(index, head, body)
        else:
            self._answers.errors.append((status, body))

    def _send(self) -> None:
        """Send as many requests as may be in flight, in one write."""
        now, free = time.perf_counter(), self._pipelined - len(self._in_flight)
        batch: list[bytes] = []
        while len(batch) < free and now < self._deadline and (request := next(self._requests, None)) is not None:
            self._in_flight.append((request[0], now))
            batch.append(request[1])
        if batch:
            self._transport.write(b"".join(batch))
        elif not self._in_flight:
            self._transport.close()
