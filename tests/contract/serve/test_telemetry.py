"""Telemetry of `hasten serve`: metrics, logs and traces."""

from __future__ import annotations

import json
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hasten.bundle import Bundle
from support.faulty_backend import faulty_environment
from support.server_operations import BODY, LEAN, QUIET, TEXT, Running, metrics, predict, request
from support.wait import wait_until

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")


def test_metrics_count_requests_batches_and_tokens(classifier_bundle: Bundle, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with Running(tmp_path, str(classifier_bundle.path), *QUIET, "--max-client-batch-size", "4") as server:
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
        with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
            raw.sendall(b"no HTTP\r\n\r\n")
            assert raw.recv(2**16).startswith(b"HTTP/1.1 400")
        after = metrics(server, port)
    name = ("classifier",)
    for histogram in ("request", "encode", "queue"):
        expected = 3 if histogram == "request" else 2
        assert after[f"hasten_{histogram}_seconds_count", name] == expected
        assert after[f"hasten_{histogram}_seconds_sum", name] > 0
    assert after["hasten_compute_seconds_count", name] == after["hasten_batch_rows_count", name] in (2, 3)
    assert after["hasten_batch_rows_sum", name] == 3
    assert after["hasten_prompt_tokens_total", name] > 3
    assert after["hasten_padding_tokens_total", name] >= 0
    assert after["hasten_rejected_total", name] == 0
    assert after["hasten_queue_size", name] == 0
    assert after["hasten_peak_memory_bytes", ()] > 2**20
    assert after["hasten_requests_total", ("classifier", "200")] == 2
    assert after["hasten_requests_total", ("classifier", "413")] == 1
    assert after["hasten_requests_total", ("", "404")] == 4
    assert after["hasten_requests_total", ("", "400")] == 1
    # Unknown models and paths create no labels.
    labels = {label for _, labels in after for label in labels} - {label for _, labels in before for label in labels}
    assert labels <= {"", "200", "400", "404", "413"}


def test_queue_is_counted_and_overload_is_rejected(faulty_bundle: Bundle, tmp_path: Path) -> None:
    words = (str(faulty_bundle.path), *QUIET, "--max-queue", "3")
    with Running(tmp_path, *words, **faulty_environment(faulty_bundle, tmp_path)) as server:
        port = server.ready().port
        (tmp_path / "hang").touch()
        clients = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(3)]
        # One after the other: requests that arrive together run together.
        clients[0].sendall(request(BODY))
        wait_until((tmp_path / "hangs").exists, "a running request")
        clients[1].sendall(request(BODY))
        wait_until(lambda: metrics(server, port)["hasten_queue_size", ("faulty",)] == 1, "a queued request")
        # The deadline is enforced although no session is free.
        text = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [TEXT]}
        hurried = {"inputs": [text], "parameters": {"timeout": 100_000}}
        status, answer = server.ask("/v2/models/faulty/infer", hurried, port=port)
        assert (status, "deadline exceeded" in answer) == (504, True)
        clients[2].sendall(request(BODY))
        wait_until(lambda: metrics(server, port)["hasten_queue_size", ("faulty",)] == 2, "another queued request")
        connection = server.connect(port=port)
        connection.request("POST", "/predict", json.dumps(BODY))
        rejected = connection.getresponse()
        assert rejected.status == 429
        assert int(rejected.headers["retry-after"]) >= 1
        assert metrics(server, port)["hasten_rejected_total", ("faulty",)] == 1
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


def test_json_log_has_one_object_per_line(classifier_bundle: Bundle, tmp_path: Path) -> None:
    secret = "a private text"
    with Running(tmp_path, str(classifier_bundle.path), *LEAN) as server:
        port = server.ready().port
        connection = server.connect(port=port)
        connection.request("POST", "/predict", json.dumps({"inputs": secret}), {"x-request-id": "mine-1"})
        response = connection.getresponse()
        assert json.loads(response.read())
        assert response.headers["x-request-id"] == "mine-1"
        connection.request("POST", "/predict", json.dumps({"inputs": [secret, 5]}))
        response = connection.getresponse()
        assert response.read()
        assigned = response.headers["x-request-id"]
        assert assigned not in ("", "mine-1")
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
    assert requests[assigned]["status"] == 400
    assert [line for line in lines if line.get("trace") == trace]
    assert not [name for name in requests if "forged" in name]
    assert max(len(line["message"]) for line in lines) < 300
    assert secret not in server.log


