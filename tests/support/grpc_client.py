"""gRPC clients of `hasten serve`: the real tritonclient, and a grpcio stub for requests that it does not send."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from support.server_process import Server

grpc = pytest.importorskip("grpc", reason="gRPC needs hasten[serve]")
triton = pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
pytest.importorskip("uvloop", reason="serving needs hasten[serve]")

TEXTS = ["one answer", "ein Wort mit Ü"]
SERVICE = "inference.GRPCInferenceService"


@contextmanager
def running_server(*arguments: str, **environment: str) -> Iterator[Server]:
    """Run a server, and check that it stops without an error."""
    server = Server(*arguments, "--threads", "1", **environment)
    try:
        yield server
    finally:
        code, errors = server.stop()
    assert code == 0, errors
    assert "Traceback" not in errors, errors


@contextmanager
def triton_client(server: Server, **options: Any) -> Iterator[Any]:
    """Connect a tritonclient."""
    client = triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}", **options)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def channel(server: Server) -> Iterator[Any]:
    """Open a grpcio channel."""
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as opened:
        yield opened


@contextmanager
def silent_calls(server: Server, path: str, count: int, *, begun_message: bytes = b"") -> Iterator[None]:
    """Open calls whose message never comes, or never ends, on one connection, in plain HTTP/2."""

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload

    headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "a"}
    headers |= {"te": "trailers", "content-type": "application/grpc"}
    # HPACK literals without indexing: a zero, and each string after its length.
    block = b"".join(b"\0%c%b%c%b" % (len(k), k.encode(), len(v), v.encode()) for k, v in headers.items())
    with socket.create_connection(("127.0.0.1", server.grpc_port), timeout=20) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
        for stream in range(1, 2 * count, 2):
            connection.sendall(
                frame(1, 4, stream, block) + (frame(0, 0, stream, begun_message) if begun_message else b"")
            )
        connection.sendall(frame(6, 0, 0, b"received"))
        received = b""
        while frame(6, 1, 0, b"received") not in received:
            received += (data := connection.recv(2**16))
            assert data, "the server has closed the connection"
        yield


def text_inputs(texts: list[str], shape: list[int] | None = None) -> list[Any]:
    """Return the inputs of a tritonclient request."""
    tensor = triton.InferInput("text", shape or [len(texts)], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode() for text in texts], object).reshape(shape or -1))
    return [tensor]


def infer_request(**fields: Any) -> Any:
    """Return a request message with these fields."""
    return triton.service_pb2.ModelInferRequest(**{"model_name": "classifier", **fields})


def text_request(**fields: Any) -> Any:
    """Return a valid request message with one text in typed contents, changed by these fields."""
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"one answer"]}}
    return infer_request(**{"inputs": [tensor], **fields})


def stub(opened: Any) -> Any:
    """Return the stub of the inference service on a channel."""
    return triton.service_pb2_grpc.GRPCInferenceServiceStub(opened)


def assert_rejected(method: Any, code: str, message: str, *arguments: Any, **keywords: Any) -> None:
    """Assert that a method of a tritonclient fails with this code and message."""
    from tritonclient.utils import InferenceServerException

    with pytest.raises(InferenceServerException) as error:
        method(*arguments, **keywords)
    assert error.value.status() == f"StatusCode.{code}"
    assert message in error.value.message()
