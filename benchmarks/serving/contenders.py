"""Servers of the same model: how hasten is started, and how any is called and stopped."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments import PEERS
from http_requests import RequestFormat, binary_format
from peers.options import Options

from hasten.bundle import Bundle, open_bundle

_START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Contender:
    """A server; {port}, {grpc} and {folder} in its command are filled in when it is started."""

    name: str
    command: tuple[str, ...]
    format: RequestFormat
    # The path of its readiness check.
    ready_path: str = "/health"
    # Whether it uses the CPU while it has no requests.
    is_busy_when_idle: bool = False
    # The configuration of a peer.
    options: Options | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The classifier that all servers run: as a Hugging Face directory, as a stock ONNX graph and as a bundle.

    `peers` and `triton` are the interpreters of the peers' environments.
    """

    model: Path
    graph: Path
    bundle: Path
    peers: str
    triton: str

    @property
    def labels(self) -> list[str]:
        """Return the labels by class index."""
        names = json.loads((self.model / "config.json").read_text())["id2label"]
        return [names[str(index)] for index in range(len(names))]

    def best_graph(self) -> tuple[Path, str]:
        """Return the path and name of the bundle's fastest ONNX Runtime variant."""
        bundle = open_bundle(self.bundle)
        entry = next(entry for entry in bundle.manifest.variants if entry.backend == "onnxruntime")
        return bundle.artifact(entry).path(), entry.name


def export_stock_graph(python: str, model: Path, folder: Path) -> Path:
    """Export the model as tutorials do."""
    target = folder / "plain.onnx"
    subprocess.run([python, str(PEERS / "export.py"), str(model), str(target)], check=True, capture_output=True)
    return target


def hasten_server(bundle: Path, labels: list[str], *options: str, name: str = "hasten") -> Contender:
    """Return `hasten serve`, called with binary tensors."""
    arguments = ("serve", str(bundle), "--port", "{port}", "--grpc-port", "{grpc}", *options)
    request_format = binary_format(bundle.resolve().name, "logits", [1], labels)
    return Contender(name, (sys.executable, "-m", "hasten", *arguments), request_format, "/v2/health/ready")


class RunningServer:
    """The process of a contender, from its readiness to the end of the `with` block."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self._folder = tempfile.TemporaryDirectory(prefix="hasten-serving-", ignore_cleanup_errors=True)
        self._log = Path(self._folder.name, "log")
        self.port, self.grpc_port = _free_ports(2)
        work = Path(self._folder.name, "work")
        work.mkdir()
        values = {"port": self.port, "grpc": self.grpc_port, "folder": work}
        # Peers have their own packages.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" or _is_ours(contender)}
        begin = time.perf_counter()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [word.format_map(values) if "{" in word else word for word in contender.command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        try:
            self._wait_until_ready(begin + _START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.perf_counter() - begin

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def get(self, path: str) -> str:
        """Return the body of a GET request."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as response:
            return str(response.read().decode())

    def counters(self) -> dict[str, float]:
        """Return hasten's metrics without histogram buckets; an empty dictionary for peers."""
        if not self.contender.name.startswith("hasten"):
            return {}
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith("hasten_")]
        samples = (line for line in lines if "_bucket" not in line)
        return {line.partition("{")[0].split()[0]: float(line.rsplit(" ", 1)[1]) for line in samples}

    def log(self) -> str:
        """Return the output of the process so far."""
        return self._log.read_text(errors="replace")

    def memory_bytes(self) -> int:
        """Return the resident memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024

    def pause(self) -> None:
        """Stop all its processes until `resume`: some use the CPU while they have no requests."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue all its processes."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """Shut it down, and kill it if that takes too long."""
        self.resume()  # a stopped process cannot shut down
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        # Child processes that are left; it was started in its own session.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        # Shared memory that tritonserver leaves when it is killed.
        for file in Path("/dev/shm").glob(f"hasten{self.process.pid}*"):
            file.unlink()
        self._folder.cleanup()

    def _signal(self, number: signal.Signals) -> None:
        for process_id in self._process_ids():
            with suppress(ProcessLookupError):
                os.kill(process_id, number)

    def _process_ids(self) -> list[int]:
        """Return the process and its descendants, some of which leave its group and session."""
        children: dict[int, list[int]] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, IndexError):  # the process has ended meanwhile
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
        process_ids = [self.process.pid]
        for process_id in process_ids:
            process_ids += children.get(process_id, [])
        return process_ids

    def _wait_until_ready(self, deadline: float) -> None:
        while True:
            if self.process.poll() is not None or time.perf_counter() > deadline:
                log = self._log.read_text(errors="replace")[-2000:]
                raise SystemExit(f"{self.contender.name} did not become ready:\n{log}")
            try:
                self.get(self.contender.ready_path)
            except (OSError, urllib.error.URLError):
                time.sleep(0.02)
            else:
                return


def _is_ours(contender: Contender) -> bool:
    return contender.command[0] == sys.executable


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def build_unless_given(model: Path, bundle: Path | None, folder: Path) -> Path:
    """Return the bundle, or build one from the model if there is none."""
    if bundle is None:
        bundle = folder / "bundle"
        command = [sys.executable, "-m", "hasten", "build", str(model), "-o", str(bundle), "--quiet", "--json"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return bundle


def variant_names(bundle: Path) -> dict[str, Any]:
    """Return the names of the chosen variant and of all variants."""
    opened: Bundle = open_bundle(bundle)
    return {"chosen": opened.chosen.name, "all": [entry.name for entry in opened.manifest.variants]}
