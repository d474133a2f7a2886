"""Running `hasten serve`: starting, stopping, reloading, watching, hanging, and what it refuses to take."""

from __future__ import annotations

import http.client
import importlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.bundle import Bundle, open_bundle
from hasten.bundle.read import REFERENCE_OUTPUTS
from operating import Running, asked, install_obstinate, sealed, until

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")
TEXT = "one answer"
BODY = {"inputs": TEXT}
LEAN = ("--port", "0", "--threads", "1", "--instances", "1")
QUIET = (*LEAN, "--no-grpc")


@pytest.fixture(scope="module")
def classifier(tiny_classifier: Any, quick_build: Any, tmp_path_factory: Any) -> Bundle:
    target = tmp_path_factory.mktemp("operate") / "classifier"
    return quick_build(tiny_classifier("bert"), target, variants=["onnxruntime-fp32"])


@pytest.fixture(scope="module")
def other(tiny_classifier: Any, quick_build: Any, tmp_path_factory: Any) -> Bundle:
    """The same model by other names."""
    target = tmp_path_factory.mktemp("operate") / "other"
    return quick_build(tiny_classifier("bert", labels=("x", "y", "z")), target, variants=["onnxruntime-fp32"])


@pytest.fixture(scope="module")
def obstinate(tiny_classifier: Any, quick_build: Any, tmp_path_factory: Any) -> Iterator[Bundle]:
    """A bundle for another package's backend, which is installed as long as this lasts."""
    folder = tmp_path_factory.mktemp("operate")
    install_obstinate(folder / "site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OBSTINATE", str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")]))
        patch.syspath_prepend(folder / "site")
        yield quick_build(tiny_classifier("bert"), folder / "obstinate", variants=["obstinate-fp32"])
    del sys.modules["hasten_test_obstinate"]


def predict(server: Running, **about: Any) -> int:
    return server.ask("/predict", BODY, **about)[0]


# --- starting


def test_it_listens_first_and_is_ready_last(obstinate: Bundle, tmp_path: Path, free_port: int) -> None:
    grpc = pytest.importorskip("grpc")
    health = importlib.import_module("grpc_health.v1.health_pb2")
    stubs = importlib.import_module("grpc_health.v1.health_pb2_grpc")
    (tmp_path / "wait").touch()
    words = (str(obstinate.path), *LEAN, "--grpc-port", str(free_port))
    with (
        Running(tmp_path, *words, OBSTINATE=str(tmp_path)) as server,
        grpc.insecure_channel(f"127.0.0.1:{free_port}") as channel,
    ):
        assert server.ask("/v2/health/live")[0] == 200
        assert server.ask("/v2/health/ready")[0] == 503
        asking = stubs.HealthStub(channel).Check
        assert asking(health.HealthCheckRequest(), timeout=60).status == health.HealthCheckResponse.NOT_SERVING
        status, answer = server.ask("/predict", BODY)
        assert (status, json.loads(answer)) == (503, {"error": "the models are not loaded yet"})
        (tmp_path / "wait").unlink()
        server.ready()
        assert server.ask("/v2/health/ready")[0] == predict(server) == 200
        assert asking(health.HealthCheckRequest(), timeout=60).status == health.HealthCheckResponse.SERVING
        assert server.stop() == 0


def test_stopped_while_it_loads(obstinate: Bundle, tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    with Running(tmp_path, str(obstinate.path), *QUIET, OBSTINATE=str(tmp_path)) as server:
        assert server.port
        assert server.stop() == 0


def test_a_bundle_that_answers_otherwise_is_not_served(classifier: Bundle, tmp_path: Path) -> None:
    wrong = open_bundle(shutil.copytree(classifier.path, tmp_path / "wrong"))
    stored = {name: -value for name, value in wrong.reference().outputs.items()}
    np.savez_compressed(wrong.path / REFERENCE_OUTPUTS, **stored)
    sealed(wrong)
    with Running(tmp_path, str(wrong.path), *QUIET) as server:
        assert server.end() == 5
        assert "of its own rows like the original: largest error" in server.lines[-1]["message"]


def test_a_port_that_is_taken(classifier: Bundle, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Running(tmp_path, str(classifier.path), *QUIET, "--port", str(port), form="text") as server:
            assert server.end() == 7
            assert f"cannot listen on 127.0.0.1:{port}" in server.log
            assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("host", "key", "warns"), [("0.0.0.0", "", True), ("0.0.0.0", "k", False), ("127.0.0.1", "", False)]
)
def test_beyond_loopback_without_a_key_is_warned_of(
    obstinate: Bundle, tmp_path: Path, host: str, key: str, warns: bool
) -> None:
    (tmp_path / "wait").touch()
    words = (str(obstinate.path), *QUIET, "--host", host)
    with Running(tmp_path, *words, OBSTINATE=str(tmp_path), HASTEN_API_KEYS=key) as server:
        server.said("listening on")
        warnings = [line["message"] for line in server.lines if line["level"] == "warning"]
        assert any("anyone who reaches 0.0.0.0 may ask" in line for line in warnings) == warns


def test_a_directory_of_bundles(classifier: Bundle, other: Bundle, tmp_path: Path) -> None:
    models = tmp_path / "models"
    for bundle in (classifier, other):
        shutil.copytree(bundle.path, models / bundle.path.name)
    (models / ".hidden").symlink_to(classifier.path)
    (models / "notes").mkdir()
    with Running(tmp_path, str(models), *QUIET) as server:
        listed = json.loads(server.ready().ask("/v1/models")[1])["data"]
        assert sorted(entry["id"] for entry in listed) == ["classifier", "other"]


def test_a_model_that_was_built_before_is_served_at_once(
    tiny_classifier: Any, quick_build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/e2e has it built by the server itself, and again when it has changed."""
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    model = shutil.copytree(tiny_classifier("bert"), tmp_path / "model")
    quick_build(model, tmp_path / "cache" / "bundles" / "model", variants=["onnxruntime-fp32"])
    with Running(tmp_path, str(model), *QUIET) as server:
        port = server.ready().port
        assert json.loads(server.ask("/v1/models", port=port)[1])["data"][0]["id"] == "model"
        assert "is built first" not in server.log


# --- stopping


def test_a_request_that_is_being_sent_may_be_finished(classifier: Bundle, tmp_path: Path) -> None:
    with Running(tmp_path, str(classifier.path), *QUIET) as server:
        port, body = server.ready().port, json.dumps(BODY).encode()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            head = f"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body[:5])
            assert server.ask("/v2/health/ready", port=port)[0] == 200  # it has read the first part by now
            server.signal(signal.SIGTERM)
            until(lambda: is_refused(port), "the socket's end")
            # Longer than clients that are idle are waited for.
            client.settimeout(1.0)
            with pytest.raises(TimeoutError):
                client.recv(1)
            client.settimeout(60)
            client.sendall(body[5:])
            answer = client.recv(2**16)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in answer
        assert server.end() == 0


def test_a_slow_client_holds_nobody_up_for_long(classifier: Bundle, tmp_path: Path) -> None:
    with Running(tmp_path, str(classifier.path), *QUIET, "--drain", "1s") as server:
        port = server.ready().port
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(b"POST /predict HTTP/1.1\r\ncontent-length: 10\r\n\r\n")
            assert server.ask("/v2/health/ready", port=port)[0] == 200
            assert server.stop() == 0
        assert "not all were answered" in server.lines[-1]["message"]


def test_asked_twice_it_leaves_at_once(obstinate: Bundle, tmp_path: Path) -> None:
    with Running(tmp_path, str(obstinate.path), *QUIET, "--drain", "1h", OBSTINATE=str(tmp_path)) as server:
        port = server.ready().port
        (tmp_path / "hang").touch()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(request(BODY))
            until(lambda: waiting(server, port), "the request")
            server.signal(signal.SIGTERM)
            until(lambda: is_refused(port), "the socket's end")
            assert server.process.poll() is None
            server.signal(signal.SIGTERM)
            assert server.end() == 128 + signal.SIGTERM


def test_what_hangs_does_not_outlive_the_drain(obstinate: Bundle, tmp_path: Path) -> None:
    with Running(tmp_path, str(obstinate.path), *QUIET, "--drain", "1s", OBSTINATE=str(tmp_path)) as server:
        port = server.ready().port
        (tmp_path / "hang").touch()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(request(BODY))
            until(lambda: waiting(server, port), "the request")
            assert server.stop() == 0


def is_refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
    except ConnectionError:
        return True
    return False


def request(body: Any) -> bytes:
    data = json.dumps(body).encode()
    return b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)


def waiting(server: Running, port: int) -> bool:
    """Whether a second request, sent to find out, would have to wait for the first."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as second:
        second.sendall(request(BODY))
        scraped = metrics(server, port)
    return scraped.get(("hasten_waiting", ("classifier",)), 0) + scraped.get(("hasten_waiting", ("obstinate",)), 0) > 0


# --- reloading


class Clients:
    """Ask without pause, from several threads, each on a connection of its own; what they got is counted."""

    def __init__(self, server: Running, count: int = 4) -> None:
        self.statuses: Counter[int] = Counter()
        self.labels: Counter[str] = Counter()
        self.failures: list[str] = []
        self._port = server.port
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=[server]) for _ in range(count)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, server: Running) -> None:
        connection = server.connect(port=self._port)
        while not self._is_over.is_set():
            try:
                status, answer = asked(connection, "/predict", BODY)
            except (OSError, http.client.HTTPException) as error:
                with self._lock:
                    self.failures.append(repr(error))
                return
            with self._lock:
                self.statuses[status] += 1
                self.labels[json.loads(answer)[0]["label"] if status == 200 else answer] += 1
        connection.close()

    def wait_for(self, labels: set[str], more: int = 20) -> None:
        """Until so many more answers are of these."""
        before = sum(self.labels[label] for label in labels)
        until(lambda: self.failures or sum(self.labels[label] for label in labels) >= before + more, "an answer")


def swap(link: Path, target: Path) -> None:
    """In one step, as deployments do it."""
    fresh = link.with_name(f".{link.name}")
    fresh.symlink_to(target)
    fresh.replace(link)


def test_a_changed_bundle_is_loaded_under_load(classifier: Bundle, other: Bundle, tmp_path: Path) -> None:
    link = tmp_path / "current"
    swap(link, classifier.path)
    ours, theirs = {"bad", "fair", "good"}, {"x", "y", "z"}
    with Running(tmp_path, str(link), *QUIET, "--watch", "0.1s") as server, Clients(server.ready()) as clients:
        clients.wait_for(ours)
        for bundle, labels in ((other, theirs), (classifier, ours), (other, theirs)):
            swap(link, bundle.path)
            clients.wait_for(labels)
        before = Counter(clients.labels)
        clients.wait_for(theirs)
        assert sum((clients.labels - before)[label] for label in ours) == 0
    assert clients.failures == []
    assert set(clients.statuses) == {200}, clients.labels
    assert set(clients.labels) <= ours | theirs


def test_sighup_reloads_and_what_is_corrupt_leaves_what_was(classifier: Bundle, other: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(classifier.path, path)
    ours, theirs = {"bad", "fair", "good"}, {"x", "y", "z"}
    with Running(tmp_path, str(path), *QUIET) as server, Clients(server.ready(), 2) as clients:
        clients.wait_for(ours)
        graph = path / "variants" / "onnxruntime-fp32" / "model.onnx"
        damaged = bytearray(graph.read_bytes())
        damaged[len(damaged) // 2] ^= 0xFF
        graph.unlink()
        graph.write_bytes(damaged)
        server.signal(signal.SIGHUP)
        said = server.said("model has changed and cannot be served, the one before stays")
        assert said["level"] == "error"
        assert "does not match its hash" in said["message"]
        clients.wait_for(ours)
        # As a build replaces one: two renames, between which there is none.
        shutil.copytree(other.path, tmp_path / "next")
        path.rename(tmp_path / "before")
        server.signal(signal.SIGHUP)
        clients.wait_for(ours)
        (tmp_path / "next").rename(path)
        server.signal(signal.SIGHUP)
        clients.wait_for(theirs)
    assert clients.failures == []
    assert set(clients.statuses) == {200}, clients.labels


def test_whoever_found_a_model_just_before_it_was_replaced_asks_the_new_one(classifier: Bundle) -> None:
    from hasten.server.app import once_more
    from hasten.server.run import load_models, make_app
    from hasten.server.settings import Settings

    settings = Settings((str(classifier.path),), instances=1, threads=1)
    app = make_app(settings)
    load_models(app, settings)
    found: list[Any] = []
    answers: list[Any] = []

    def ask() -> None:
        found.append(app.models.named("classifier"))
        if len(found) == 1:
            app.models.load(classifier.path, "classifier")
        found[-1].ask(lambda: TEXT, lambda outputs, _: outputs, lambda answer, _: answers.append(answer))

    once_more(ask)
    assert app.close(60)
    assert len(found) == 2
    assert [list(answer) for answer in answers] == [["logits"]]


def test_models_are_unloaded_and_loaded(classifier: Bundle, other: Bundle, tmp_path: Path) -> None:
    with Running(tmp_path, str(classifier.path), str(other.path), *QUIET) as server:
        port = server.ready().port
        assert server.ask("/models/other", BODY, port=port)[0] == 200
        assert server.ask("/v2/repository/models/other/unload", b"", port=port)[0] == 200
        assert server.ask("/models/other", BODY, port=port)[0] == 404
        assert predict(server, port=port) == 200  # by now there is only one
        states = {
            entry["name"]: entry["state"] for entry in json.loads(server.ask("/v2/repository/index", b"", port=port)[1])
        }
        assert states == {"classifier": "READY", "other": "UNAVAILABLE"}
        series = metrics(server, port)
        assert ("hasten_waiting", ("classifier",)) in series
        assert ("hasten_waiting", ("other",)) not in series
        before = series["hasten_requests_total", ("other", "200")]
        assert server.ask("/v2/repository/models/other/load", b"", port=port)[0] == 200
        assert server.ask("/models/other", BODY, port=port)[0] == 200
        assert metrics(server, port)["hasten_requests_total", ("other", "200")] == before + 1
        assert server.ask("/v2/repository/models/nobody/load", b"", port=port)[0] == 404


# --- watching


def metrics(server: Running, port: int) -> dict[tuple[str, tuple[str, ...]], float]:
    """All samples of one scrape, by name and labels."""
    from prometheus_client.parser import text_string_to_metric_families

    status, text = server.ask("/metrics", port=port)
    assert status == 200
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, tuple(sample.labels.values())): sample.value for sample in samples}


def test_metrics(classifier: Bundle, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with Running(tmp_path, str(classifier.path), *QUIET, "--max-items", "4") as server:
        port = server.ready().port
        before = metrics(server, port)
        assert (
            server.ask("/predict", {"inputs": [TEXT, "a much longer text than the one before it"]}, port=port)[0] == 200
        )
        assert predict(server, port=port) == 200
        assert server.ask("/predict", {"inputs": [TEXT] * 5}, port=port)[0] == 413
        for unknown in ("a", "b"):
            assert server.ask(f"/models/{unknown}", BODY, port=port)[0] == 404
            assert server.ask(f"/{unknown}", port=port)[0] == 404
        after = metrics(server, port)
    name = ("classifier",)
    for histogram in ("request", "encode", "queue"):
        expected = 3 if histogram == "request" else 2
        assert after[f"hasten_{histogram}_seconds_count", name] == expected
        assert after[f"hasten_{histogram}_seconds_sum", name] > 0
    assert after["hasten_compute_seconds_count", name] == after["hasten_batch_rows_count", name] in (2, 3)
    assert after["hasten_batch_rows_sum", name] == 3
    assert after["hasten_tokens_total", name] > 3
    assert after["hasten_padding_tokens_total", name] >= 0
    assert after["hasten_rejected_total", name] == 0
    assert after["hasten_waiting", name] == 0
    assert after["hasten_peak_memory_bytes", ()] > 2**20
    assert after["hasten_requests_total", ("classifier", "200")] == 2
    assert after["hasten_requests_total", ("classifier", "413")] == 1
    assert after["hasten_requests_total", ("", "404")] == 4
    # What was asked for and is not there leaves no label behind.
    labels = {label for _, labels in after for label in labels} - {label for _, labels in before for label in labels}
    assert labels <= {"", "200", "404", "413"}


def test_what_waits_is_counted_and_refused(obstinate: Bundle, tmp_path: Path) -> None:
    words = (str(obstinate.path), *QUIET, "--max-queue", "2")
    with Running(tmp_path, *words, OBSTINATE=str(tmp_path)) as server:
        port = server.ready().port
        (tmp_path / "hang").touch()
        clients = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(2)]
        for client in clients:
            client.sendall(request(BODY))
        until(lambda: metrics(server, port)["hasten_waiting", ("obstinate",)] == 1, "one that runs, and one that waits")
        connection = server.connect(port=port)
        connection.request("POST", "/predict", json.dumps(BODY))
        refused = connection.getresponse()
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert metrics(server, port)["hasten_rejected_total", ("obstinate",)] == 1
        (tmp_path / "hang").unlink()
        for client in clients:
            assert client.recv(100).startswith(b"HTTP/1.1 200")
            client.close()
        connection.close()
        (tmp_path / "fail").touch()
        status, answer = server.ask("/predict", BODY, port=port)
        assert (status, "out of luck" in answer, "Traceback" in answer) == (500, False, False)
        (tmp_path / "fail").unlink()
        assert predict(server, port=port) == 200


def test_every_line_of_the_log_is_an_object(classifier: Bundle, tmp_path: Path) -> None:
    secret = "nobody else's business"
    with Running(tmp_path, str(classifier.path), *LEAN) as server:
        port = server.ready().port
        connection = server.connect(port=port)
        connection.request("POST", "/predict", json.dumps({"inputs": secret}), {"x-request-id": "mine-1"})
        response = connection.getresponse()
        assert json.loads(response.read())
        assert response.headers["x-request-id"] == "mine-1"
        connection.request("POST", "/predict", json.dumps({"inputs": [secret, 5]}))
        response = connection.getresponse()
        assert response.read()
        given = response.headers["x-request-id"]
        assert given not in ("", "mine-1")
        connection.close()
        trace = "0af7651916cd43dd8448eb211c80319c"
        headers = (
            "x-request-id: forged\x85{}\r\n"
            "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n"
            "connection: close\r\n\r\n"
        )
        for path in ("/%0a{}", "/\x85%1b[2J", "/" + "long" * 1000):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
                raw.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n{headers}".encode("latin-1"))
                assert raw.recv(2**16).startswith(b"HTTP/1.1 4")
        assert server.stop() == 0
        lines = server.lines
        assert server.log.isascii()
    assert all({"time", "level", "message"} <= set(line) for line in lines)
    requests = {line["request"]: line for line in lines if "request" in line}
    mine = requests["mine-1"]
    assert (mine["message"], mine["model"], mine["status"], mine["rows"]) == ("POST /predict", "classifier", 200, 1)
    assert mine["ms"] >= mine["compute_ms"] > 0
    assert requests[given]["status"] == 400
    assert [line for line in lines if line.get("trace") == trace]
    assert not [name for name in requests if "forged" in name]
    assert max(len(line["message"]) for line in lines) < 300
    assert secret not in server.log


def test_text_for_people(classifier: Bundle, tmp_path: Path) -> None:
    with Running(tmp_path, str(classifier.path), *QUIET, "--log-requests", form="text") as server:
        server.ready()
        port = int(server.log.split("listening on http://127.0.0.1:")[1].split(";")[0])
        assert server.ask("/predict", BODY, port=port, x_request_id="mine-2")[0] == 200
        assert server.stop() == 0
        line = next(line for line in server.log.splitlines() if "mine-2" in line)
    assert line.startswith("INFO: POST /predict request=mine-2 model=classifier status=200 ms=")


def test_text_never_breaks_a_line() -> None:
    import logging

    from hasten.server.logs import _Json, _Text

    record = logging.LogRecord("hasten", logging.INFO, "", 0, "%s", ("GET /a\nINFO: forged\x1b[2J\u2028\ud800",), None)
    assert _Text().format(record) == "INFO: GET /a\\u000aINFO: forged\\u001b[2J\\u2028\ud800"
    assert json.loads(_Json().format(record))["message"].startswith("GET /a\nINFO")
    assert _Json().format(record).isprintable()


class Collector:
    """A real HTTP server that takes spans as a collector of OpenTelemetry does."""

    def __init__(self) -> None:
        spans: list[Any] = []
        self.spans = spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

                sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
                for resource in sent.resource_spans:
                    for scope in resource.scope_spans:
                        spans.extend((resource.resource, span) for span in scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def values(attributes: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}


def test_spans_go_to_the_collector(classifier: Bundle, tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="tracing needs hasten[tracing]")
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with (
        Collector() as collector,
        Running(tmp_path, str(classifier.path), *QUIET, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url) as server,
    ):
        port = server.ready().port
        for flags in ("01", "00"):  # the second is not to be recorded
            headers = {"traceparent": f"00-{trace}-{parent}-{flags}", "x-request-id": f"mine-{flags}"}
            assert server.ask("/predict", BODY, port=port, **headers)[0] == 200
        assert server.ask("/v2/health/ready", port=port)[0] == 200
        assert server.ask("/predict", {"inputs": 5}, port=port)[0] == 400
        # Nothing waits for the exporter's own interval: leaving sends what is left.
        assert server.stop() == 0
        spans = {span.name: (resource, span) for resource, span in collector.spans if span.trace_id.hex() == trace}
        others = [span for _, span in collector.spans if span.trace_id.hex() != trace]
        assert all(line["level"] == "info" for line in server.lines), server.log
    resource, whole = spans["POST /predict"]
    assert values(resource.attributes)["service.name"] == "hasten"
    assert whole.parent_span_id.hex() == parent
    assert whole.kind == whole.SPAN_KIND_SERVER
    about = values(whole.attributes)
    assert (about["hasten.model"], about["hasten.request"], about["hasten.rows"]) == ("classifier", "mine-01", 1)
    assert (about["http.response.status_code"], about["hasten.tokens"] > 1) == (200, True)
    end = whole.start_time_unix_nano
    for name in ("encode", "queue", "compute"):
        _, span = spans.pop(name)
        assert span.parent_span_id == whole.span_id
        assert end <= span.start_time_unix_nano <= span.end_time_unix_nano <= whole.end_time_unix_nano
        end = span.end_time_unix_nano
    assert list(spans) == ["POST /predict"]
    assert [values(span.attributes)["http.response.status_code"] for span in others] == [400]


def test_a_collector_that_is_not_there_holds_nothing_up(classifier: Bundle, tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="tracing needs hasten[tracing]")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Running(tmp_path, str(classifier.path), *QUIET, OTEL_EXPORTER_OTLP_ENDPOINT=url) as server:
            assert predict(server.ready()) == 200
            assert server.stop() == 0
            assert server.lines  # what the exporter complains of is JSON too


def test_when_tracing_is_wanted() -> None:
    from hasten.core.errors import PlanError
    from hasten.server.tracing import Tracer, is_configured

    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}
    assert not is_configured({})
    assert is_configured(endpoint)
    assert is_configured({"OTEL_TRACES_EXPORTER": "otlp"})
    assert not is_configured(endpoint | {"OTEL_TRACES_EXPORTER": "none"})
    assert not is_configured(endpoint | {"OTEL_SDK_DISABLED": "true"})
    with pytest.raises(PlanError, match="traces are not sent by grpc"):
        Tracer(endpoint | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})


