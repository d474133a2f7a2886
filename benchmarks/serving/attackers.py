"""Attackers of a server: each kind opens connections or calls at a bounded rate, and counts what it gets back.

They run in a process of their own, which ends with its parent. All traffic goes to 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import os
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import uvloop
from fuzz_requests import RequestGenerator
from http_requests import post

JSON_TYPE = "content-type: application/json"
# Attackers close a connection on which nothing has happened for this long.
PATIENCE_S = 15.0
# Half-open calls are spread over this many connections.
CHANNELS = 4
LARGE_ANSWER = post("/predict", b'{"inputs": [' + b", ".join([b'"a"'] * 256) + b"]}", JSON_TYPE)
# 60 KB that cost the server next to nothing.
LARGE_DOCUMENT = b"GET /openapi.json HTTP/1.1\r\nhost: a\r\n\r\n"
CHUNKED = b"POST /predict HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
BOMB = gzip.compress(b'{"inputs": "' + bytes(2**24) + b'"}')


@dataclass
class Target:
    """The server under attack, and what the attackers of one window got back."""

    port: int
    grpc_port: int
    model: str
    max_connections: int
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)


Attack = Callable[[Target, int], Awaitable[str]]


@dataclass(frozen=True)
class Kind:
    """A kind of attack. Up to `at_once` attackers run it at a time, and `per_second` of them start each second."""

    attack: Attack
    at_once: int
    per_second: float

    def scaled(self, intensity: float) -> Kind:
        """Return the same kind with as many attackers per second times `intensity`."""
        return replace(self, per_second=self.per_second * intensity)


class Peer:
    """A connection that an attacker opened; a small receive buffer lets the server's own fill up soon."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port: int, receive_bytes: int = 0) -> Peer:
        """Return a connection to the server."""
        connection = socket.socket()
        if receive_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
            return cls(*await asyncio.open_connection(sock=connection, limit=2**12 if receive_bytes else 2**20))
        except BaseException:
            connection.close()
            raise

    async def status(self) -> str:
        """Return the status of the next response, or how the connection ended instead."""
        try:
            line = await asyncio.wait_for(self.reader.readline(), PATIENCE_S)
        except TimeoutError:
            return "no answer"
        except (OSError, ValueError):
            return "reset"
        return line[9:12].decode("latin-1") or "closed"

    def close(self, *, by_reset: bool = False) -> None:
        """Close the connection with FIN, or with RST."""
        if by_reset:
            linger = struct.pack("ii", 1, 0)
            self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()


async def _send(target: Target, data: bytes) -> str:
    """Send bytes and return the status of the response."""
    peer = await Peer.open(target.port)
    try:
        with suppress(OSError):  # the server may reject it before its end
            peer.writer.write(data)
            await asyncio.wait_for(peer.writer.drain(), PATIENCE_S)
        return await peer.status()
    finally:
        peer.close()


async def _drip(target: Target, head: bytes, part: bytes) -> str:
    """Send a part twice a second and return the status with which the server rejects it."""
    peer = await Peer.open(target.port)
    try:
        peer.writer.write(head)
        answer = asyncio.ensure_future(peer.reader.readline())
        begin = time.monotonic()
        while not answer.done() and time.monotonic() - begin < 2 * PATIENCE_S:
            peer.writer.write(part)
            await asyncio.wait([answer], timeout=0.5)
        if not answer.done():
            answer.cancel()
            return "no answer"
        return answer.result()[9:12].decode("latin-1") or "closed"
    finally:
        peer.close()


async def slow_head(target: Target, _: int) -> str:
    """Send a head byte by byte."""
    return await _drip(target, b"POST /predict HTTP/1.1\r\nhost: a\r\nx: ", b"x")


async def slow_body(target: Target, number: int) -> str:
    """Send a body byte by byte, every second one in chunks."""
    if number % 2:
        return await _drip(target, CHUNKED, b"1\r\n \r\n")
    return await _drip(target, post("/predict", b"", JSON_TYPE).replace(b"length: 0", b"length: 9999"), b" ")


