"""`hasten serve` by gRPC: the real tritonclient, and grpcio's own stub for what that does not send."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from serving import Server

grpc = pytest.importorskip("grpc", reason="gRPC needs hasten[serve]")
triton = pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
pytest.importorskip("uvloop", reason="serving needs hasten[serve]")

TEXTS = ["one answer", "ein Wort mit Ü"]
SERVICE = "inference.GRPCInferenceService"


@contextmanager
def served(*words: str, **environment: str) -> Iterator[Server]:
    started = Server(*words, "--threads", "1", **environment)
    try:
        yield started
    finally:
        code, errors = started.stop()
    assert code == 0, errors
    assert "Traceback" not in errors, errors


@contextmanager
def connected(server: Server, **about: Any) -> Iterator[Any]:
    made = triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}", **about)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def channel(server: Server) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as opened:
        yield opened


def texts_in(texts: list[str], shape: list[int] | None = None) -> list[Any]:
    tensor = triton.InferInput("text", shape or [len(texts)], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode() for text in texts], object).reshape(shape or -1))
    return [tensor]


def request_of(**about: Any) -> Any:
    """A message made by hand, with contents that are typed."""
    return triton.service_pb2.ModelInferRequest(**{"model_name": "classifier", **about})


def one_text(**about: Any) -> Any:
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"one answer"]}}
    return request_of(**{"inputs": [tensor], **about})


def stub(opened: Any) -> Any:
    return triton.service_pb2_grpc.GRPCInferenceServiceStub(opened)


def until(is_so: Callable[[], bool], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.01)


def refused(ask: Any, code: str, what: str, *arguments: Any, **keywords: Any) -> Any:
    from tritonclient.utils import InferenceServerException

    with pytest.raises(InferenceServerException) as error:
        ask(*arguments, **keywords)
    assert error.value.status() == f"StatusCode.{code}"
    assert what in error.value.message()
    return error.value
