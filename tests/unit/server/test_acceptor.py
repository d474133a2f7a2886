"""Accepting connections: many at once, shared between processes, and until the sockets close."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import chain

import pytest

from hasten.core.errors import UnavailableError
from hasten.server.http.acceptor import Acceptor, listen
from hasten.server.processes.shared_counters import SharedCounters
from support.http_server import ControlledServer, blocked_loop, get, receive_all, statuses

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")
pytest.importorskip("httptools", reason="serving needs hasten[serve]")

CLIENTS = 128


def test_clients_that_connect_at_once_are_accepted_in_few_loop_iterations(http_server: ControlledServer) -> None:
    """With one connection per iteration the last client would wait for as many iterations as there are clients."""

    async def count_iterations() -> int:
        iterations = 0
        while len(http_server.state.open) < CLIENTS:
            iterations += 1
            await asyncio.sleep(0)
        return iterations

    with ExitStack() as opened:
        with blocked_loop(http_server):
            clients = [opened.enter_context(http_server.connect()) for _ in range(CLIENTS)]
            counted = http_server.submit(count_iterations())
        assert counted.result(20) <= CLIENTS // 8
        for client in clients:
            client.sendall(get("/", "connection: close"))
        assert [statuses(receive_all(client)) for client in clients] == [[200]] * CLIENTS


def test_accepted_sockets_send_small_responses_at_once(http_server: ControlledServer) -> None:
    with http_server.connect() as client:
        client.sendall(get("/"))
        assert client.recv(2**16)
        (connection,) = http_server.state.open
        accepted = connection._transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_waiting_connections_are_served_when_the_socket_closes(http_servers: Callable[..., ControlledServer]) -> None:
    server = http_servers()

    async def close() -> None:
        server._acceptor.close()

    with ExitStack() as opened:
        with blocked_loop(server):
            clients = [opened.enter_context(server.connect()) for _ in range(CLIENTS)]
            closed = server.submit(close())
        closed.result(20)
        for client in clients:
            client.sendall(get("/", "connection: close"))
            assert statuses(receive_all(client)) == [200]
    with pytest.raises(ConnectionRefusedError):
        server.connect()


def test_process_leaves_connections_to_others_but_not_for_long() -> None:
    """Another process may have fewer connections and yet be stalled."""

    async def serve() -> int:
        sockets, accepted, calls = listen("127.0.0.1", 0), [], 0

        def is_our_turn(_: int) -> bool:
            nonlocal calls
            calls += 1
            return False

        def make() -> asyncio.Protocol:
            accepted.append(1)
            return asyncio.Protocol()

        acceptor = Acceptor(sockets, make, is_our_turn=is_our_turn)
        with socket.create_connection(sockets[0].getsockname()):
            while not accepted:
                await asyncio.sleep(0.001)
        acceptor.close()
        return calls

    assert 20 < asyncio.run(asyncio.wait_for(serve(), 20)) < 30


def test_processes_with_as_many_connections_divide_new_ones() -> None:
    """A batch of 64 would give all connections to two of eight processes."""

    async def serve(processes: int) -> list[int]:
        counters, sockets = SharedCounters(processes), listen("127.0.0.1", 0)
        accepted: list[list[asyncio.BaseTransport]] = [[] for _ in range(processes)]

        class Accepted(asyncio.Protocol):
            def __init__(self, index: int) -> None:
                self._index = index

            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                accepted[self._index].append(transport)

        for index in range(processes):
            counters.set_connections(index, 0)
        with ExitStack() as opened:
            for _ in range(CLIENTS):
                opened.enter_context(socket.create_connection(sockets[0].getsockname()))
            acceptors = [
                Acceptor(
                    [sockets[0].dup()],
                    partial(Accepted, index),
                    is_our_turn=lambda opening, index=index: counters.may_accept(
                        index, len(accepted[index]) + opening, CLIENTS
                    ),
                )
                for index in range(processes)
            ]
            while sum(map(len, accepted)) < CLIENTS:
                await asyncio.sleep(0.001)
            for acceptor in acceptors:
                acceptor.close()
            sockets[0].close()
            for transport in chain(*accepted):
                transport.close()
            await asyncio.sleep(0)  # they close in the next iteration
        return [len(transports) for transports in accepted]

    counts = asyncio.run(asyncio.wait_for(serve(8), 20))
    assert max(counts) - min(counts) <= 5, counts


def test_host_with_several_addresses_listens_on_one_port() -> None:
    sockets = listen("", 0)
    try:
        assert len({listener.getsockname()[1] for listener in sockets}) == 1
        for listener in sockets:
            host = "::1" if listener.family == socket.AF_INET6 else "127.0.0.1"
            socket.create_connection((host, listener.getsockname()[1]), timeout=20).close()
    finally:
        for listener in sockets:
            listener.close()


@pytest.mark.parametrize(("host", "hint"), [("127.0.0.1", "--port"), ("192.0.2.1", "--host"), ("no.invalid", "--host")])
def test_address_that_cannot_be_bound_is_reported(host: str, hint: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UnavailableError) as caught:
        listen(host, taken.getsockname()[1])
    assert f"cannot listen on {host}:" in caught.value.message
    assert hint in (caught.value.hint or "")
