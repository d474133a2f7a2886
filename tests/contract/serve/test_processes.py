"""`hasten serve --workers`: API workers and engine processes that end, start again, reload and drain."""

from __future__ import annotations

import http.client
import json
import os
import select
import shutil
import signal
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hasten.bundle import Bundle
from hasten.core.errors import UnavailableError
from hasten.server.processes import worker_count
from hasten.server.processes.children import socket_directory
from hasten.server.settings import Settings
from support.faulty_backend import faulty_environment
from support.process_tree import ServerProcesses, is_alive
from support.server_operations import BODY, QUIET, TEXT, Running, asked, metrics, parsed_metrics, predict, request, swap
from support.wait import wait_until

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")
pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="finds child processes in /proc")

WORKERS = ("--workers", "2")
CLIENTS = 128


@pytest.fixture(scope="module")
def running(classifier: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of two API workers, which tests must leave as they found it."""
    with Running(tmp_path_factory.mktemp("processes"), str(classifier.path), *QUIET, *WORKERS) as server:
        yield server.ready()
        assert server.stop() == 0


def ask_on_new_connections(server: Running, port: int, count: int) -> list[tuple[int, str]]:
    return [server.ask("/predict", BODY, port=port) for _ in range(count)]


# --- answers


def test_answers_are_those_of_one_process(running: Running, classifier: Bundle, tmp_path: Path) -> None:
    bodies = [{"inputs": [TEXT] * rows, "parameters": {"top_k": 3}} for rows in (1, 2, 50)]
    with Running(tmp_path, str(classifier.path), *QUIET, "--workers", "1") as alone:
        port = alone.ready().port
        expected = [json.loads(alone.ask("/predict", body, port=port)[1]) for body in bodies]
        assert alone.stop() == 0
    for body, answers in zip(bodies, expected, strict=True):
        status, text = running.ask("/predict", body)
        assert status == 200
        for row, expected_row in zip(json.loads(text), answers, strict=True):
            assert [entry["label"] for entry in row] == [entry["label"] for entry in expected_row]
            scores = [entry["score"] for entry in row]
            assert scores == pytest.approx([entry["score"] for entry in expected_row], abs=1e-5)


def test_errors_of_a_request_are_those_of_one_process(running: Running) -> None:
    port = running.port
    assert running.ask("/models/missing", BODY, port=port)[0] == 404
    assert running.ask("/predict", {"inputs": [TEXT] * 1025}, port=port)[0] == 413
    assert running.ask("/v2/repository/models/classifier/load", b"", port=port)[0] == 403


def test_clients_that_connect_at_once_are_divided_among_workers(running: Running) -> None:
    port, processes = running.port, ServerProcesses(running)
    with ExitStack() as opened:
        clients = [
            opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in range(CLIENTS)
        ]
        for client in clients:
            client.sendall(request(BODY))
        for client in clients:
            assert client.recv(2**16).startswith(b"HTTP/1.1 200")
        counts = [processes.connections(worker, port) for worker in processes.workers]
    assert sum(counts) == CLIENTS
    # On a busy machine a worker may not run for a while.
    assert min(counts) >= CLIENTS // 8, counts


def test_metrics_of_any_worker_are_those_of_all(running: Running) -> None:
    port = running.port
    key = ("hasten_requests_total", ("classifier", "200"))
    before = metrics(running, port)
    with ExitStack() as opened:
        connections = [opened.enter_context(closing(running.connect(port=port))) for _ in range(8)]
        for connection in connections:
            assert asked(connection, "/predict", BODY)[0] == 200
        # Each on the worker that its client is connected to.
        scraped = [parsed_metrics(asked(connection, "/metrics")[1]) for connection in connections]
    for after in scraped:
        assert after[key] - before.get(key, 0) == 8
        ran = after["hasten_batch_rows_sum", ("classifier",)] - before["hasten_batch_rows_sum", ("classifier",)]
        assert ran == 8
    assert after["hasten_peak_memory_bytes", ()] < after["process_resident_memory_bytes", ()]


def test_workers_load_no_runtime(running: Running) -> None:
    processes = ServerProcesses(running)
    for library in ("onnxruntime", "openvino", "libtorch"):
        for worker in processes.workers:
            assert library not in Path(f"/proc/{worker}/maps").read_text()
    assert "onnxruntime" in Path(f"/proc/{processes.engines[0]}/maps").read_text()
    for process in (running.process.pid, *processes.workers, *processes.engines):
        assert "libtorch" not in Path(f"/proc/{process}/maps").read_text()


# --- processes that end


def test_ended_worker_costs_its_own_connections_and_is_started_again(running: Running) -> None:
    port, processes = running.port, ServerProcesses(running)
    first, second = processes.workers
    with ExitStack() as opened:
        connections = [opened.enter_context(closing(running.connect(port=port))) for _ in range(8)]
        for connection in connections:
            assert asked(connection, "/predict", BODY)[0] == 200
        lost = processes.connections(first, port)
        before = metrics(running, port)["hasten_requests_total", ("classifier", "200")]
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: not is_alive(first), "the worker to end")
        outcomes = Counter(outcome(connection) for connection in connections)
        assert outcomes == {"200": 8 - lost, "closed": lost}
        assert 0 < lost < 8
        # New clients do not notice.
        assert {status for status, _ in ask_on_new_connections(running, port, 8)} == {200}
    wait_until(lambda: len(processes.workers) == 2 and running.ask("/health", port=port)[0] == 200, "another worker")
    assert second in processes.workers
    assert running.said("API worker")["message"].endswith("has ended with signal SIGKILL: starting it again")
    # What it had counted stays counted.
    assert metrics(running, port)["hasten_requests_total", ("classifier", "200")] >= before + 16 - lost


def test_ended_engine_loses_no_request(running: Running) -> None:
    port, processes = running.port, ServerProcesses(running)
    with Clients(running, 8) as clients:
        for _ in range(2):
            clients.wait_for(20)
            (engine,) = processes.engines
            os.kill(engine, signal.SIGKILL)
            wait_until(lambda old=engine: processes.engines not in ([old], []), "another engine process")
            clients.wait_for(20)
    assert clients.failures == []
    assert set(clients.statuses) == {200}
    wait_until(lambda: running.ask("/health", port=port)[0] == 200, "readiness")


def test_readiness_fails_while_an_engine_starts_and_liveness_does_not(faulty_bundle: Bundle, tmp_path: Path) -> None:
    environment = faulty_environment(faulty_bundle, tmp_path)
    with Running(tmp_path, str(faulty_bundle.path), *QUIET, *WORKERS, **environment) as server:
        port = server.ready().port
        (tmp_path / "wait").touch()
        os.kill(ServerProcesses(server).engines[0], signal.SIGKILL)
        wait_until(lambda: server.ask("/v2/health/ready", port=port)[0] == 503, "the loss of readiness")
        assert server.ask("/v2/health/live", port=port)[0] == 200
        (tmp_path / "wait").unlink()
        wait_until(lambda: server.ask("/v2/health/ready", port=port)[0] == 200, "readiness")
        assert predict(server, port=port) == 200
        assert server.stop() == 0


def test_stalled_engine_is_replaced(faulty_bundle: Bundle, tmp_path: Path) -> None:
    words = (str(faulty_bundle.path), *QUIET, *WORKERS, "--stall-timeout", "0.5s")
    with Running(tmp_path, *words, **faulty_environment(faulty_bundle, tmp_path)) as server:
        port, before = server.ready().port, ServerProcesses(server).engines
        (tmp_path / "hang").touch()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(request(BODY))
            wait_until(lambda: ServerProcesses(server).engines not in (before, []), "another engine process")
            (tmp_path / "hang").unlink()
            assert client.recv(2**16).startswith(b"HTTP/1.1 200")
        assert "has stalled" in server.said("has stalled")["message"]
        assert server.stop() == 0


def test_engine_whose_device_fails_is_replaced(faulty_bundle: Bundle, tmp_path: Path) -> None:
    environment = faulty_environment(faulty_bundle, tmp_path)
    with Running(tmp_path, str(faulty_bundle.path), *QUIET, *WORKERS, **environment) as server:
        port, before = server.ready().port, ServerProcesses(server).engines
        (tmp_path / "fail").touch()
        assert predict(server, port=port) == 500
        wait_until(lambda: server.ask("/v2/health/ready", port=port)[0] == 503, "the loss of readiness")
        wait_until(lambda: ServerProcesses(server).engines != before, "the end of the engine process")
        (tmp_path / "fail").unlink()
        wait_until(lambda: server.ask("/v2/health/ready", port=port)[0] == 200, "readiness")
        assert predict(server, port=port) == 200
        assert server.ask("/v2/health/live", port=port)[0] == 200
        assert "every batch fails: out of luck" in server.said("every batch fails")["message"]
        assert server.stop() == 0


def test_engine_whose_thread_has_ended_is_replaced(faulty_bundle: Bundle, tmp_path: Path) -> None:
    environment = faulty_environment(faulty_bundle, tmp_path)
    with Running(tmp_path, str(faulty_bundle.path), *QUIET, *WORKERS, **environment) as server:
        port, before = server.ready().port, ServerProcesses(server).engines
        (tmp_path / ".kill").write_text("(_work)")
        (tmp_path / ".kill").rename(tmp_path / "kill")
        wait_until(lambda: not (tmp_path / "kill").exists(), "the injected fault")
        # The thread ends when this request wakes it; the next engine process answers it.
        assert predict(server, port=port) == 200
        assert ServerProcesses(server).engines != before
        assert "a worker thread has ended" in server.said("worker thread")["message"]
        assert server.stop() == 0


def test_process_that_ends_too_often_ends_the_server(classifier: Bundle, tmp_path: Path) -> None:
    with Running(tmp_path, str(classifier.path), *QUIET, *WORKERS) as server:
        port, processes = server.ready().port, ServerProcesses(server)
        for _ in range(5):
            wait_until(lambda: len(processes.workers) == 2, "another worker")
            kept, killed = (processes.workers[0], processes.workers[1])
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda old=killed: old not in processes.workers, "the worker to end")
        wait_until(lambda: server.ask("/v2/health/live", port=port)[0] == 503, "the loss of liveness")
        assert server.end() == 70
        assert server.said("has ended 5 times within 60 s")["level"] == "critical"
    wait_until(lambda: not is_alive(kept), "the other worker to end")


def test_processes_end_with_their_killed_parent(classifier: Bundle, tmp_path: Path) -> None:
    # Paths of sockets are short.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        with Running(tmp_path, str(classifier.path), *QUIET, *WORKERS, TMPDIR=folder) as server:
            processes = ServerProcesses(server.ready())
            assert len(list(Path(folder).iterdir())) == 1
            pids = processes.workers + processes.engines
            server.signal(signal.SIGKILL)
            server.end()
        wait_until(lambda: not any(is_alive(pid) for pid in pids), "all processes to end")
        wait_until(lambda: not list(Path(folder).iterdir()), "the sockets to be removed")


# --- stopping


def test_interrupt_of_the_process_group_drains(classifier: Bundle, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    words = (str(classifier.path), *QUIET, *WORKERS)
    with Running(tmp_path, *words, TMPDIR=str(temporary)) as server:
        pids = ServerProcesses(server.ready()).all
        with Clients(server, 4) as clients:
            clients.wait_for(20)
            # Ctrl-C reaches the group, and service managers signal every process.
            os.killpg(server.process.pid, signal.SIGINT)
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
            assert server.end() == 0
    assert set(clients.statuses) == {200}
    assert clients.failures == []
    assert not any(is_alive(pid) for pid in pids)
    assert list(temporary.iterdir()) == []
    assert {line["level"] for line in server.lines} == {"info"}


# --- models


def test_model_is_unloaded_and_loaded_in_all_workers(classifier: Bundle, other_bundle: Bundle, tmp_path: Path) -> None:
    words = (str(classifier.path), str(other_bundle.path), *QUIET, *WORKERS, "--model-control")
    with Running(tmp_path, *words) as server, ExitStack() as opened:
        port, processes = server.ready().port, ServerProcesses(server)
        connections = [opened.enter_context(closing(server.connect(port=port))) for _ in range(8)]

        def statuses(path: str, body: Any) -> set[int]:
            return {asked(connection, path, body)[0] for connection in connections}

        assert statuses("/models/other", BODY) == {200}
        assert all(processes.connections(worker, port) for worker in processes.workers)
        assert server.ask("/v2/repository/models/other/unload", b"", port=port)[0] == 200
        assert statuses("/models/other", BODY) == {404}
        assert statuses("/predict", BODY) == {200}
        # A worker that is started again knows the same models.
        os.kill(processes.workers[0], signal.SIGKILL)
        wait_until(lambda: server.ask("/health", port=port)[0] == 503, "the loss of readiness")
        wait_until(lambda: server.ask("/health", port=port)[0] == 200, "another worker")
        connections[:] = [opened.enter_context(closing(server.connect(port=port))) for _ in range(8)]
        states = {asked(connection, "/v2/repository/index", b"")[1] for connection in connections}
        assert len(states) == 1, states
        assert server.ask("/v2/repository/models/other/load", b"", port=port)[0] == 200
        assert statuses("/models/other", BODY) == {200}
        assert server.stop() == 0


def test_limit_of_open_requests_holds_for_all_workers(faulty_bundle: Bundle, tmp_path: Path) -> None:
    limit = 8
    words = (str(faulty_bundle.path), *QUIET, *WORKERS, "--max-queue", str(limit))
    with Running(tmp_path, *words, **faulty_environment(faulty_bundle, tmp_path)) as server, ExitStack() as opened:
        port = server.ready().port
        (tmp_path / "hang").touch()
        clients = []
        for number in range(2 * limit):
            client = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            client.sendall(request(BODY))
            clients.append(client)
            # One after the other, so that each is counted before the next.
            wait_until(lambda number=number: len(answered(clients)) == max(0, number + 1 - limit), "the answer")
        assert all(client.recv(2**16).startswith(b"HTTP/1.1 429") for client in answered(clients))
        (tmp_path / "hang").unlink()


def test_bundle_that_changed_under_load_is_swapped_in_all_workers(
    classifier: Bundle, other_bundle: Bundle, tmp_path: Path
) -> None:
    link = tmp_path / "current"
    swap(link, classifier.path)
    with Running(tmp_path, str(link), *QUIET, *WORKERS) as server, Clients(server.ready(), 8) as clients:
        swaps = ((other_bundle, {"x", "y", "z"}), (classifier, {"bad", "fair", "good"}))
        for number, (bundle, labels) in enumerate(swaps, 1):
            swap(link, bundle.path)
            server.signal(signal.SIGHUP)
            wait_until(lambda count=number: server.log.count("now serving") == count, "the swap in all workers")
            clients.wait_for(8, labels)  # answers that were sent before
            before = Counter(clients.labels)
            clients.wait_for(40, labels)
            assert set(clients.labels - before) <= labels
        # An engine that is started again loads what is served now, not what it was started with.
        processes = ServerProcesses(server)
        os.kill(processes.engines[0], signal.SIGKILL)
        clients.wait_for(40, {"bad", "fair", "good"})
    assert clients.failures == []
    assert set(clients.statuses) == {200}


def test_generative_bundle_needs_one_process(generator_bundle: Bundle, tmp_path: Path) -> None:
    with Running(tmp_path, str(generator_bundle.path), *QUIET, *WORKERS, form="text") as server:
        assert server.end() == 2
        assert "serve only encoder models" in server.log
        assert "hint: use --workers 1" in server.log


def test_cpu_models_are_served_by_one_process_by_default(classifier: Bundle, tmp_path: Path) -> None:
    with Running(tmp_path, str(classifier.path), *QUIET) as server:
        assert ServerProcesses(server.ready()).all == []
        assert server.stop() == 0


def test_sockets_have_short_paths_in_a_private_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (tmp_path / "t", tmp_path / ("t" * 100)):
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        directory = socket_directory()
        assert directory.stat().st_mode & 0o777 == 0o700
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(directory / "engine-99.sock"))
        shutil.rmtree(directory)
        assert list(folder.iterdir()) == []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(UnavailableError, match="cannot create a directory for sockets"):
        socket_directory()


def test_several_engine_processes_need_several_workers(classifier: Bundle, tmp_path: Path) -> None:
    with Running(tmp_path, str(classifier.path), *QUIET, "--engines", "2") as server:
        assert server.end() == 2
        assert "--engines 2 needs several API workers" in server.lines[-1]["message"]


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (4, 2), (64, 8)])
def test_gpu_models_are_served_by_half_the_cores_by_default(
    gpu_bundle: Bundle, classifier: Bundle, cores: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hasten.core.system.hardware import Gpu, this_machine

    paths = (str(classifier.path), str(gpu_bundle.path))
    monkeypatch.setattr(worker_count, "usable_cores", lambda: cores)
    monkeypatch.setattr(worker_count, "this_machine", lambda: replace(this_machine(), gpus=()))
    assert worker_count.count_workers(Settings(paths)) == 1
    machine = replace(this_machine(), gpus=(Gpu("H200", 2**37, "9.0", "580.0"),))
    monkeypatch.setattr(worker_count, "this_machine", lambda: machine)
    assert worker_count.count_workers(Settings(paths)) == workers
    assert worker_count.count_workers(Settings(paths[:1])) == 1
    assert worker_count.count_workers(Settings(paths, workers=3)) == 3


class Clients:
    """Send requests from several threads without pause, each on its own connection, until the server closes it."""

    def __init__(self, server: Running, count: int) -> None:
        self.statuses: Counter[int] = Counter()
        self.labels: Counter[str] = Counter()
        self.failures: list[str] = []
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=[server.connect()]) for _ in range(count)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, more: int, labels: set[str] | None = None) -> None:
        """Wait for this many more answers, with one of the labels."""

        def count() -> int:
            return sum(self.labels[label] for label in labels) if labels else sum(self.statuses.values())

        before = count()
        wait_until(lambda: self.failures or count() >= before + more, "more answers")

    def _ask(self, connection: http.client.HTTPConnection) -> None:
        is_last = False
        while not is_last and not self._is_over.is_set():
            try:
                connection.request("POST", "/predict", json.dumps(BODY))
                response = connection.getresponse()
                answer = json.loads(response.read())
            except (OSError, http.client.HTTPException) as error:
                with self._lock:
                    self.failures.append(repr(error))
                return
            is_last = response.headers.get("connection") == "close"
            with self._lock:
                self.statuses[response.status] += 1
                self.labels[answer[0]["label"] if response.status == 200 else str(answer)] += 1
        connection.close()


def outcome(connection: http.client.HTTPConnection) -> str:
    try:
        return str(asked(connection, "/predict", BODY)[0])
    except (OSError, http.client.HTTPException):
        return "closed"


def answered(clients: Sequence[socket.socket]) -> list[socket.socket]:
    """Return the clients that have something to read."""
    return select.select(clients, [], [], 0)[0]
