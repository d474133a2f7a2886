"""gRPC under load: deadlines, disconnecting clients, too many calls, shutdown with open calls; and API keys and TLS.

To hold calls, the server waits for a batch to fill that never does (`--max-batch-delay`).
"""

from __future__ import annotations

import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hasten.bundle import Bundle
from support.grpc_client import (
    SERVICE,
    TEXTS,
    assert_rejected,
    channel,
    grpc,
    running_server,
    stub,
    text_inputs,
    text_request,
    triton_client,
)
from support.server_process import Server
from support.wait import wait_until

# These tests wait for threads, deadlines or thousands of calls.
pytestmark = pytest.mark.slow

# Waits ten minutes for a batch to fill.
HOLDING = ("--instances", "1", "--max-batch-delay", "600000000", "--max-batch-tokens", "1000000")
MAX_QUEUE = 200


@pytest.fixture(scope="module")
def server(classifier: Bundle) -> Iterator[Server]:
    with running_server(str(classifier.path)) as server:
        yield server


@pytest.fixture
def holding_server(classifier: Bundle) -> Iterator[Server]:
    with running_server(str(classifier.path), *HOLDING, "--max-queue", str(MAX_QUEUE)) as server:
        yield server


# Deadlines and limits


def thread_count(server: Server) -> int:
    tasks = Path(f"/proc/{server.process.pid}/task")
    if not tasks.exists():
        pytest.skip("counting threads needs /proc")
    return len(list(tasks.iterdir()))


def answered_count(server: Server, status: int) -> int:
    """Return how many requests were answered with this status, according to the metrics."""
    line = f'hasten_requests_total{{model="classifier",status="{status}"}} '
    lines = server.ask("GET", "/metrics")[2].decode().splitlines()
    return sum(int(float(entry.removeprefix(line))) for entry in lines if entry.startswith(line))


def held_calls(opened: Any, rejected: int = 50) -> tuple[list[Any], list[Any]]:
    """Start as many calls as the holding server accepts, and some more; return the accepted and the rejected ones."""
    calls = [stub(opened).ModelInfer.future(text_request()) for _ in range(MAX_QUEUE + rejected)]
    wait_until(lambda: sum(call.done() for call in calls) >= rejected)
    return [call for call in calls if not call.done()], [call for call in calls if call.done()]


def test_call_past_its_deadline_is_rejected(holding_server: Server) -> None:
    with triton_client(holding_server) as client:
        assert_rejected(client.infer, "DEADLINE_EXCEEDED", "", "classifier", text_inputs(TEXTS), client_timeout=0.3)


def test_cancelled_calls_are_withdrawn(holding_server: Server) -> None:
    with channel(holding_server) as opened:
        calls, _ = held_calls(opened)
        assert len(calls) == MAX_QUEUE
        for call in calls:
            call.cancel()
        wait_until(lambda: answered_count(holding_server, 499) == MAX_QUEUE)


def test_streams_hold_no_threads_and_disconnecting_cancels_their_requests(holding_server: Server) -> None:
    count, before = 50, thread_count(holding_server)
    is_over = threading.Event()

    def requests() -> Iterator[Any]:
        yield text_request(model_name="missing")
        yield text_request()
        is_over.wait()

    with channel(holding_server) as opened:
        streams = [stub(opened).ModelStreamInfer(requests()) for _ in range(count)]
        assert all("not found" in next(stream).error_message for stream in streams)
        wait_until(lambda: b'hasten_queue_size{model="classifier"} 50.0' in holding_server.ask("GET", "/metrics")[2])
        assert thread_count(holding_server) < before + count
        for stream in streams:
            stream.cancel()
        is_over.set()
    wait_until(lambda: answered_count(holding_server, 499) == count)


def test_accepted_calls_are_answered_when_server_stops(holding_server: Server) -> None:
    with channel(holding_server) as opened:
        calls, rejected = held_calls(opened)
        for call in rejected:
            assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert f"open requests: {MAX_QUEUE}; the limit is {MAX_QUEUE}" in call.details()
            assert float(dict(call.trailing_metadata())["retry-after"]) > 0
        with triton_client(holding_server) as client:
            assert client.is_server_live()
            assert_rejected(client.infer, "RESOURCE_EXHAUSTED", "open requests", "classifier", text_inputs(TEXTS))
        holding_server.process.terminate()
        assert {call.result(timeout=30).model_name for call in calls} == {"classifier"}
        holding_server.process.wait(timeout=30)


def test_open_streams_leave_room_for_other_calls(server: Server) -> None:
    is_over, count = threading.Event(), 600

    def requests() -> Iterator[Any]:
        yield text_request()
        is_over.wait()

    with channel(server) as opened, triton_client(server) as client:
        streams = [stub(opened).ModelStreamInfer(requests()) for _ in range(count)]
        assert {next(stream).infer_response.model_name for stream in streams} == {"classifier"}
        assert client.infer("classifier", text_inputs(TEXTS)) is not None
        assert client.is_server_ready()
        is_over.set()
        assert [list(stream) for stream in streams] == [[]] * count


def test_health_watches_hold_no_thread_and_learn_of_shutdown(classifier: Bundle) -> None:
    pb = pytest.importorskip("grpc_health.v1.health_pb2", reason="grpcio-health-checking is not installed")
    from grpc_health.v1.health_pb2_grpc import HealthStub

    with running_server(str(classifier.path)) as watched, channel(watched) as opened, triton_client(watched) as client:
        watches = [HealthStub(opened).Watch(pb.HealthCheckRequest(service=SERVICE)) for _ in range(600)]
        assert {next(watch).status for watch in watches} == {pb.HealthCheckResponse.SERVING}
        assert thread_count(watched) < len(watches)
        assert client.infer("classifier", text_inputs(TEXTS)) is not None
        watched.process.terminate()
        assert {next(watch).status for watch in watches} == {pb.HealthCheckResponse.NOT_SERVING}
        # Waiting for the watches would take the whole drain timeout.
        watched.process.wait(timeout=20)


# API keys and TLS


def test_calls_need_a_known_api_key(classifier: Bundle) -> None:
    with (
        running_server(str(classifier.path), HASTEN_API_KEYS="first,second") as guarded,
        triton_client(guarded) as client,
    ):
        assert client.is_server_live()
        assert client.is_server_ready()
        for headers in (None, {"authorization": "Bearer third"}):
            assert_rejected(
                client.infer, "UNAUTHENTICATED", "API key", "classifier", text_inputs(TEXTS), headers=headers
            )
            # The names of models are not public either.
            for call in (client.is_model_ready, client.get_model_metadata):
                assert_rejected(call, "UNAUTHENTICATED", "API key", "classifier", headers=headers)
        results: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: results.put(error or result))
        assert "API key" in str(results.get(timeout=30))
        client.stop_stream()
        for key in ("first", "second"):
            headers = {"authorization": f"Bearer {key}"}
            assert client.is_model_ready("classifier", headers=headers)
            assert client.infer("classifier", text_inputs(TEXTS), headers=headers) is not None


def test_tls_is_required_when_configured(classifier: Bundle, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    with running_server(str(classifier.path), "--tls-cert", str(certificate), "--tls-key", str(key)) as safe:
        with triton_client(safe, ssl=True, root_certificates=str(certificate)) as client:
            assert client.infer("classifier", text_inputs(TEXTS)).as_numpy("logits").shape == (2, 3)
        with channel(safe) as opened, pytest.raises(grpc.RpcError) as error:
            stub(opened).ModelInfer(text_request(), timeout=20)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