async def slow_reader(target: Target, number: int) -> str:
    """Send request after request for large answers, and read nothing until the server closes the connection."""
    peer = await Peer.open(target.port, receive_bytes=4096)
    try:
        begin = time.monotonic()
        peer.writer.write(LARGE_ANSWER if number % 8 == 0 else LARGE_DOCUMENT * 60)
        while time.monotonic() - begin < 2 * PATIENCE_S:
            await asyncio.sleep(0.5)
            peer.writer.write(LARGE_DOCUMENT * 4)
            if peer.writer.transport.is_closing():
                return "closed"
            if peer.writer.transport.get_write_buffer_size() > 2**20:
                break
        return "no answer"
    finally:
        peer.close()


async def disconnect_in_request(target: Target, number: int) -> str:
    """Disconnect after a part of a request."""
    peer = await Peer.open(target.port)
    peer.writer.write(LARGE_ANSWER[: random.randrange(1, len(LARGE_ANSWER))])
    await asyncio.sleep(0.01)
    peer.close(by_reset=number % 2 == 0)
    return "left"


async def disconnect_in_answer(target: Target, number: int) -> str:
    """Disconnect while a large answer is computed or sent."""
    peer = await Peer.open(target.port, receive_bytes=4096)
    peer.writer.write(LARGE_ANSWER)
    await asyncio.sleep(random.choice([0.0005, 0.005, 0.02]))
    peer.close(by_reset=number % 2 == 0)
    return "left"


async def oversized_declared(target: Target, number: int) -> str:
    """Declare a body of gigabytes, or of as many digits as fit, and begin to send it."""
    length = (b"length: 9999999999", b"length: " + b"9" * 4000)[number % 2]
    return await _send(target, post("/predict", b"", JSON_TYPE).replace(b"length: 0", length) + bytes(2**16))


async def oversized_chunked(target: Target, _: int) -> str:
    """Send a body of 8 MB in chunks, without saying how long it will be."""
    return await _send(target, CHUNKED + (b"10000\r\n" + b" " * 2**16 + b"\r\n") * 128)


async def gzip_bomb(target: Target, _: int) -> str:
    """Send 16 KB that expand to 16 MB."""
    return await _send(target, post("/predict", BOMB, JSON_TYPE, "content-encoding: gzip"))


async def nested_json(target: Target, number: int) -> str:
    """Send JSON of many levels, or of very many empty lists."""
    value = (b"[" * 2**16, b"[" + b"[]," * 60_000 + b"[]]", b"[" * 2**20, b'{"a":' * 2**14)[number % 4]
    return await _send(target, post("/predict", b'{"inputs": ' + value + b"}", JSON_TYPE))


async def malformed(target: Target, number: int) -> str:
    """Send a mutated request of a random route and close the sending side."""
    peer = await Peer.open(target.port)
    try:
        with suppress(OSError):
            peer.writer.write(_MUTATED[number % len(_MUTATED)])
            peer.writer.write_eof()
        return await peer.status()
    finally:
        peer.close()


async def half_open_call(target: Target, number: int) -> str:
    """Open a unary gRPC call and never send its message."""
    import grpc

    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.sleep(3600)
        yield b""

    while len(_CHANNELS) < CHANNELS:
        options = [("grpc.use_local_subchannel_pool", 1)]
        _CHANNELS.append(grpc.aio.insecure_channel(f"127.0.0.1:{target.grpc_port}", options))
    open_call = _CHANNELS[number % CHANNELS].stream_unary("/inference.GRPCInferenceService/ModelInfer")
    call = open_call(nothing(), timeout=4 * PATIENCE_S)
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    finally:
        call.cancel()
    return "OK"