# --- who may ask


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    folder = tmp_path_factory.mktemp("tls")
    pair = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-out", pair[0], "-keyout", pair[1]],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return pair


def test_tls(classifier: Bundle, certificate: tuple[Path, Path], tmp_path: Path) -> None:
    grpc = pytest.importorskip("grpc")
    health = importlib.import_module("grpc_health.v1.health_pb2")
    stubs = importlib.import_module("grpc_health.v1.health_pb2_grpc")
    cert, key = certificate
    words = (str(classifier.path), *LEAN, "--tls-cert", str(cert), "--tls-key", str(key))
    with Running(tmp_path, *words) as server:
        port = server.ready().port
        context = ssl.create_default_context(cafile=cert)
        connection = server.connect(context, port)
        assert asked(connection, "/predict", BODY)[0] == 200
        connection.close()
        trusted = grpc.ssl_channel_credentials(cert.read_bytes())
        with grpc.secure_channel(f"localhost:{server.grpc_port}", trusted) as channel:
            answer = stubs.HealthStub(channel).Check(health.HealthCheckRequest(), timeout=60)
            assert answer.status == health.HealthCheckResponse.SERVING
        with pytest.raises((OSError, http.client.HTTPException)):
            server.ask("/v2/health/live", port=port)  # in the clear
        with pytest.raises(ssl.SSLCertVerificationError):
            asked(server.connect(ssl.create_default_context(), port), "/v2/health/live")
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("words", "wrong"),
    [(["--tls-cert"], "a certificate and its key"), (["--tls-cert", "--tls-key"], "no certificate and key in")],
)
def test_tls_that_cannot_be(classifier: Bundle, tmp_path: Path, words: list[str], wrong: str) -> None:
    (tmp_path / "no.pem").write_text("no certificate")
    given = [word for option in words for word in (option, str(tmp_path / "no.pem"))]
    with Running(tmp_path, str(classifier.path), *QUIET, *given) as server:
        assert server.end() == 2
        assert wrong in server.lines[-1]["message"]


