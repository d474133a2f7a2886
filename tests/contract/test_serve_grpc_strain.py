"""gRPC under strain: deadlines, clients that leave, more calls than are taken, an end with calls open; and who may ask.

Where calls have to be held, the server is told to wait for company that does not come (`--max-wait`).
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

from calling import SERVICE, TEXTS, channel, connected, grpc, one_text, refused, served, stub, texts_in, until
from hasten.bundle import Bundle
from serving import Server

# Each waits for threads, deadlines or thousands of calls.
pytestmark = pytest.mark.slow

# Waits for company for ten minutes, or until there are as many rows as a batch may have; and takes so many requests.
HOLDING = ("--instances", "1", "--max-wait", "600000000", "--batch-tokens", "1000000")
MOST = 200


@pytest.fixture(scope="module")
def classifier(tiny_classifier: Any, quick_build: Any, tmp_path_factory: Any) -> Bundle:
    target = tmp_path_factory.mktemp("grpc") / "classifier"
    return quick_build(tiny_classifier("bert"), target, variants=["onnxruntime-fp32"])


@pytest.fixture(scope="module")
def server(classifier: Bundle) -> Iterator[Server]:
    with served(str(classifier.path)) as started:
        yield started


@pytest.fixture
def holding(classifier: Bundle) -> Iterator[Server]:
    with served(str(classifier.path), *HOLDING, "--max-queue", str(MOST)) as started:
        yield started


# Time, and too much of it


def threads_of(server: Server) -> int:
    tasks = Path(f"/proc/{server.process.pid}/task")
    if not tasks.exists():
        pytest.skip("threads are counted in /proc, which this system has not")
    return len(list(tasks.iterdir()))


def answered(server: Server, status: int) -> int:
    """Requests that were answered so, as the metrics tell."""
    line = f'hasten_requests_total{{model="classifier",status="{status}"}} '
    lines = server.ask("GET", "/metrics")[2].decode().splitlines()
    return sum(int(float(entry.removeprefix(line))) for entry in lines if entry.startswith(line))


def taken(opened: Any, refused: int = 50) -> tuple[list[Any], list[Any]]:
    """As many calls as a server takes that holds them, and some more, which it does not."""
    calls = [stub(opened).ModelInfer.future(one_text()) for _ in range(MOST + refused)]
    until(lambda: sum(call.done() for call in calls) >= refused)
    return [call for call in calls if not call.done()], [call for call in calls if call.done()]


def test_a_deadline(holding: Server) -> None:
    with connected(holding) as client:
        refused(client.infer, "DEADLINE_EXCEEDED", "", "classifier", texts_in(TEXTS), client_timeout=0.3)


def test_calls_that_are_cancelled_free_their_threads(holding: Server) -> None:
    with channel(holding) as opened:
        calls, _ = taken(opened)
        assert len(calls) == MOST
        for call in calls:
            call.cancel()
        # What a thread tells at its end.
        until(lambda: answered(holding, 499) == MOST)


def test_streams_whose_clients_leave_free_their_threads(holding: Server) -> None:
    """One that reads, which ends, and one that answers, which the next stream finds idle."""
    count, before = 50, threads_of(holding)
    for _ in range(3):
        is_over = threading.Event()

        def requests(is_over: threading.Event = is_over) -> Iterator[Any]:
            yield one_text(model_name="nobody")
            yield one_text()
            is_over.wait()

        with channel(holding) as opened:
            streams = [stub(opened).ModelStreamInfer(requests()) for _ in range(count)]
            assert {next(stream).error_message[:18] for stream in streams} == {"there is no model "}
            assert threads_of(holding) >= before + count
            for stream in streams:
                stream.cancel()
            is_over.set()
        until(lambda: threads_of(holding) <= before + count + 10)


def test_none_that_was_taken_is_lost_when_it_stops(holding: Server) -> None:
    with channel(holding) as opened:
        calls, others = taken(opened)
        for call in others:
            assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert f"{MOST} requests are waiting" in call.details()
            assert float(dict(call.trailing_metadata())["retry-after"]) > 0
        with connected(holding) as client:
            assert client.is_server_live()
            refused(client.infer, "RESOURCE_EXHAUSTED", "requests are waiting", "classifier", texts_in(TEXTS))
        holding.process.terminate()
        assert {call.result(timeout=30).model_name for call in calls} == {"classifier"}
        holding.process.wait(timeout=30)


def test_more_calls_than_there_are_threads(server: Server) -> None:
    """Each stream holds one for as long as it is open."""
    from hasten.server.grpc_v2 import CALLS

    is_over = threading.Event()

    def requests() -> Iterator[Any]:
        yield one_text()
        is_over.wait()

    with channel(server) as opened, connected(server) as client:
        streams = [stub(opened).ModelStreamInfer(requests()) for _ in range(CALLS)]
        assert {next(stream).infer_response.model_name for stream in streams} == {"classifier"}
        what = f"{CALLS} calls are waiting (try again in"
        refused(client.infer, "RESOURCE_EXHAUSTED", what, "classifier", texts_in(TEXTS))
        assert client.is_server_live()
        assert client.is_server_ready()
        is_over.set()
        assert [list(stream) for stream in streams] == [[]] * CALLS
        # A stream is over for its client a little before its thread is free.
        until(lambda: is_answered(client))


def is_answered(client: Any) -> bool:
    from tritonclient.utils import InferenceServerException

    try:
        return client.infer("classifier", texts_in(TEXTS)) is not None
    except InferenceServerException:
        return False


def test_those_who_watch_its_health_hold_no_thread_and_are_told_when_it_stops(classifier: Bundle) -> None:
    pb = pytest.importorskip("grpc_health.v1.health_pb2", reason="grpcio-health-checking is not installed")
    from grpc_health.v1.health_pb2_grpc import HealthStub

    with served(str(classifier.path)) as watched, channel(watched) as opened, connected(watched) as client:
        watches = [HealthStub(opened).Watch(pb.HealthCheckRequest(service=SERVICE)) for _ in range(600)]
        assert {next(watch).status for watch in watches} == {pb.HealthCheckResponse.SERVING}
        assert threads_of(watched) < len(watches)
        assert client.infer("classifier", texts_in(TEXTS)) is not None
        watched.process.terminate()
        assert {next(watch).status for watch in watches} == {pb.HealthCheckResponse.NOT_SERVING}
        # Which would be its whole time to drain, were they waited for.
        watched.process.wait(timeout=20)


# Who may ask


def test_keys(classifier: Bundle) -> None:
    with served(str(classifier.path), HASTEN_API_KEYS="first,second") as guarded, connected(guarded) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("classifier")
        for headers in (None, {"authorization": "Bearer third"}):
            refused(client.infer, "UNAUTHENTICATED", "API key", "classifier", texts_in(TEXTS), headers=headers)
            refused(client.get_model_metadata, "UNAUTHENTICATED", "API key", "classifier", headers=headers)
        found: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: found.put(error or result))
        assert "API key" in str(found.get(timeout=30))
        client.stop_stream()
        for key in ("first", "second"):
            assert client.infer("classifier", texts_in(TEXTS), headers={"authorization": f"Bearer {key}"}) is not None


def test_tls(classifier: Bundle, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    with served(str(classifier.path), "--tls-cert", str(certificate), "--tls-key", str(key)) as safe:
        with connected(safe, ssl=True, root_certificates=str(certificate)) as client:
            assert client.infer("classifier", texts_in(TEXTS)).as_numpy("logits").shape == (2, 3)
        with channel(safe) as opened, pytest.raises(grpc.RpcError) as error:
            stub(opened).ModelInfer(one_text(), timeout=20)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