async def flood(target: Target, _: int) -> str:
    """Open more connections than the server allows, hold those that it accepts for a moment, and close them all."""
    peers: list[Peer] = []
    statuses: list[asyncio.Future[str]] = []
    try:
        for index in range(target.max_connections + 64):
            try:
                peers.append(await asyncio.wait_for(Peer.open(target.port), PATIENCE_S))
            except OSError:
                target.counts["flood", "refused"] += 1
                continue
            statuses.append(asyncio.ensure_future(peers[-1].status()))
            await asyncio.sleep(0.02 if index % 8 == 0 else 0)
        await asyncio.sleep(1.0)
        for status in statuses:
            target.counts["flood", status.result() if status.done() else "accepted"] += 1
        return "rounds"
    finally:
        for status in statuses:
            status.cancel()
        for peer in peers:
            peer.close()


# Together about 22 attacks per second: one beside every 30 requests of good clients.
KINDS: dict[str, Kind] = {
    "slow_head": Kind(slow_head, 64, 3.2), "slow_body": Kind(slow_body, 64, 3.2),
    "slow_reader": Kind(slow_reader, 16, 0.4), "disconnect_in_request": Kind(disconnect_in_request, 8, 1),
    "disconnect_in_answer": Kind(disconnect_in_answer, 8, 0.1), "oversized_declared": Kind(oversized_declared, 8, 0.5),
    "oversized_chunked": Kind(oversized_chunked, 2, 0.05), "gzip_bomb": Kind(gzip_bomb, 2, 0.1),
    "nested_json": Kind(nested_json, 2, 0.1), "malformed": Kind(malformed, 8, 1),
    "half_open_call": Kind(half_open_call, 300, 10), "flood": Kind(flood, 1, 0.01),
}  # fmt: skip
_MUTATED: list[bytes] = []
_CHANNELS: list[Any] = []


async def _run_kind(name: str, kind: Kind, target: Target) -> None:
    """Begin attacks at a steady rate until cancelled."""
    running: set[asyncio.Task[None]] = set()

    async def attack(number: int) -> None:
        try:
            outcome = await kind.attack(target, number)
        except OSError as error:
            outcome = type(error).__name__
        target.counts[name, outcome] += 1

    try:
        for number in itertools.count():
            if len(running) < kind.at_once:
                task = asyncio.ensure_future(attack(number))
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.sleep(1 / kind.per_second)
    finally:
        for task in running:
            target.counts[name, "under way at the end"] += 1
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _window(target: Target, kinds: dict[str, Kind], is_over: asyncio.Event, max_s: float) -> dict[str, Any]:
    begin, target.counts = time.process_time(), Counter()
    tasks = [asyncio.ensure_future(_run_kind(name, kind, target)) for name, kind in kinds.items()]
    with suppress(TimeoutError):
        await asyncio.wait_for(is_over.wait(), max_s)
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error
    for channel in _CHANNELS:
        await channel.close()
    _CHANNELS.clear()
    counts: dict[str, dict[str, int]] = {}
    for (name, outcome), count in sorted(target.counts.items()):
        counts.setdefault(name, {})[outcome] = count
    return {"cpu_s": time.process_time() - begin, "counts": counts}


async def _serve(commands: Connection, target: Target, kinds: dict[str, Kind], max_s: float) -> None:
    loop = asyncio.get_running_loop()
    received: asyncio.Queue[str | None] = asyncio.Queue()

    def receive() -> None:
        try:
            received.put_nowait(commands.recv())
        except EOFError:  # the parent has ended
            loop.remove_reader(commands.fileno())
            received.put_nowait(None)

    loop.add_reader(commands.fileno(), receive)
    while await received.get() == "start":
        is_over = asyncio.Event()
        window = asyncio.ensure_future(_window(target, kinds, is_over, max_s))
        command = await received.get()
        is_over.set()
        measured = await window
        if command is None:
            return
        commands.send(measured)


def run_attackers(commands: Connection, target: Target, kinds: dict[str, Kind], cores: set[int], max_s: float) -> None:
    """Run attacks between the commands "start" and "stop", and reply with counts and CPU time; a process's main."""
    os.sched_setaffinity(0, cores)
    # Good clients on the same core come first, at once: a lower priority alone would let them wait for a time slice.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    generator = RequestGenerator("attack", [target.model])
    _MUTATED.extend(generator.next()[1] for _ in range(2000))
    uvloop.run(_serve(commands, target, kinds, max_s))
