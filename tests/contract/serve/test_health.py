"""Health tells the truth: faults that only a restart repairs end readiness, liveness and the process."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hasten.bundle import Bundle
from support.faulty_backend import faulty_environment
from support.server_operations import BODY, LEAN, QUIET, Running, predict, request
from support.wait import wait_until

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")

# An orchestrator learns of a fault within 5 s; a busy machine gets more time.
_NOTICE_S = 20.0
# Large enough to be parsed by a thread instead of the event loop.
_LARGE_BODY = {"inputs": "one answer " * 8000}


def write(folder: Path, name: str, content: str = "") -> None:
    """Create a file that the faulty backend looks for, whole."""
    (folder / f".{name}").write_text(content)
    (folder / f".{name}").rename(folder / name)


@contextmanager
def serving(bundle: Bundle, folder: Path, *words: str) -> Iterator[tuple[Running, int]]:
    with Running(folder, str(bundle.path), *(words or QUIET), **faulty_environment(bundle, folder)) as server:
        yield server, server.ready().port


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def is_ready(server: Running, port: int) -> bool:
    return server.ask("/v2/health/ready", port=port)[0] == 200


def is_alive(server: Running, port: int) -> bool:
    return server.ask("/v2/health/live", port=port)[0] == 200


def require_fault(server: Running, port: int, reason: str) -> None:
    """Wait for the loss of liveness and check the reason in the log."""
    wait_until(lambda: not is_alive(server, port), "the loss of liveness", _NOTICE_S)
    assert not is_ready(server, port)
    line = server.said(reason + ": exiting with code 70")
    assert line["level"] == "critical"


def test_device_that_fails_every_batch_ends_the_process(faulty_bundle: Bundle, tmp_path: Path) -> None:
    grpc = pytest.importorskip("grpc")
    health = importlib.import_module("grpc_health.v1.health_pb2")
    stubs = importlib.import_module("grpc_health.v1.health_pb2_grpc")
    with (
        serving(faulty_bundle, tmp_path, *LEAN) as (server, port),
        grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        statuses = stubs.HealthStub(channel).Watch(health.HealthCheckRequest(), timeout=60)
        assert next(statuses).status == health.HealthCheckResponse.SERVING
        write(tmp_path, "fail")
        assert predict(server, port=port) == 500
        # The warm-up row failed too, so another request would fail; it is tried again before the process gives up.
        assert not is_ready(server, port)
        assert next(statuses).status == health.HealthCheckResponse.NOT_SERVING
        require_fault(server, port, "faulty: every batch fails: out of luck")
        assert server.end() == 70


def test_server_recovers_from_a_failure_that_passes(faulty_bundle: Bundle, tmp_path: Path) -> None:
    with serving(faulty_bundle, tmp_path) as (server, port):
        write(tmp_path, "fail")
        assert predict(server, port=port) == 500
        (tmp_path / "fail").unlink()
        wait_until(lambda: is_ready(server, port), "readiness")
        assert predict(server, port=port) == 200


def test_request_that_makes_the_model_fail_leaves_the_server_healthy(faulty_bundle: Bundle, tmp_path: Path) -> None:
    longer = {"inputs": "one answer " * 7}
    with serving(faulty_bundle, tmp_path) as (server, port):
        assert server.ask("/predict", longer, port=port)[0] == 200
        write(tmp_path, "fail", str(faulty_bundle.tokenizer().encode([longer["inputs"]]).batch.lengths[0]))
        for _ in range(5):
            assert server.ask("/predict", longer, port=port)[0] == 500
            assert is_ready(server, port)
            assert is_alive(server, port)
        assert predict(server, port=port) == 200
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("threads", "body", "reason"),
    [
        ("(_work)", BODY, "faulty: a worker thread has ended"),
        ("(_encode)", BODY, "faulty: a worker thread has ended"),
        ("read_", _LARGE_BODY, "a thread that reads requests has ended"),
    ],
    ids=["session", "tokenizer", "reader"],
)
def test_dead_thread_ends_the_process(
    faulty_bundle: Bundle, tmp_path: Path, threads: str, body: Any, reason: str
) -> None:
    with serving(faulty_bundle, tmp_path) as (server, port):
        assert server.ask("/predict", body, port=port)[0] in (200, 413)
        with connect(port) as first, connect(port) as second:
            if threads == "(_encode)":
                # Tokenizer threads have work only while the session thread is busy.
                write(tmp_path, "hang")
                first.sendall(request(body))
                wait_until((tmp_path / "hangs").exists, "a batch that hangs")
            write(tmp_path, "kill", threads)
            wait_until(lambda: not (tmp_path / "kill").exists(), "the injected fault")
            # The thread ends when this request wakes it.
            second.sendall(request(body))
            require_fault(server, port, reason)
            server.process.kill()  # that it exits by itself is tested above


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("hasten.server.request_records DeferredRecorder run", ()),
        ("hasten.server.models.reload ReloadWatcher reload", ("--reload-interval", "0.1s")),
    ],
    ids=["records", "reload"],
)
def test_background_task_that_fails_ends_the_process(
    faulty_bundle: Bundle, tmp_path: Path, target: str, words: tuple[str, ...]
) -> None:
    with serving(faulty_bundle, tmp_path, *QUIET, *words) as (server, port):
        write(tmp_path, "break", target)
        require_fault(server, port, "a background task failed: RuntimeError: out of order")
        server.process.kill()