def test_text_log_has_one_line_per_request(classifier_bundle: Bundle, tmp_path: Path) -> None:
    with Running(tmp_path, str(classifier_bundle.path), *QUIET, "--log-requests", form="text") as server:
        server.ready()
        port = int(server.log.split("listening on http://127.0.0.1:")[1].split(";")[0])
        assert server.ask("/predict", BODY, port=port, x_request_id="mine-2")[0] == 200
        assert server.stop() == 0
        line = next(line for line in server.log.splitlines() if "mine-2" in line)
    assert line.startswith("INFO: POST /predict request=mine-2 model=classifier status=200 ms=")


def test_log_escapes_control_characters() -> None:
    import logging

    from hasten.server.telemetry.logs import _Json, _Text

    record = logging.LogRecord("hasten", logging.INFO, "", 0, "%s", ("GET /a\nINFO: forged\x1b[2J\u2028\ud800",), None)
    assert _Text().format(record) == "INFO: GET /a\\u000aINFO: forged\\u001b[2J\\u2028\ud800"
    assert json.loads(_Json().format(record))["message"].startswith("GET /a\nINFO")
    assert _Json().format(record).isprintable()
    try:
        raise ValueError("wrong\nERROR: forged\r\x1b[2J")
    except ValueError:
        record.exc_info = sys.exc_info()
    first, *others = _Text().format(record).split("\n")
    assert first.startswith("INFO: GET /a")
    assert others[-2:] == ["    ValueError: wrong", "    ERROR: forged\\u000d\\u001b[2J"]
    assert all(line.startswith("    ") for line in others)


class Collector:
    """An HTTP server that collects spans as an OpenTelemetry collector does."""

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


def test_spans_are_exported_to_the_collector(classifier_bundle: Bundle, tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="tracing needs hasten[tracing]")
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with (
        Collector() as collector,
        Running(tmp_path, str(classifier_bundle.path), *QUIET, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url) as server,
    ):
        port = server.ready().port
        for flags in ("01", "00"):  # the second is not to be recorded
            headers = {"traceparent": f"00-{trace}-{parent}-{flags}", "x-request-id": f"mine-{flags}"}
            assert server.ask("/predict", BODY, port=port, **headers)[0] == 200
        assert server.ask("/v2/health/ready", port=port)[0] == 200
        assert server.ask("/predict", {"inputs": 5}, port=port)[0] == 400
        # The server sends the remaining spans on exit, before the exporter's interval is over.
        assert server.stop() == 0
        spans = {span.name: (resource, span) for resource, span in collector.spans if span.trace_id.hex() == trace}
        others = [span for _, span in collector.spans if span.trace_id.hex() != trace]
        assert all(line["level"] == "info" for line in server.lines), server.log
    resource, whole = spans["POST /predict"]
    assert values(resource.attributes)["service.name"] == "hasten"
    assert whole.parent_span_id.hex() == parent
    assert whole.kind == whole.SPAN_KIND_SERVER
    attributes = values(whole.attributes)
    assert (attributes["hasten.model"], attributes["hasten.request"], attributes["hasten.rows"]) == (
        "classifier",
        "mine-01",
        1,
    )
    assert (attributes["http.response.status_code"], attributes["hasten.tokens"] > 1) == (200, True)
    end = whole.start_time_unix_nano
    for name in ("encode", "queue", "compute"):
        _, span = spans.pop(name)
        assert span.parent_span_id == whole.span_id
        assert end <= span.start_time_unix_nano <= span.end_time_unix_nano <= whole.end_time_unix_nano
        end = span.end_time_unix_nano
    assert list(spans) == ["POST /predict"]
    assert [values(span.attributes)["http.response.status_code"] for span in others] == [400]


@pytest.mark.slow
def test_unreachable_collector_does_not_delay_shutdown(classifier_bundle: Bundle, tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="tracing needs hasten[tracing]")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Running(tmp_path, str(classifier_bundle.path), *QUIET, OTEL_EXPORTER_OTLP_ENDPOINT=url) as server:
            assert predict(server.ready()) == 200
            assert server.stop() == 0
            assert server.lines  # errors of the exporter are JSON too


def test_tracing_is_configured_by_environment_variables() -> None:
    from hasten.core.errors import PlanError
    from hasten.server.telemetry.tracing import Tracer, is_configured

    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}
    assert not is_configured({})
    assert is_configured(endpoint)
    assert is_configured({"OTEL_TRACES_EXPORTER": "otlp"})
    assert not is_configured(endpoint | {"OTEL_TRACES_EXPORTER": "none"})
    assert not is_configured(endpoint | {"OTEL_SDK_DISABLED": "true"})
    with pytest.raises(PlanError, match="traces over grpc are not supported"):
        Tracer(endpoint | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
