"""Servers that answer the same question about the same model: how each is started, asked and stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environments import PEERS
from wire import Question, by_json, by_tensor

from hasten.bundle import Bundle, open_bundle

_START_S = 120.0


@dataclass(frozen=True, slots=True)
class Contender:
    """{port}, {grpc} and {folder} in its command are filled in when it is started."""

    name: str
    command: tuple[str, ...]
    question: Question
    # Where it says that it is ready.
    ready: str = "/health"
    # Whether it uses the processor also while nobody asks.
    is_restless: bool = False
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setting:
    """What all are about: a classifier as a directory of Hugging Face's, as a plain graph, and as a bundle."""

    model: Path
    graph: Path
    bundle: Path
    peers: str
    triton: str

    @property
    def labels(self) -> list[str]:
        names = json.loads((self.model / "config.json").read_text())["id2label"]
        return [names[str(place)] for place in range(len(names))]

    def best_graph(self) -> tuple[Path, str]:
        """The bundle's fastest graph that ONNX Runtime takes."""
        bundle = open_bundle(self.bundle)
        entry = next(entry for entry in bundle.manifest.variants if entry.backend == "onnxruntime")
        return bundle.artifact(entry).path(), entry.name


def plain_graph(python: str, model: Path, folder: Path) -> Path:
    target = folder / "plain.onnx"
    subprocess.run([python, str(PEERS / "export.py"), str(model), str(target)], check=True, capture_output=True)
    return target


def hasten(
    bundle: Path, labels: list[str], *options: str, name: str = "hasten", question: Question | None = None
) -> Contender:
    words = ("serve", str(bundle), "--port", "{port}", "--grpc-port", "{grpc}", *options)
    asked = question or by_tensor(bundle.resolve().name, "logits", [1], labels)
    return Contender(name, (sys.executable, "-m", "hasten", *words), asked, "/v2/health/ready")


def peer(setting: Setting, file: str, graph: Path, name: str, *, is_restless: bool = False) -> Contender:
    words = (setting.peers, str(PEERS / file), str(setting.model), str(graph), "{port}")
    return Contender(name, words, by_json(), is_restless=is_restless)


def on_ray(setting: Setting, python: str, replicas: int, *options: str) -> Contender:
    """Ours as replicas of Ray Serve."""
    words = ("serve", str(setting.bundle), "--on", "ray", "--replicas", str(replicas), "--port", "{port}", *options)
    question = by_tensor(setting.bundle.resolve().name, "logits", [1], setting.labels)
    name = f"Ray Serve, hasten, {replicas} replica{'s' if replicas > 1 else ''}"
    # In its own environment, and yet what is measured here.
    code = {"PYTHONPATH": str(PEERS.parents[2] / "src")}
    words = (python, "-m", "hasten", *words)
    return Contender(name, words, question, "/v2/health/ready", is_restless=True, environment=code)


def deployed_triton(setting: Setting, repository: Path, variant: str) -> Contender:
    """What `hasten deploy tritonserver` writes, as it is."""
    given = [str(setting.bundle), "--runtime", "python", "--variant", variant, "-o", str(repository)]
    words = [sys.executable, "-m", "hasten", "deploy", "tritonserver", *given]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    (ensemble,) = (folder for folder in repository.iterdir() if folder.name.endswith("_inference"))
    outputs = (ensemble / "config.pbtxt").read_text().partition("output")[2]
    output = outputs.partition('name: "')[2].partition('"')[0]
    question = by_tensor(ensemble.name, output, [1, 1], setting.labels, "TEXT")
    words = (setting.triton, str(PEERS / "triton_repository.py"), str(repository), "{port}", "{grpc}", "{folder}")
    return Contender("tritonserver, hasten deploy", words, question, "/v2/health/ready")


def triton(setting: Setting, graph: Path, name: str) -> Contender:
    words = (str(PEERS / "triton_onnxruntime.py"), str(setting.model), str(graph), "{port}", "{grpc}", "{folder}")
    question = by_tensor("classifier", "scores", [1, 1], setting.labels)
    return Contender(name, (setting.triton, *words), question, "/v2/health/ready")


