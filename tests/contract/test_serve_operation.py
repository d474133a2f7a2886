"""Running `hasten serve`: how it starts, how it stops, and how what it serves is replaced."""

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
from operating import (
    BODY,
    LEAN,
    QUIET,
    TEXT,
    Running,
    asked,
    is_refused,
    is_waited_for,
    metrics,
    obstinacy,
    predict,
    request,
    sealed,
    swap,
    until,
)

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")


# --- starting


def test_it_listens_first_and_is_ready_last(
    classifier_bundle: Bundle, obstinate_bundle: Bundle, tmp_path: Path, free_port: int
) -> None:
    grpc = pytest.importorskip("grpc")
    health = importlib.import_module("grpc_health.v1.health_pb2")
    stubs = importlib.import_module("grpc_health.v1.health_pb2_grpc")
    (tmp_path / "wait").touch()
    words = (str(classifier_bundle.path), str(obstinate_bundle.path), *LEAN, "--grpc-port", str(free_port))
    with (
        Running(tmp_path, *words, **obstinacy(obstinate_bundle, tmp_path)) as server,
        grpc.insecure_channel(f"127.0.0.1:{free_port}") as channel,
    ):
        assert server.ask("/v2/health/live")[0] == 200
        assert server.ask("/v2/health/ready")[0] == 503
        asking = stubs.HealthStub(channel).Check
        assert asking(health.HealthCheckRequest(), timeout=60).status == health.HealthCheckResponse.NOT_SERVING
        status, answer = server.ask("/predict", BODY)
        assert (status, json.loads(answer)) == (503, {"error": "the models are not loaded yet"})
        # Each model is ready by itself, and is then answered for.
        until(lambda: server.ask("/v2/models/classifier/ready")[0] == 200, "the first model")
        assert server.ask("/models/classifier", BODY)[0] == 200
        status, answer = server.ask("/models/obstinate", BODY)
        assert (status, json.loads(answer)) == (503, {"error": "'obstinate' is not loaded yet"})
        assert server.ask("/v2/models/obstinate/ready")[0] == server.ask("/v2/health/ready")[0] == 503
        assert server.ask("/v2/models/nobody/ready")[0] == 404
        (tmp_path / "wait").unlink()
        server.ready()
        assert server.ask("/v2/health/ready")[0] == server.ask("/models/obstinate", BODY)[0] == 200
        assert asking(health.HealthCheckRequest(), timeout=60).status == health.HealthCheckResponse.SERVING
        assert server.stop() == 0