def test_limits(classifier: Bundle, tmp_path: Path) -> None:
    limits = ("--max-body", "2KB", "--max-items", "3", "--max-tokens", "20", "--max-connections", "4")
    times = ("--read-timeout", "0.3s", "--idle-timeout", "1s")
    with Running(tmp_path, str(classifier.path), *QUIET, *limits, *times) as server:
        port = server.ready().port
        for inputs, words in (
            ("a" * 5000, "larger than 2048 bytes"),
            ([TEXT] * 4, "4 items are more than 3"),
            (["so " * 15] * 2, "tokens are more than 20"),
        ):
            status, answer = server.ask("/predict", {"inputs": inputs}, port=port)
            assert (status, words in answer) == (413, True), answer
        slow = socket.create_connection(("127.0.0.1", port), timeout=60)
        slow.sendall(b"POST /predict HTTP/1.1\r\n")
        assert slow.recv(1) == b""  # closed, a third of a second later
        idle = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(4)]
        fifth = socket.create_connection(("127.0.0.1", port), timeout=60)
        assert fifth.recv(2**16).startswith(b"HTTP/1.1 503")
        for client in idle:
            assert client.recv(1) == b""  # closed, a second later
        for client in (slow, fifth, *idle):
            client.close()
        assert predict(server, port=port) == 200


