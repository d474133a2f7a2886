"""The gRPC server's own limits, without models."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from hasten.core.errors import StageError
from hasten.server.app import App
from hasten.server.auth import ApiKeys
from hasten.server.http.state import HttpLimits, HttpState
from hasten.server.models.registry import Model, ModelRegistry
from hasten.server.telemetry.metrics import Metrics
from support.grpc_client import channel, grpc, silent_calls, stub, text_request, triton
from support.wait import wait_until

BUFFERED_BYTES = 2**16
MAX_WAITING = 4
INFER = "/inference.GRPCInferenceService/ModelInfer"


class InProcessServer:
    """An HTTP state and a gRPC server that share an application without models, on a loop in a thread."""

    def __init__(self) -> None:
        from hasten.server.grpc.server import GrpcServer

        def open_model(path: Path, name: str, old: Model | None) -> Model:
            raise StageError(f"{name} of {path} cannot replace {old}")

        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        limits = HttpLimits(connections=MAX_WAITING, buffered_bytes=BUFFERED_BYTES)
        self.app = App(ModelRegistry(open_model), Metrics(), ApiKeys())
        self.http = HttpState(self.app, limits)

        async def start() -> Any:
            server = GrpcServer(self.app, "127.0.0.1:0", limits, self.http.buffered_bytes, None)
            await server.start()
            return server

        self.grpc = self.run(start())
        self.grpc_port = self.grpc.port

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the server's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def waiting(self) -> int:
        """Return how many calls wait for a message."""
        return len(self.grpc.service.receiver.waiting)


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    # One for all tests: grpcio's asynchronous servers share one queue, which outlives them.
    server = InProcessServer()
    yield server
    server.run(server.grpc.stop(0))


def rejection(ask: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as error:
        ask()
    return error.value.code().name, error.value.details()


def test_http_bodies_and_grpc_messages_share_one_budget(server: Any) -> None:
    request = text_request(model_name="missing", id="a" * 2**10)
    with channel(server) as opened:
        assert rejection(lambda: stub(opened).ModelInfer(request, timeout=20))[0] == "NOT_FOUND"
        with server.http.buffered_bytes.holding(BUFFERED_BYTES - 2**10):
            expected = ("RESOURCE_EXHAUSTED", "too many request bodies are being received (try again in 1.0 s)")
            assert rejection(lambda: stub(opened).ModelInfer(request, timeout=20)) == expected
            # In a stream, an error is a response.
            response = next(stub(opened).ModelStreamInfer(iter([request]), timeout=20))
            assert "too many request bodies" in response.error_message
            assert stub(opened).ServerLive(triton.service_pb2.ServerLiveRequest(), timeout=20).live
        assert rejection(lambda: stub(opened).ModelInfer(request, timeout=20))[0] == "NOT_FOUND"
    wait_until(lambda: server.http.buffered_bytes.used == 0)


@pytest.mark.parametrize("path", [INFER, "/inference.GRPCInferenceService/ModelStreamInfer"])
def test_waiting_calls_are_bounded_and_the_longest_waiting_is_rejected(server: Any, path: str) -> None:
    def ask() -> str:
        with channel(server) as opened:
            return rejection(lambda: stub(opened).ModelInfer(text_request(model_name="missing"), timeout=20))[0]

    with channel(server) as opened:
        first = opened.stream_unary(path).future(iter(threading.Event().wait, None))
        wait_until(lambda: server.waiting() == 1)
        with silent_calls(server, path, 10 * MAX_WAITING):
            assert first.code().name == "RESOURCE_EXHAUSTED"
            assert f"{MAX_WAITING} calls are waiting for a message" in first.details()
            wait_until(lambda: server.waiting() == MAX_WAITING)
            assert ask() == "NOT_FOUND"
    wait_until(lambda: server.waiting() == 0)
