"""Operate `hasten serve`: start, stop, stall, and hot reload."""

from __future__ import annotations

import http.client
import importlib
import json
import shutil
import signal
import socket
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.bundle import Bundle, open_bundle
from hasten.bundle.read import REFERENCE_OUTPUTS
from support.faulty_backend import faulty_environment
from support.server_operations import (
    BODY,
    LEAN,
    QUIET,
    TEXT,
    Running,
    asked,
    is_busy,
    is_refused,
    metrics,
    predict,
    request,
    sealed,
    swap,
)
from support.wait import wait_until

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")
pytestmark = pytest.mark.usefixtures("workers")


# --- starting


def test_server_listens_before_models_are_loaded(
    classifier_bundle: Bundle, faulty_bundle: Bundle, tmp_path: Path, free_port: int
) -> None:
    grpc = pytest.importorskip("grpc")
    health = importlib.import_module("grpc_health.v1.health_pb2")
    stubs = importlib.import_module("grpc_health.v1.health_pb2_grpc")
    (tmp_path / "wait").touch()
    words = (str(classifier_bundle.path), str(faulty_bundle.path), *LEAN, "--grpc-port", str(free_port))
    with (
        Running(tmp_path, *words, **faulty_environment(faulty_bundle, tmp_path)) as server,
        grpc.insecure_channel(f"127.0.0.1:{free_port}") as channel,
    ):
        assert server.ask("/v2/health/live")[0] == 200
        assert server.ask("/v2/health/ready")[0] == 503
        asking = stubs.HealthStub(channel).Check
        assert asking(health.HealthCheckRequest(), timeout=60).status == health.HealthCheckResponse.NOT_SERVING
        status, answer = server.ask("/predict", BODY)
        assert (status, json.loads(answer)) == (503, {"error": "the models are not loaded yet"})
        # Each model answers as soon as it is loaded.
        wait_until(lambda: server.ask("/v2/models/classifier/ready")[0] == 200, "the first model")
        assert server.ask("/models/classifier", BODY)[0] == 200
        status, answer = server.ask("/models/faulty", BODY)
        assert (status, json.loads(answer)) == (503, {"error": "'faulty' is not loaded yet"})
        assert server.ask("/v2/models/faulty/ready")[0] == server.ask("/v2/health/ready")[0] == 503
        assert server.ask("/v2/models/missing/ready")[0] == 404
        (tmp_path / "wait").unlink()
        server.ready()
        assert server.ask("/v2/health/ready")[0] == server.ask("/models/faulty", BODY)[0] == 200
        assert asking(health.HealthCheckRequest(), timeout=60).status == health.HealthCheckResponse.SERVING
        assert server.stop() == 0


