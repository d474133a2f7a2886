"""`hasten serve --runner ray` on a real Ray: one of its own for all of these, its replicas, deaths and updates."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import hasten
from hasten.bundle import Bundle
from hasten.core.system.hardware import this_machine
from hasten.core.variant import Variant
from support import virtualenvs
from support.fakes.engine_bundle import with_variant
from support.server_operations import sealed, swap
from support.wait import wait_until

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")
# Ray kills processes that have not started within a minute.
pytestmark = pytest.mark.alone
TEXTS = ("one answer", "another", "and a longer one than those before")
LABELS, OTHERS = ("bad", "fair", "good"), ("x", "y", "z")
# Ray starts slowly, especially on a busy machine.
TIMEOUT_S = 300.0
LEAN = ("--threads", "1", "--instances", "1")


@pytest.fixture(scope="module")
def python() -> str:
    """An interpreter with Ray and all packages of this one."""
    folder = virtualenvs.folder("ray")
    return str(virtualenvs.python(folder, "'ray[serve]>=2.52'", has_ours=True))


def variables() -> dict[str, str]:
    """Return the environment of that interpreter, with the tested sources on its path."""
    return {**os.environ, "PYTHONPATH": str(Path(hasten.__file__).parents[1])}


@dataclass(frozen=True)
class Bundles:
    """A bundle, the same bundle with other labels, and a link to one of them."""

    bundle: Bundle
    other: Bundle
    link: Path


@pytest.fixture(scope="module")
def bundles(tiny_classifier: Any, quick_build: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    folder = tmp_path_factory.mktemp("bundles")
    bundle = quick_build(tiny_classifier("bert"), folder / "classifier", variants=["onnxruntime-fp32"], batch_size=1)
    shutil.copytree(bundle.path, folder / "other")
    task = replace(bundle.manifest.task, labels=OTHERS)
    other = sealed(Bundle(folder / "other", replace(bundle.manifest, task=task)))
    (folder / "current").symlink_to(bundle.path)
    return Bundles(bundle, other, folder / "current")


class Fleet:
    """`hasten serve --runner ray` with two replicas, and its clients."""

    def __init__(self, python: str, folder: Path, *words: str) -> None:
        self.python, self._log = python, folder / "log"
        # Ray requires a token from clients, which it would otherwise store in the home directory.
        self.environment = {**variables(), "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        command = [python, "-m", "hasten", "serve", *words, "--runner", "ray", "--port", "0", *LEAN]
        out = folder / "out"
        with out.open("wb") as stdout, self._log.open("wb") as stderr:
            self.process = subprocess.Popen(
                command, stdout=stdout, stderr=stderr, process_group=0, env=self.environment
            )

        def is_ready() -> bool:
            assert self.process.poll() is None, self.log
            return "ready on " in out.read_text()

        try:
            wait_until(is_ready, "readiness", TIMEOUT_S)
        except BaseException:
            self.process.terminate()
            self.process.wait(TIMEOUT_S)
            raise
        self.port = int(out.read_text().rsplit(":", 1)[1])

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def address(self) -> str:
        return self.log.partition("its address is ")[2].split()[0]

    def ask(self, path: str, body: Any = None, **headers: str) -> Any:
        """Send a request without retries and return the answer."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", path, data, headers)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise OSError(f"{response.status}: {content[:300]!r}")
        return json.loads(content) if content else None

    def label(self, model: str = "current") -> str:
        return str(self.ask(f"/models/{model}", {"inputs": TEXTS[0]})[0]["label"])

    def replicas(self) -> set[int]:
        """Return the replica processes of this fleet."""
        parents, titles = {}, {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                titles[int(folder.name)] = (folder / "cmdline").read_bytes()
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue  # it has exited meanwhile

        def is_descendant(process: int) -> bool:
            while process > 1:
                if process == self.process.pid:
                    return True
                process = parents.get(process, 0)
            return False

        return {process for process, title in titles.items() if b"ServeReplica:" in title and is_descendant(process)}


@pytest.fixture(scope="module")
def fleet(python: str, bundles: Bundles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("ray")
    started = Fleet(python, folder, str(bundles.link), "--replicas", "2")
    yield started
    replicas = started.replicas()
    assert replicas
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(TIMEOUT_S) == 0, started.log
    assert "Traceback" not in started.log
    wait_until(lambda: not any(Path(f"/proc/{replica}").exists() for replica in replicas), "the end of its replicas")


@dataclass
class Clients:
    """The results of clients that send requests continuously and retry failed ones."""

    answers: list[Any] = field(default_factory=list)
    retries: int = 0
    failed: list[BaseException] = field(default_factory=list)


@contextmanager
def running_clients(send: Callable[[], Any], clients: int = 4, tries: int = 5) -> Iterator[Clients]:
    results, is_stopped = Clients(), threading.Event()

    def work() -> None:
        while not is_stopped.is_set():
            for last in range(tries):
                try:
                    results.answers.append(send())
                    break
                except (OSError, HTTPException) as error:
                    results.retries += 1
                    if last == tries - 1:
                        results.failed.append(error)
                    time.sleep(0.2 * 2**last)  # exponential backoff

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(results.answers) > 10 * clients or results.failed, "answers", TIMEOUT_S)
        yield results
    finally:
        is_stopped.set()
        for thread in threads:
            thread.join()


def wait_for_more_answers(clients: Clients, count: int = 50) -> None:
    """Wait for `count` more answers."""
    before = len(clients.answers)
    wait_until(lambda: len(clients.answers) >= before + count or clients.failed, "more answers", TIMEOUT_S)


def test_two_replicas_answer_like_the_predictor(fleet: Fleet, bundles: Bundles) -> None:
    assert len(fleet.replicas()) == 2
    with hasten.load(bundles.bundle.path, threads=1) as classify:
        expected = classify(list(TEXTS), top_k=None)
    body = {"inputs": list(TEXTS), "parameters": {"top_k": None}}
    for _ in range(20):  # so that each replica gets some
        for actual, correct in zip(fleet.ask("/predict", body), expected, strict=True):
            assert [entry["label"] for entry in actual] == [entry["label"] for entry in correct]
            assert [entry["score"] for entry in actual] == pytest.approx(
                [entry["score"] for entry in correct], abs=1e-6
            )
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [TEXTS[0]]}
    assert fleet.ask("/v2/models/current/infer", {"inputs": [tensor]})["outputs"][0]["shape"] == [1, 3]
    fleet.ask("/v2/health/ready")
    with pytest.raises(OSError, match="404"):
        fleet.ask("/models/unknown", {"inputs": TEXTS[0]})


