"""gRPC clients of `hasten serve`: the real tritonclient, and a grpcio stub for requests that it does not send."""

from __future__ import annotations

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