def test_a_request_has_its_time(classifier: Bundle, tmp_path: Path) -> None:
    with Running(tmp_path, str(classifier.path), *QUIET, "--timeout", "0.000001s") as server:
        status, answer = server.ready().ask("/predict", BODY)
        assert (status, "time was over" in answer or "longer than it was given" in answer) == (504, True), answer


# --- when something hangs or dies


def test_a_session_that_hangs_ends_the_process(obstinate: Bundle, tmp_path: Path) -> None:
    with Running(tmp_path, str(obstinate.path), *QUIET, "--hang", "0.5s", OBSTINATE=str(tmp_path)) as server:
        port = server.ready().port
        (tmp_path / "hang").touch()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(request(BODY))
            until(lambda: server.ask("/v2/health/live", port=port)[0] == 503, "the loss of liveness")
            assert server.ask("/v2/health/ready", port=port)[0] == 503
            assert server.end() == 70
        assert server.lines[-1]["level"] == "critical"


def child_of(server: Running) -> int | None:
    """The process that a supervisor has started."""
    try:
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    except FileNotFoundError:
        pytest.skip("who is whose child cannot be told here")
    return int(children[0]) if children else None


def is_gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture
def free_port() -> int:
    """A supervised server is found again at the same place."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_a_supervisor_starts_it_again(obstinate: Bundle, tmp_path: Path, free_port: int) -> None:
    words = (str(obstinate.path), *QUIET, "--port", str(free_port), "--hang", "0.5s", "--supervise")
    with Running(tmp_path, *words, OBSTINATE=str(tmp_path)) as server:
        assert predict(server.ready(), port=free_port) == 200
        first = child_of(server)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        server.said("was killed by signal 9")
        until(lambda: answers(server, free_port), "the second one")
        second = child_of(server)
        assert second not in (None, first)

        (tmp_path / "hang").touch()
        with socket.create_connection(("127.0.0.1", free_port), timeout=60) as client:
            client.sendall(request(BODY))
            server.said("the server ended with 70")
        (tmp_path / "hang").unlink()
        until(lambda: answers(server, free_port), "the third one")
        third = child_of(server)

        # One whose event loop stands still cannot even say that it hangs.
        assert third is not None
        os.kill(third, signal.SIGSTOP)
        server.said("the server does not answer any more")
        until(lambda: answers(server, free_port), "the fourth one")
        fourth = child_of(server)
        assert fourth not in (None, first, second, third)
        assert server.stop() == 0
        assert fourth is not None
        assert is_gone(fourth)


def answers(server: Running, port: int) -> bool:
    try:
        return predict(server, port=port) == 200
    except (OSError, http.client.HTTPException):
        return False


def test_without_its_supervisor_it_leaves(classifier: Bundle, tmp_path: Path) -> None:
    with Running(tmp_path, str(classifier.path), *QUIET, "--supervise") as server:
        child = child_of(server.ready())
        assert child is not None
        server.signal(signal.SIGKILL)
        server.end()
        until(lambda: is_gone(child), "the server's end")
        assert server.said("the supervisor is gone")


def test_a_supervisor_does_not_start_what_cannot_start(tmp_path: Path) -> None:
    with Running(tmp_path, str(tmp_path / "nothing"), *QUIET, "--supervise") as server:
        assert server.end() == 2
        assert sum("no such directory" in line["message"] for line in server.lines) == 1


def test_sighup_reaches_a_supervised_server(classifier: Bundle, other: Bundle, tmp_path: Path) -> None:
    link = tmp_path / "current"
    swap(link, classifier.path)
    with Running(tmp_path, str(link), *QUIET, "--supervise") as server:
        server.ready()
        swap(link, other.path)
        server.signal(signal.SIGHUP)
        server.said("current has changed: onnxruntime-fp32 is served now")
        assert server.stop() == 0
