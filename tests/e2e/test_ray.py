"""`hasten serve --on ray` on a real Ray: one of its own for all of these, its replicas, their deaths and updates."""

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
import installed
from engines import with_variant
from hasten.bundle import Bundle
from hasten.core.hardware import this_machine
from hasten.core.variant import Variant
from operating import sealed, swap, until

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")
# Ray ends what has not started within a minute.
pytestmark = pytest.mark.alone
TEXTS = ("one answer", "another", "and a longer one than those before")
LABELS, OTHERS = ("bad", "fair", "good"), ("x", "y", "z")
# Ray starts slowly, and more so while others use the machine.
PATIENCE_S = 300.0
LEAN = ("--threads", "1", "--instances", "1")


@pytest.fixture(scope="module")
def python(pytestconfig: pytest.Config) -> str:
    """One that has Ray, beside all that this one has."""
    place = installed.folder(pytestconfig, "ray")
    return str(installed.python(place, f"-c {installed.CONSTRAINTS} 'ray[serve]>=2.52'", has_ours=True))


def variables() -> dict[str, str]:
    """For that Python: the sources that are tested, wherever the environment is from."""
    return {**os.environ, "PYTHONPATH": str(Path(hasten.__file__).parents[1])}


@dataclass(frozen=True)
class Made:
    """A bundle, the same with other words for its labels, and a link that leads to one of them."""

    bundle: Bundle
    other: Bundle
    link: Path