def test_stopped_while_it_loads(obstinate_bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    with Running(tmp_path, str(obstinate_bundle.path), *QUIET, **obstinacy(obstinate_bundle, tmp_path)) as server:
        assert server.port
        assert server.stop() == 0


def test_a_bundle_that_answers_otherwise_is_not_served(classifier_bundle: Bundle, tmp_path: Path) -> None:
    wrong = open_bundle(shutil.copytree(classifier_bundle.path, tmp_path / "wrong"))
    stored = {name: -value for name, value in wrong.reference().outputs.items()}
    np.savez_compressed(wrong.path / REFERENCE_OUTPUTS, **stored)
    sealed(wrong)
    with Running(tmp_path, str(wrong.path), *QUIET) as server:
        assert server.end() == 5
        assert "of its own rows like the original: largest error" in server.lines[-1]["message"]


def test_a_bundle_that_is_damaged_is_called_that(classifier_bundle: Bundle, tmp_path: Path) -> None:
    path = shutil.copytree(classifier_bundle.path, tmp_path / "damaged")
    (path / "manifest.json").write_text('{"schema": 1')
    with Running(tmp_path, str(path), *QUIET) as server:
        assert server.end() == 6
        assert "manifest.json is damaged" in server.lines[-1]["message"]


def test_a_port_that_is_taken(classifier_bundle: Bundle, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Running(tmp_path, str(classifier_bundle.path), *QUIET, "--port", str(port), form="text") as server:
            assert server.end() == 7
            assert f"cannot listen on 127.0.0.1:{port}" in server.log
            assert "hint: --port takes another" in server.log
            assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("host", "key", "warns"), [("0.0.0.0", "", True), ("0.0.0.0", "k", False), ("127.0.0.1", "", False)]
)
def test_beyond_loopback_without_a_key_is_warned_of(
    obstinate_bundle: Bundle, tmp_path: Path, host: str, key: str, warns: bool
) -> None:
    (tmp_path / "wait").touch()
    words = (str(obstinate_bundle.path), *QUIET, "--host", host)
    with Running(tmp_path, *words, **obstinacy(obstinate_bundle, tmp_path), HASTEN_API_KEYS=key) as server:
        server.said("listening on")
        warnings = [line["message"] for line in server.lines if line["level"] == "warning"]
        assert any("anyone who reaches 0.0.0.0 may ask" in line for line in warnings) == warns


def test_a_directory_of_bundles(classifier_bundle: Bundle, other_bundle: Bundle, tmp_path: Path) -> None:
    models = tmp_path / "models"
    for bundle in (classifier_bundle, other_bundle):
        shutil.copytree(bundle.path, models / bundle.path.name)
    (models / ".hidden").symlink_to(classifier_bundle.path)
    (models / "notes").mkdir()
    keys = tmp_path / "keys"
    keys.write_text("first\n")
    with Running(tmp_path, str(models), *QUIET, "--key-file", str(keys)) as server:

        def listed(key: str) -> list[str]:
            entries = json.loads(server.ask("/v1/models", authorization=f"Bearer {key}")[1])["data"]
            return sorted(entry["id"] for entry in entries)

        server.ready()
        assert listed("first") == ["classifier", "other"]
        server.signal(signal.SIGHUP)
        server.said("asked to reload: no bundle has changed")
        # What has come since, and keys, are found when it is told so.
        shutil.copytree(other_bundle.path, tmp_path / "third")
        (tmp_path / "third").rename(models / "third")
        keys.write_text("second\nthird\n")
        server.signal(signal.SIGHUP)
        server.said("third is new: onnxruntime-fp32 is served now")
        server.said("asked to reload: 2 API keys are known")
        assert listed("second") == ["classifier", "other", "third"]
        assert server.ask("/v1/models", authorization="Bearer first")[0] == 401
        keys.write_text("# none\n")
        server.signal(signal.SIGHUP)
        assert server.said("the API keys stay as they were")["level"] == "error"
        assert len(listed("third")) == 3


@pytest.mark.slow
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


def test_a_request_that_is_being_sent_may_be_finished(classifier_bundle: Bundle, tmp_path: Path) -> None:
    with Running(tmp_path, str(classifier_bundle.path), *QUIET) as server:
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


def test_a_slow_client_holds_nobody_up_for_long(classifier_bundle: Bundle, tmp_path: Path) -> None:
    with Running(tmp_path, str(classifier_bundle.path), *QUIET, "--drain", "1s") as server:
        port = server.ready().port
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(b"POST /predict HTTP/1.1\r\ncontent-length: 10\r\n\r\n")
            assert server.ask("/v2/health/ready", port=port)[0] == 200
            assert server.stop() == 0
        assert "not all were answered" in server.lines[-1]["message"]


def test_asked_twice_it_leaves_at_once(obstinate_bundle: Bundle, tmp_path: Path) -> None:
    with Running(
        tmp_path, str(obstinate_bundle.path), *QUIET, "--drain", "1h", **obstinacy(obstinate_bundle, tmp_path)
    ) as server:
        port = server.ready().port
        (tmp_path / "hang").touch()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(request(BODY))
            until(lambda: is_waited_for(server, port), "the request")
            server.signal(signal.SIGTERM)
            until(lambda: is_refused(port), "the socket's end")
            assert server.process.poll() is None
            server.signal(signal.SIGTERM)
            assert server.end() == 128 + signal.SIGTERM


def test_what_hangs_does_not_outlive_the_drain(obstinate_bundle: Bundle, tmp_path: Path) -> None:
    with Running(
        tmp_path, str(obstinate_bundle.path), *QUIET, "--drain", "1s", **obstinacy(obstinate_bundle, tmp_path)
    ) as server:
        port = server.ready().port
        (tmp_path / "hang").touch()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(request(BODY))
            until(lambda: is_waited_for(server, port), "the request")
            assert server.stop() == 0


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


def test_a_changed_bundle_is_loaded_under_load(classifier_bundle: Bundle, other_bundle: Bundle, tmp_path: Path) -> None:
    link = tmp_path / "current"
    swap(link, classifier_bundle.path)
    ours, theirs = {"bad", "fair", "good"}, {"x", "y", "z"}
    with Running(tmp_path, str(link), *QUIET, "--watch", "0.1s") as server, Clients(server.ready()) as clients:
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


def test_sighup_reloads_and_what_is_corrupt_leaves_what_was(
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
        said = server.said("model has changed and cannot be served, the one before stays")
        assert said["level"] == "error"
        assert "does not match its hash" in said["message"]
        clients.wait_for(ours)
        # As a build replaces one: two renames, between which there is none.
        shutil.copytree(other_bundle.path, tmp_path / "next")
        path.rename(tmp_path / "before")
        server.signal(signal.SIGHUP)
        clients.wait_for(ours)
        (tmp_path / "next").rename(path)
        server.signal(signal.SIGHUP)
        clients.wait_for(theirs)
    assert clients.failures == []
    assert set(clients.statuses) == {200}, clients.labels


def test_whoever_found_a_model_just_before_it_was_replaced_asks_the_new_one(classifier_bundle: Bundle) -> None:
    from hasten.server.app import once_more
    from hasten.server.run import load_models, make_app
    from hasten.server.settings import Settings

    settings = Settings((str(classifier_bundle.path),), instances=1, threads=1)
    app = make_app(settings)
    load_models(app, settings)
    found: list[Any] = []
    answers: list[Any] = []

    def ask(name: str) -> None:
        found.append(app.models.named(name))
        if len(found) == 1:
            app.models.load(classifier_bundle.path, "classifier")
        found[-1].ask(lambda: TEXT, lambda outputs, _: outputs, lambda answer, _: answers.append(answer))

    once_more(ask, "classifier")
    assert app.close(60)
    assert len(found) == 2
    assert [list(answer) for answer in answers] == [["logits"]]


def test_a_reload_measures_nothing_and_is_not_done_twice(
    classifier_bundle: Bundle, other_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hasten.server import served
    from hasten.server.reload import Changes
    from hasten.server.run import bundle_paths, load_models, make_app
    from hasten.server.settings import Settings

    measured: list[str] = []
    monkeypatch.setattr(served, "choose_instances", lambda _, digest, __: measured.append(digest) or 2)
    link = tmp_path / "current"
    swap(link, classifier_bundle.path)
    settings = Settings((str(link),))
    app = make_app(settings)
    load_models(app, settings)
    changes = Changes(app.models, lambda: bundle_paths(settings))
    assert changes.reload() == 0
    swap(link, other_bundle.path)
    app.models.load_again("current")
    first = app.models.named("current")
    assert (first.instances, first.bundle.manifest.digest) == (2, other_bundle.manifest.digest)
    assert measured == [classifier_bundle.manifest.digest]
    assert changes.reload() == 0
    assert app.models.named("current") is first
    swap(link, classifier_bundle.path)
    assert (changes.reload(), changes.reload()) == (1, 0)
    app.models.unload("current")
    swap(link, other_bundle.path)
    assert changes.reload() == 0  # taken away, it stays so
    assert app.close(60)


def test_models_are_unloaded_and_loaded(classifier_bundle: Bundle, other_bundle: Bundle, tmp_path: Path) -> None:
    with Running(tmp_path, str(classifier_bundle.path), str(other_bundle.path), *QUIET) as server:
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


def test_a_damaged_bundle_is_not_loaded_and_what_is_served_stays(classifier_bundle: Bundle, tmp_path: Path) -> None:
    shutil.copytree(classifier_bundle.path, tmp_path / "model")
    with Running(tmp_path, str(tmp_path / "model"), *QUIET) as server:
        port = server.ready().port
        (tmp_path / "model" / "tokenizer" / "tokenizer.json").write_text("{}")
        status, content = server.ask("/v2/repository/models/model/load", b"", port=port)
        assert (status, "does not match its hash" in content) == (400, True)
        assert predict(server, port=port) == 200