def all_peers(setting: Setting, graph: Path, what: str) -> list[Contender]:
    """Each over ONNX Runtime with this graph, and FastAPI over transformers."""
    return [
        peer(setting, "fastapi_transformers.py", graph, "FastAPI, transformers"),
        peer(setting, "fastapi_onnxruntime.py", graph, f"FastAPI, {what}"),
        peer(setting, "litserve_onnxruntime.py", graph, f"LitServe, {what}", is_restless=True),
        peer(setting, "ray_onnxruntime.py", graph, f"Ray Serve, {what}", is_restless=True),
        triton(setting, graph, f"tritonserver, {what}"),
    ]


class Running:
    """A contender's process, from when it is ready until the end of the block."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self._folder = tempfile.TemporaryDirectory(prefix="hasten-serving-", ignore_cleanup_errors=True)
        self._log = Path(self._folder.name, "log")
        self.port, self.grpc_port = _free_ports(2)
        work = Path(self._folder.name, "work")
        work.mkdir()
        filled = {"port": self.port, "grpc": self.grpc_port, "folder": work}
        # Peers have packages of their own.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" or _is_ours(contender)}
        begin = time.perf_counter()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [word.format_map(filled) if "{" in word else word for word in contender.command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=inherited | contender.environment,
                start_new_session=True,
            )
        try:
            self._wait(begin + _START_S)
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.perf_counter() - begin

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def counters(self) -> dict[str, float]:
        """What hasten counts, without what it sorts into buckets; nothing of others."""
        if not self.contender.name.startswith("hasten"):
            return {}
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith("hasten_")]
        counted = (line for line in lines if "_bucket" not in line)
        return {line.partition("{")[0].split()[0]: float(line.rsplit(" ", 1)[1]) for line in counted}

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def memory_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024

    def tree_bytes(self) -> int:
        """Of the process and all that it started, what they share counted once."""
        total = 0
        for one in self._tree():
            with suppress(OSError):
                lines = Path(f"/proc/{one}/smaps_rollup").read_text()
                total += int(lines.partition("\nPss:")[2].split()[0]) * 1024
        return total

    def pause(self) -> None:
        """Nothing of it runs until `resume`: some use the processor also while nobody asks them."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        self.resume()  # the end, too, is something it does
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        # Whatever it left behind; it had a session of its own.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        # tritonserver's, where it had to be killed.
        for file in Path("/dev/shm").glob(f"hasten{self.process.pid}*"):
            file.unlink()
        self._folder.cleanup()

    def _signal(self, number: signal.Signals) -> None:
        for one in self._tree():
            with suppress(ProcessLookupError):
                os.kill(one, number)

    def _tree(self) -> list[int]:
        """It, and all that it started: not all stay in its group or session."""
        children: dict[int, list[int]] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, IndexError):  # it has ended meanwhile
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
        found = [self.process.pid]
        for one in found:
            found += children.get(one, [])
        return found

    def _wait(self, until: float) -> None:
        while True:
            if self.process.poll() is not None or time.perf_counter() > until:
                log = self._log.read_text(errors="replace")[-2000:]
                raise SystemExit(f"{self.contender.name} did not become ready:\n{log}")
            try:
                self.get(self.contender.ready)
            except (OSError, urllib.error.URLError):
                time.sleep(0.02)
            else:
                return


def _is_ours(contender: Contender) -> bool:
    return contender.command[0] == sys.executable


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def built(model: Path, bundle: Path | None, folder: Path) -> Path:
    """The bundle that was given, or one made here."""
    if bundle is None:
        bundle = folder / "bundle"
        words = ["build", str(model), "-o", str(bundle), "--quiet", "--json"]
        subprocess.run([sys.executable, "-m", "hasten", *words], check=True, stdout=subprocess.DEVNULL)
    return bundle


def variants(bundle: Path) -> dict[str, Any]:
    opened: Bundle = open_bundle(bundle)
    return {"chosen": opened.chosen.name, "all": [entry.name for entry in opened.manifest.variants]}