def test_killed_replica_is_replaced_under_load(fleet: Fleet) -> None:
    before = fleet.replicas()
    victim = min(before)
    with running_clients(fleet.label) as clients:
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(fleet.replicas() - {victim}) == 2, "another replica in its place", TIMEOUT_S)
        wait_for_more_answers(clients)
    # Its process exists before it has loaded its bundle.
    run(fleet, "-c", RUNNING, fleet.address, "2")
    assert not clients.failed
    assert set(clients.answers) <= set(LABELS)
    assert (before - {victim}) < fleet.replicas()


def test_new_bundle_is_rolled_out_without_failed_requests(fleet: Fleet, bundles: Bundles) -> None:
    """The replicas keep their processes, and the clients do not retry."""
    before = fleet.replicas()
    with running_clients(fleet.label, tries=1) as clients:
        swap(bundles.link, bundles.other.path)
        fleet.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "the changed bundles are deployed" in fleet.log or clients.failed, "the update", TIMEOUT_S)
        changed = len(clients.answers)
        wait_for_more_answers(clients)
    assert not clients.failed, fleet.log
    assert clients.answers[0] in LABELS
    # Some requests were in flight when the message was logged.
    assert set(clients.answers[changed + 4 :]) <= set(OTHERS)
    assert fleet.replicas() == before