@pytest.fixture(scope="module")
def made(tiny_classifier: Any, quick_build: Any, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("bundles")
    bundle = quick_build(tiny_classifier("bert"), folder / "classifier", variants=["onnxruntime-fp32"], batch_size=1)
    shutil.copytree(bundle.path, folder / "other")
    task = replace(bundle.manifest.task, labels=OTHERS)
    other = sealed(Bundle(folder / "other", replace(bundle.manifest, task=task)))
    (folder / "current").symlink_to(bundle.path)
    return Made(bundle, other, folder / "current")


class Fleet:
    """`hasten serve --on ray` with two replicas, and whoever asks it."""

    def __init__(self, python: str, folder: Path, *words: str) -> None:
        self.python, self._log = python, folder / "log"
        # Ray asks whoever connects for a token, which it would otherwise keep in the home directory.
        self.environment = {**variables(), "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        command = [python, "-m", "hasten", "serve", *words, "--on", "ray", "--port", "0", *LEAN]
        out = folder / "out"
        with out.open("wb") as stdout, self._log.open("wb") as stderr:
            self.process = subprocess.Popen(
                command, stdout=stdout, stderr=stderr, process_group=0, env=self.environment
            )

        def is_ready() -> bool:
            assert self.process.poll() is None, self.log
            return "ready on " in out.read_text()

        try:
            until(is_ready, "readiness", PATIENCE_S)
        except BaseException:
            self.process.terminate()
            self.process.wait(PATIENCE_S)
            raise
        self.port = int(out.read_text().rsplit(":", 1)[1])

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def address(self) -> str:
        return self.log.partition("its address is ")[2].split()[0]

    def ask(self, path: str, body: Any = None, **headers: str) -> Any:
        """What it answers at once, without another try."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
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
        """Processes of this fleet's, among all that run here."""
        parents, titles = {}, {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                titles[int(folder.name)] = (folder / "cmdline").read_bytes()
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue  # it has ended meanwhile

        def is_ours(process: int) -> bool:
            while process > 1:
                if process == self.process.pid:
                    return True
                process = parents.get(process, 0)
            return False

        return {one for one, title in titles.items() if b"ServeReplica:" in title and is_ours(one)}


@pytest.fixture(scope="module")
def fleet(python: str, made: Made, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("ray")
    started = Fleet(python, folder, str(made.link), "--replicas", "2")
    yield started
    replicas = started.replicas()
    assert replicas
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(PATIENCE_S) == 0, started.log
    assert "Traceback" not in started.log
    until(lambda: not any(Path(f"/proc/{one}").exists() for one in replicas), "the end of its replicas")


@dataclass
class Clients:
    """Who asks all the time, and again where it was not answered."""

    answers: list[Any] = field(default_factory=list)
    retries: int = 0
    failed: list[BaseException] = field(default_factory=list)


@contextmanager
def asking(ask: Callable[[], Any], clients: int = 4, tries: int = 5) -> Iterator[Clients]:
    found, is_over = Clients(), threading.Event()

    def work() -> None:
        while not is_over.is_set():
            for last in range(tries):
                try:
                    found.answers.append(ask())
                    break
                except (OSError, HTTPException) as error:
                    found.retries += 1
                    if last == tries - 1:
                        found.failed.append(error)
                    time.sleep(0.2 * 2**last)  # as clients do it

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(found.answers) > 10 * clients or found.failed, "answers", PATIENCE_S)
        yield found
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def more(clients: Clients, count: int = 50) -> None:
    """Wait until so many more are answered."""
    before = len(clients.answers)
    until(lambda: len(clients.answers) >= before + count or clients.failed, "more answers", PATIENCE_S)


def test_two_replicas_answer_as_in_process(fleet: Fleet, made: Made) -> None:
    assert len(fleet.replicas()) == 2
    with hasten.load(made.bundle.path, threads=1) as classify:
        expected = classify(list(TEXTS), top_k=None)
    body = {"inputs": list(TEXTS), "parameters": {"top_k": None}}
    for _ in range(20):  # of which each replica gets some
        for ours, theirs in zip(fleet.ask("/predict", body), expected, strict=True):
            assert [entry["label"] for entry in ours] == [entry["label"] for entry in theirs]
            assert [entry["score"] for entry in ours] == pytest.approx([entry["score"] for entry in theirs], abs=1e-6)
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [TEXTS[0]]}
    assert fleet.ask("/v2/models/current/infer", {"inputs": [tensor]})["outputs"][0]["shape"] == [1, 3]
    fleet.ask("/v2/health/ready")
    with pytest.raises(OSError, match="404"):
        fleet.ask("/models/nobody", {"inputs": TEXTS[0]})


def test_a_replica_dies_under_load(fleet: Fleet) -> None:
    before = fleet.replicas()
    victim = min(before)
    with asking(fleet.label) as clients:
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(fleet.replicas() - {victim}) == 2, "another replica in its place", PATIENCE_S)
        more(clients)
    assert not clients.failed
    assert set(clients.answers) <= set(LABELS)
    assert (before - {victim}) < fleet.replicas()


def test_another_build_is_rolled_out_while_clients_ask(fleet: Fleet, made: Made) -> None:
    """In the same processes, and without one request that fails: there are no retries here."""
    before = fleet.replicas()
    with asking(fleet.label, tries=1) as clients:
        swap(made.link, made.other.path)
        fleet.process.send_signal(signal.SIGHUP)
        until(lambda: "what has changed is served now" in fleet.log or clients.failed, "the update", PATIENCE_S)
        changed = len(clients.answers)
        more(clients)
    assert not clients.failed, fleet.log
    assert clients.answers[0] in LABELS
    # Those that were under way when it was told.
    assert set(clients.answers[changed + 4 :]) <= set(OTHERS)
    assert fleet.replicas() == before


def test_a_build_that_cannot_be_served_leaves_the_one_before(fleet: Fleet, made: Made, tmp_path: Path) -> None:
    before = fleet.replicas()
    damaged, other_answers = tmp_path / "damaged", tmp_path / "other-answers"
    shutil.copytree(made.bundle.path, damaged)
    (damaged / "tokenizer" / "tokenizer.json").write_text("{}")
    # Whole, as far as hashes tell.
    shutil.copytree(made.bundle.path, other_answers)
    with np.load(other_answers / "reference" / "outputs.npz") as arrays:
        outputs = {name: -arrays[name] for name in arrays.files}
    np.savez(other_answers / "reference" / "outputs.npz", **outputs)
    sealed(Bundle(other_answers, made.bundle.manifest))
    for bundle, why in ((damaged, "does not match its hash"), (other_answers, "what runs stays")):
        swap(made.link, bundle)
        fleet.process.send_signal(signal.SIGHUP)
        until(lambda why=why: why in fleet.log, why, PATIENCE_S)
        assert fleet.label() in OTHERS
    swap(made.link, made.other.path)
    assert fleet.replicas() == before


def test_nothing_changes_where_nothing_has_changed(fleet: Fleet, made: Made) -> None:
    """Deployed once more, by a process that takes that Ray for a cluster, and leaves what it has deployed."""
    before = fleet.replicas()
    words = [str(made.link), "--on", "ray", "--replicas", "2", "--address", fleet.address]
    told = run(fleet, "-m", "hasten", "serve", *words, *LEAN, "--json")
    assert json.loads(told)["http"].endswith(f":{fleet.port}")
    assert fleet.label() in OTHERS
    assert fleet.replicas() == before


def test_the_yaml_deploys(fleet: Fleet, made: Made, tmp_path: Path) -> None:
    """With Ray's own command, on the same Ray, in the place of what ran: two models of which a replica holds one."""
    file = tmp_path / "fleet.yaml"
    words = [str(made.bundle.path), str(made.other.path), "--max-models", "1"]
    run(fleet, "-m", "hasten", "serve", *words, "--on", "ray", "--write", str(file), *LEAN)
    deploy(fleet, file)
    for _ in range(2):
        assert fleet.label("other") in OTHERS
        assert fleet.label("classifier") in LABELS
    # Ray's proxy looks for a replica that holds it.
    named = {"serve_multiplexed_model_id": "classifier"}
    assert fleet.ask("/predict", {"inputs": TEXTS[0], "model": "classifier"}, **named)[0]["label"] in LABELS
    index = {entry["name"]: entry["state"] for entry in fleet.ask("/v2/repository/index", {})}
    assert index == {"classifier": "READY", "other": "UNAVAILABLE"}
    with pytest.raises(OSError, match=r"400.*name one with"):
        fleet.ask("/predict", {"inputs": TEXTS[0]})


# Until as many replicas answer as are asked for, by Ray's own account.
RUNNING = """
import sys, time
import ray
from ray import serve
ray.init(address=sys.argv[1], log_to_driver=False)
def running():
    # One that was just deployed has none yet.
    deployments = [each for one in serve.status().applications.values() for each in one.deployments.values()]
    return sum(each.replica_states.get("RUNNING", 0) for each in deployments)
while running() != int(sys.argv[2]):
    time.sleep(0.1)
"""


def test_replicas_are_added_where_requests_queue(fleet: Fleet, made: Made, tmp_path: Path) -> None:
    """By Ray's own autoscaler, which here looks sooner than it would."""
    file = tmp_path / "fleet.yaml"
    words = [str(made.bundle.path), "--replicas", "1-2"]
    run(fleet, "-m", "hasten", "serve", *words, "--on", "ray", "--write", str(file), *LEAN)
    document = yaml.safe_load(file.read_text())
    scaling = document["applications"][0]["deployments"][0]["autoscaling_config"]
    scaling.update(upscale_delay_s=1, downscale_delay_s=1, look_back_period_s=11)
    file.write_text(yaml.safe_dump(document))
    deploy(fleet, file)
    until(lambda: len(fleet.replicas()) == 1, "a single replica", PATIENCE_S)
    with asking(lambda: fleet.label("classifier"), clients=16) as clients:
        # Its process is there sooner, and one that starts while nobody asks any more would be stopped halfway.
        run(fleet, "-c", RUNNING, fleet.address, "2")
        assert len(fleet.replicas()) == 2
    assert not clients.failed


# A Ray that is told of one GPU, which nobody looks for, and what it has left of it.
SHARED = """
import json, sys, urllib.request
import ray
from hasten.deploy.ray.config import fleet
from hasten.deploy.ray.run import deploy
from hasten.server.settings import Settings
ray.init(address="local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)
settings = Settings.read({"bundles": [sys.argv[1]], "on": "ray", "address": "auto", "replicas": "2", "gpus": "0.5",
                          "port": sys.argv[2], "threads": "1", "instances": "1"}, environment={})
before = ray.available_resources()["GPU"]
url = deploy(fleet(settings))
body = json.dumps({"inputs": "one answer"}).encode()
answer = json.load(urllib.request.urlopen(urllib.request.Request(url + "/predict", body), timeout=60))
print(json.dumps({"answer": answer, "gpus": [before, ray.available_resources().get("GPU", 0.0)]}))
ray.shutdown()
"""


@pytest.mark.skipif(bool(this_machine().gpus), reason="there is a GPU here, which the bundle is not for")
def test_two_replicas_share_a_gpu(python: str, made: Made, tmp_path: Path) -> None:
    """As Ray counts them; what they hold of it runs on the CPU here."""
    graph = made.bundle.graph().path()
    variant = Variant.parse("onnxruntime-fp32@cuda")
    bundle = with_variant(made.bundle, tmp_path, variant, {graph.name: graph.read_bytes()})
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environment = {**variables(), "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    words = [python, "-c", SHARED, str(bundle.path), port]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))  # Ray prints there, too
    told = json.loads(line)
    assert told["answer"][0]["label"] in LABELS
    assert told["gpus"] == [1.0, 0.0]


@pytest.mark.skipif(bool(this_machine().gpus), reason="there is a GPU here")
def test_a_share_of_a_gpu_that_is_not_there(python: str, made: Made, tmp_path: Path) -> None:
    graph = made.bundle.graph().path()
    variant = Variant.parse("onnxruntime-fp32@cuda")
    bundle = with_variant(made.bundle, tmp_path, variant, {graph.name: graph.read_bytes()})
    words = ["serve", str(bundle.path), "--on", "ray", "--port", "0", "--gpus", "0.5", "--replicas", "2", *LEAN]
    environment = {**variables(), "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    command = [python, "-m", "hasten", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=PATIENCE_S)
    assert done.returncode == 3, done.stderr
    assert "error: 2 × 0.5 of a GPU do not fit on the 0 of this machine\n  hint: leave --gpus out" in done.stderr


def test_a_cluster_that_is_not_there(python: str, made: Made) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        free_port = free.getsockname()[1]
    words = ["serve", str(made.bundle.path), "--on", "ray", "--address", f"127.0.0.1:{free_port}", *LEAN]
    command = [python, "-m", "hasten", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables())
    assert done.returncode == 7
    assert f"error: no Ray cluster at 127.0.0.1:{free_port}" in done.stderr
    assert "Traceback" not in done.stderr


def deploy(fleet: Fleet, file: Path) -> None:
    """With Ray's own command, in the place of what ran; waits until that answers."""
    run(fleet, "-m", "ray.serve.scripts", "run", "--non-blocking", "--address", fleet.address, str(file))

    def is_there() -> bool:
        try:
            return fleet.label("classifier") in LABELS
        except OSError:
            return False

    until(is_there, "the new application", PATIENCE_S)


def run(fleet: Fleet, *words: str) -> str:
    command, environment = [fleet.python, *words], {**fleet.environment, "RAY_AUTH_MODE": "token"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