def test_server_stops_while_models_load(faulty_bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    with Running(tmp_path, str(faulty_bundle.path), *QUIET, **faulty_environment(faulty_bundle, tmp_path)) as server:
        assert server.port
        assert server.stop() == 0


def test_bundle_with_other_answers_than_its_reference_is_not_served(classifier_bundle: Bundle, tmp_path: Path) -> None:
    wrong = open_bundle(shutil.copytree(classifier_bundle.path, tmp_path / "wrong"))
    stored = {name: -value for name, value in wrong.reference().outputs.items()}
    np.savez_compressed(wrong.path / REFERENCE_OUTPUTS, **stored)
    sealed(wrong)
    with Running(tmp_path, str(wrong.path), *QUIET) as server:
        assert server.end() == 5
        assert "does not reproduce its reference answers (9 rows): largest error" in server.lines[-1]["message"]


def test_damaged_bundle_is_reported_at_start(classifier_bundle: Bundle, tmp_path: Path) -> None:
    path = shutil.copytree(classifier_bundle.path, tmp_path / "damaged")
    (path / "manifest.json").write_text('{"schema": 1')
    with Running(tmp_path, str(path), *QUIET) as server:
        assert server.end() == 6
        assert "manifest.json is damaged" in server.lines[-1]["message"]


def test_port_in_use_is_reported(classifier_bundle: Bundle, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Running(tmp_path, str(classifier_bundle.path), *QUIET, "--port", str(port), form="text") as server:
            assert server.end() == 7
            assert f"cannot listen on 127.0.0.1:{port}" in server.log
            assert "hint: choose another --port" in server.log
            assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("host", "key", "warns"), [("0.0.0.0", "", True), ("0.0.0.0", "k", False), ("127.0.0.1", "", False)]
)
def test_public_address_without_api_keys_logs_a_warning(
    faulty_bundle: Bundle, tmp_path: Path, host: str, key: str, warns: bool
) -> None:
    (tmp_path / "wait").touch()
    words = (str(faulty_bundle.path), *QUIET, "--host", host)
    with Running(tmp_path, *words, **faulty_environment(faulty_bundle, tmp_path), HASTEN_API_KEYS=key) as server:
        server.said("listening on")
        warnings = [line["message"] for line in server.lines if line["level"] == "warning"]
        assert any("0.0.0.0 is open to everyone" in line for line in warnings) == warns


def test_directory_of_bundles_is_served_and_reloaded(
    classifier_bundle: Bundle, other_bundle: Bundle, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    for bundle in (classifier_bundle, other_bundle):
        shutil.copytree(bundle.path, models / bundle.path.name)
    (models / ".hidden").symlink_to(classifier_bundle.path)
    (models / "notes").mkdir()
    keys = tmp_path / "keys"
    keys.write_text("first\n")
    with Running(tmp_path, str(models), *QUIET, "--api-key-file", str(keys)) as server:

        def listed(key: str) -> list[str]:
            entries = json.loads(server.ask("/v1/models", authorization=f"Bearer {key}")[1])["data"]
            return sorted(entry["id"] for entry in entries)

        server.ready()
        assert listed("first") == ["classifier", "other"]
        server.signal(signal.SIGHUP)
        server.said("reload: no bundle has changed")
        # SIGHUP loads new bundles and API keys.
        shutil.copytree(other_bundle.path, tmp_path / "third")
        (tmp_path / "third").rename(models / "third")
        keys.write_text("second\nthird\n")
        server.signal(signal.SIGHUP)
        server.said("third is new: now serving onnxruntime-fp32")
        server.said("reloaded 2 API keys")
        assert listed("second") == ["classifier", "other", "third"]
        assert server.ask("/v1/models", authorization="Bearer first")[0] == 401
        keys.write_text("# none\n")
        server.signal(signal.SIGHUP)
        assert server.said("the API keys were not reloaded")["level"] == "error"
        assert len(listed("third")) == 3


@pytest.mark.slow
def test_model_that_was_built_before_is_not_built_again(
    tiny_classifier: Any, quick_build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/e2e covers a server that builds the model, and builds it again after a change."""
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    model = shutil.copytree(tiny_classifier("bert"), tmp_path / "model")
    quick_build(model, tmp_path / "cache" / "bundles" / "model", variants=["onnxruntime-fp32"])
    with Running(tmp_path, str(model), *QUIET) as server:
        port = server.ready().port
        assert json.loads(server.ask("/v1/models", port=port)[1])["data"][0]["id"] == "model"
        assert "building " not in server.log


# --- stopping


def test_partly_received_request_is_answered_during_drain(classifier_bundle: Bundle, tmp_path: Path) -> None:
    with Running(tmp_path, str(classifier_bundle.path), *QUIET) as server:
        port, body = server.ready().port, json.dumps(BODY).encode()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            head = f"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body[:5])
            assert server.ask("/v2/health/ready", port=port)[0] == 200  # it has read the first part by now
            server.signal(signal.SIGTERM)
            wait_until(lambda: is_refused(port), "the listening socket to close")
            # Longer than idle clients are waited for.
            client.settimeout(1.0)
            with pytest.raises(TimeoutError):
                client.recv(1)
            client.settimeout(60)
            client.sendall(body[5:])
            answer = client.recv(2**16)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in answer
        assert server.end() == 0


def test_slow_client_is_dropped_after_drain_timeout(classifier_bundle: Bundle, tmp_path: Path) -> None:
    with Running(tmp_path, str(classifier_bundle.path), *QUIET, "--drain-timeout", "1s") as server:
        port = server.ready().port
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n")
            assert server.ask("/v2/health/ready", port=port)[0] == 200
            assert server.stop() == 0
        assert "not all requests were answered" in server.lines[-1]["message"]


def test_second_signal_exits_at_once(faulty_bundle: Bundle, tmp_path: Path) -> None:
    with Running(
        tmp_path,
        str(faulty_bundle.path),
        *QUIET,
        "--drain-timeout",
        "1h",
        **faulty_environment(faulty_bundle, tmp_path),
    ) as server:
        port = server.ready().port
        (tmp_path / "hang").touch()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(request(BODY))
            wait_until(lambda: is_busy(server, port), "the request to run")
            server.signal(signal.SIGTERM)
            wait_until(lambda: is_refused(port), "the listening socket to close")
            assert server.process.poll() is None
            server.signal(signal.SIGTERM)
            assert server.end() == 128 + signal.SIGTERM


def test_stalled_session_does_not_outlive_the_drain(faulty_bundle: Bundle, tmp_path: Path) -> None:
    with Running(
        tmp_path,
        str(faulty_bundle.path),
        *QUIET,
        "--drain-timeout",
        "1s",
        **faulty_environment(faulty_bundle, tmp_path),
    ) as server:
        port = server.ready().port
        (tmp_path / "hang").touch()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(request(BODY))
            wait_until(lambda: is_busy(server, port), "the request to run")
            assert server.stop() == 0


def test_stalled_session_fails_liveness_and_exits_with_70(faulty_bundle: Bundle, tmp_path: Path, workers: int) -> None:
    if workers > 1:
        pytest.skip("a stalled engine process is replaced: test_processes.py")
    words = (str(faulty_bundle.path), *QUIET, "--stall-timeout", "0.5s")
    with Running(tmp_path, *words, **faulty_environment(faulty_bundle, tmp_path)) as server:
        port = server.ready().port
        (tmp_path / "hang").touch()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(request(BODY))
            wait_until(lambda: server.ask("/v2/health/live", port=port)[0] == 503, "the loss of liveness")
            assert server.ask("/v2/health/ready", port=port)[0] == 503
            assert server.end() == 70
        assert server.lines[-1]["level"] == "critical"


def test_missing_bundle_exits_with_an_error(tmp_path: Path) -> None:
    with Running(tmp_path, str(tmp_path / "nothing"), *QUIET) as server:
        assert server.end() == 2
        assert sum("no such directory" in line["message"] for line in server.lines) == 1


# --- reloading


class Clients:
    """Send requests from several threads without pause, each on its own connection, and count the answers."""

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
        """Wait for this many more answers with one of the labels."""
        before = sum(self.labels[label] for label in labels)
        wait_until(lambda: self.failures or sum(self.labels[label] for label in labels) >= before + more, "an answer")


def test_changed_bundle_is_reloaded_under_load(classifier_bundle: Bundle, other_bundle: Bundle, tmp_path: Path) -> None:
    link = tmp_path / "current"
    swap(link, classifier_bundle.path)
    ours, theirs = {"bad", "fair", "good"}, {"x", "y", "z"}
    with (
        Running(tmp_path, str(link), *QUIET, "--reload-interval", "0.1s") as server,
        Clients(server.ready()) as clients,
    ):
        clients.wait_for(ours)
        for bundle, labels in ((other_bundle, theirs), (classifier_bundle, ours), (other_bundle, theirs)):
            swap(link, bundle.path)
            clients.wait_for(labels)
        before = Counter(clients.labels)
        clients.wait_for(theirs)
        assert sum((clients.labels - before)[label] for label in ours) == 0
    assert clients.failures == []
    assert set(clients.statuses) == {200}, clients.labels
    assert set(clients.labels) <= ours | theirs


def test_sighup_reloads_and_keeps_old_model_if_new_is_damaged(
    classifier_bundle: Bundle, other_bundle: Bundle, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(classifier_bundle.path, path)
    ours, theirs = {"bad", "fair", "good"}, {"x", "y", "z"}
    with Running(tmp_path, str(path), *QUIET) as server, Clients(server.ready(), 2) as clients:
        clients.wait_for(ours)
        graph = path / "variants" / "onnxruntime-fp32" / "model.onnx"
        damaged = bytearray(graph.read_bytes())
        damaged[len(damaged) // 2] ^= 0xFF
        graph.unlink()
        graph.write_bytes(damaged)
        server.signal(signal.SIGHUP)
        line = server.said("model has changed and cannot be served, the previous version stays")
        assert line["level"] == "error"
        assert "does not match its hash" in line["message"]
        clients.wait_for(ours)
        # As a build replaces a bundle: two renames, with no bundle in between.
        shutil.copytree(other_bundle.path, tmp_path / "next")
        path.rename(tmp_path / "before")
        server.signal(signal.SIGHUP)
        clients.wait_for(ours)
        (tmp_path / "next").rename(path)
        server.signal(signal.SIGHUP)
        clients.wait_for(theirs)
    assert clients.failures == []
    assert set(clients.statuses) == {200}, clients.labels


def test_request_that_resolved_a_replaced_model_is_retried(classifier_bundle: Bundle) -> None:
    from hasten.server.app import retry_if_retired
    from hasten.server.settings import Settings
    from hasten.server.startup import load_models, make_app

    settings = Settings((str(classifier_bundle.path),), instances=1, threads=1)
    app = make_app(settings)
    load_models(app, settings)
    models: list[Any] = []
    answers: list[Any] = []

    def ask(name: str) -> None:
        models.append(app.models.named(name))
        if len(models) == 1:
            app.models.load(classifier_bundle.path, "classifier")
        models[-1].submit_payload(lambda: TEXT, lambda outputs, _: outputs, lambda answer, _: answers.append(answer))

    retry_if_retired(ask, "classifier")
    assert app.close(60)
    assert len(models) == 2
    assert [list(answer) for answer in answers] == [["logits"]]


def test_reload_keeps_the_number_of_sessions_and_runs_once(
    classifier_bundle: Bundle, other_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hasten.server.models import encoder_model
    from hasten.server.models.reload import ReloadWatcher
    from hasten.server.settings import Settings
    from hasten.server.startup import bundle_paths, load_models, make_app

    measured: list[str] = []
    monkeypatch.setattr(encoder_model, "choose_instances", lambda _, digest, *__: measured.append(digest) or 2)
    link = tmp_path / "current"
    swap(link, classifier_bundle.path)
    settings = Settings((str(link),))
    app = make_app(settings)
    load_models(app, settings)
    changes = ReloadWatcher(app.models, lambda: bundle_paths(settings))
    assert changes.reload() == 0
    swap(link, other_bundle.path)
    app.models.load_known("current")
    first = app.models.named("current")
    assert (first.instances, first.bundle.manifest.digest) == (2, other_bundle.manifest.digest)
    assert measured == [classifier_bundle.manifest.digest]
    assert changes.reload() == 0
    assert app.models.named("current") is first
    swap(link, classifier_bundle.path)
    assert (changes.reload(), changes.reload()) == (1, 0)
    app.models.unload("current")
    swap(link, other_bundle.path)
    assert changes.reload() == 0  # an unloaded model stays unloaded
    assert app.close(60)


def test_models_are_unloaded_and_loaded_by_request(
    classifier_bundle: Bundle, other_bundle: Bundle, tmp_path: Path
) -> None:
    words = (str(classifier_bundle.path), str(other_bundle.path), *QUIET, "--model-control")
    with Running(tmp_path, *words) as server:
        port = server.ready().port
        assert server.ask("/models/other", BODY, port=port)[0] == 200
        assert server.ask("/v2/repository/models/other/unload", b"", port=port)[0] == 200
        assert server.ask("/models/other", BODY, port=port)[0] == 404
        assert predict(server, port=port) == 200  # only one model is left
        states = {
            entry["name"]: entry["state"] for entry in json.loads(server.ask("/v2/repository/index", b"", port=port)[1])
        }
        assert states == {"classifier": "READY", "other": "UNAVAILABLE"}
        series = metrics(server, port)
        assert ("hasten_queue_size", ("classifier",)) in series
        assert ("hasten_queue_size", ("other",)) not in series
        before = series["hasten_requests_total", ("other", "200")]
        assert server.ask("/v2/repository/models/other/load", b"", port=port)[0] == 200
        assert server.ask("/models/other", BODY, port=port)[0] == 200
        assert metrics(server, port)["hasten_requests_total", ("other", "200")] == before + 1
        assert server.ask("/v2/repository/models/missing/load", b"", port=port)[0] == 404


def test_damaged_bundle_is_not_loaded_and_old_model_stays(classifier_bundle: Bundle, tmp_path: Path) -> None:
    shutil.copytree(classifier_bundle.path, tmp_path / "model")
    with Running(tmp_path, str(tmp_path / "model"), *QUIET, "--model-control") as server:
        port = server.ready().port
        (tmp_path / "model" / "tokenizer" / "tokenizer.json").write_text("{}")
        status, content = server.ask("/v2/repository/models/model/load", b"", port=port)
        assert (status, "does not match its hash" in content) == (400, True)
        assert predict(server, port=port) == 200