def test_invalid_bundle_does_not_replace_the_served_one(fleet: Fleet, bundles: Bundles, tmp_path: Path) -> None:
    before = fleet.replicas()
    damaged, other_answers = tmp_path / "damaged", tmp_path / "other-answers"
    shutil.copytree(bundles.bundle.path, damaged)
    (damaged / "tokenizer" / "tokenizer.json").write_text("{}")
    # Its hashes are valid.
    shutil.copytree(bundles.bundle.path, other_answers)
    with np.load(other_answers / "reference" / "outputs.npz") as arrays:
        outputs = {name: -arrays[name] for name in arrays.files}
    np.savez(other_answers / "reference" / "outputs.npz", **outputs)
    sealed(Bundle(other_answers, bundles.bundle.manifest))
    for bundle, reason in (
        (damaged, "does not match its hash"),
        (other_answers, "not deployed, since a bundle cannot be opened"),
    ):
        swap(bundles.link, bundle)
        fleet.process.send_signal(signal.SIGHUP)
        wait_until(lambda reason=reason: reason in fleet.log, reason, TIMEOUT_S)
        assert fleet.label() in OTHERS
    swap(bundles.link, bundles.other.path)
    assert fleet.replicas() == before


def test_unchanged_deployment_keeps_its_replicas(fleet: Fleet, bundles: Bundles) -> None:
    """A second process deploys to this Ray as a cluster, and exits."""
    before = fleet.replicas()
    words = [str(bundles.link), "--runner", "ray", "--replicas", "2", "--address", fleet.address]
    output = run(fleet, "-m", "hasten", "serve", *words, *LEAN, "--json")
    assert json.loads(output)["http"].endswith(f":{fleet.port}")
    assert fleet.label() in OTHERS
    assert fleet.replicas() == before


def test_written_yaml_is_deployed_by_ray(fleet: Fleet, bundles: Bundles, tmp_path: Path) -> None:
    """Ray's own command replaces the application; a replica loads one of two models at a time."""
    file = tmp_path / "fleet.yaml"
    words = [str(bundles.bundle.path), str(bundles.other.path), "--max-models", "1"]
    run(fleet, "-m", "hasten", "serve", *words, "--runner", "ray", "--write-config", str(file), *LEAN)
    deploy(fleet, file)
    for _ in range(2):
        assert fleet.label("other") in OTHERS
        assert fleet.label("classifier") in LABELS
    # Ray's proxy prefers a replica that has loaded the model.
    headers = {"serve_multiplexed_model_id": "classifier"}
    assert fleet.ask("/predict", {"inputs": TEXTS[0], "model": "classifier"}, **headers)[0]["label"] in LABELS
    index = {entry["name"]: entry["state"] for entry in fleet.ask("/v2/repository/index", {})}
    assert index == {"classifier": "READY", "other": "UNAVAILABLE"}
    with pytest.raises(OSError, match=r"400.*the request names no model"):
        fleet.ask("/predict", {"inputs": TEXTS[0]})


# Waits until Ray reports the given number of running replicas.
RUNNING = """
import sys, time
import ray
from ray import serve
ray.init(address=sys.argv[1], log_to_driver=False)
def running():
    # A new application has no deployments yet.
    applications = serve.status().applications.values()
    deployments = [deployment for application in applications for deployment in application.deployments.values()]
    return sum(deployment.replica_states.get("RUNNING", 0) for deployment in deployments)
while running() != int(sys.argv[2]):
    time.sleep(0.1)
"""


def test_replicas_are_added_while_requests_queue(fleet: Fleet, bundles: Bundles, tmp_path: Path) -> None:
    """Ray's autoscaler does this, with shorter delays than by default."""
    file = tmp_path / "fleet.yaml"
    words = [str(bundles.bundle.path), "--replicas", "1-2"]
    run(fleet, "-m", "hasten", "serve", *words, "--runner", "ray", "--write-config", str(file), *LEAN)
    document = yaml.safe_load(file.read_text())
    scaling = document["applications"][0]["deployments"][0]["autoscaling_config"]
    scaling.update(upscale_delay_s=1, downscale_delay_s=1, look_back_period_s=11)
    file.write_text(yaml.safe_dump(document))
    deploy(fleet, file)
    wait_until(lambda: len(fleet.replicas()) == 1, "a single replica", TIMEOUT_S)
    with running_clients(lambda: fleet.label("classifier"), clients=16) as clients:
        # A replica that starts without load would be stopped at once, so keep the load until it is running.
        run(fleet, "-c", RUNNING, fleet.address, "2")
        assert len(fleet.replicas()) == 2
    assert not clients.failed


# Starts a Ray with one pretended GPU, and prints how much of it is left.
SHARE_GPU = """
import json, sys, urllib.request
import ray
from hasten.deploy.ray.config import serve_config
from hasten.deploy.ray.run import deploy
from hasten.server.settings import Settings
ray.init(address="local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)
settings = Settings.read({"bundles": [sys.argv[1]], "runner": "ray", "address": "auto", "replicas": "2", "gpus": "0.5",
                          "port": sys.argv[2], "threads": "1", "instances": "1"}, environment={})
before = ray.available_resources()["GPU"]
url = deploy(serve_config(settings))
body = json.dumps({"inputs": "one answer"}).encode()
answer = json.load(urllib.request.urlopen(urllib.request.Request(url + "/predict", body), timeout=60))
print(json.dumps({"answer": answer, "gpus": [before, ray.available_resources().get("GPU", 0.0)]}))
ray.shutdown()
"""


@pytest.mark.skipif(bool(this_machine().gpus), reason="this machine has a GPU")
def test_two_replicas_share_a_gpu(python: str, bundles: Bundles, tmp_path: Path) -> None:
    """Ray only counts GPUs; the replicas run on the CPU here."""
    graph = bundles.bundle.graph().path()
    variant = Variant.parse("onnxruntime-fp32@cuda")
    bundle = with_variant(bundles.bundle, tmp_path, variant, {graph.name: graph.read_bytes()})
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environment = {**variables(), "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    words = [python, "-c", SHARE_GPU, str(bundle.path), port]
    process = subprocess.run(words, capture_output=True, text=True, check=False, env=environment, timeout=TIMEOUT_S)
    assert process.returncode == 0, process.stderr
    (line,) = (line for line in process.stdout.splitlines() if line.startswith("{"))  # Ray prints to stdout, too
    result = json.loads(line)
    assert result["answer"][0]["label"] in LABELS
    assert result["gpus"] == [1.0, 0.0]


@pytest.mark.skipif(bool(this_machine().gpus), reason="this machine has a GPU")
def test_share_of_a_missing_gpu_is_rejected(python: str, bundles: Bundles, tmp_path: Path) -> None:
    graph = bundles.bundle.graph().path()
    variant = Variant.parse("onnxruntime-fp32@cuda")
    bundle = with_variant(bundles.bundle, tmp_path, variant, {graph.name: graph.read_bytes()})
    words = ["serve", str(bundle.path), "--runner", "ray", "--port", "0", "--gpus", "0.5", "--replicas", "2", *LEAN]
    environment = {**variables(), "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    command = [python, "-m", "hasten", *words]
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=TIMEOUT_S)
    assert process.returncode == 3, process.stderr
    assert "error: 2 × 0.5 GPUs do not fit on this machine, which has 0\n  hint: leave --gpus out" in process.stderr


def test_missing_cluster_is_reported(python: str, bundles: Bundles) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        free_port = free.getsockname()[1]
    words = ["serve", str(bundles.bundle.path), "--runner", "ray", "--address", f"127.0.0.1:{free_port}", *LEAN]
    command = [python, "-m", "hasten", *words]
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=variables())
    assert process.returncode == 7
    assert f"error: no Ray cluster at 127.0.0.1:{free_port}" in process.stderr
    assert "Traceback" not in process.stderr


def deploy(fleet: Fleet, file: Path) -> None:
    """Deploy with Ray's own command and wait until the new application answers."""
    run(fleet, "-m", "ray.serve.scripts", "run", "--non-blocking", "--address", fleet.address, str(file))

    def is_deployed() -> bool:
        try:
            return fleet.label("classifier") in LABELS
        except OSError:
            return False

    wait_until(is_deployed, "the new application", TIMEOUT_S)


def run(fleet: Fleet, *words: str) -> str:
    command, environment = [fleet.python, *words], {**fleet.environment, "RAY_AUTH_MODE": "token"}
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, env=environment)
    assert process.returncode == 0, process.stderr
    return process.stdout
