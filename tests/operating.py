"""`hasten serve` as those who run it see it: a process, its log, its signals, and a backend that may fail."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from hasten.bundle import Bundle, open_bundle
from hasten.bundle.manifest import sha256

TEXT = "one answer"
BODY = {"inputs": TEXT}
# One session of one thread: nothing is measured to choose them.
LEAN = ("--port", "0", "--threads", "1", "--instances", "1")
QUIET = (*LEAN, "--no-grpc")

_numbers = count()
# The machine may be busy with other tests.
_PATIENCE_S = 60.0


def until(condition: Callable[[], Any], what: str = "it", seconds: float = _PATIENCE_S) -> Any:
    """What it gives as soon as that is something."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"{what} did not come to pass"
        time.sleep(0.02)
    return found


class Running:
    """Started, but not ready unless that is waited for. It logs JSON unless told otherwise."""

    def __init__(self, folder: Path, *words: str, form: str = "json", **environment: str) -> None:
        number = next(_numbers)
        self._log, self._out = folder / f"log-{number}", folder / f"out-{number}"
        command = [sys.executable, "-m", "hasten", "serve", *words, "--log", form]
        with self._log.open("wb") as log, self._out.open("wb") as out:
            # A group of its own, as a shell gives it: Ctrl-C goes to all of it.
            self.process = subprocess.Popen(
                command, stdout=out, stderr=log, env={**os.environ, **environment}, process_group=0
            )

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    @property
    def lines(self) -> list[dict[str, Any]]:
        """All that are complete."""
        return [json.loads(line) for line in self.log.split("\n")[:-1]]

    def said(self, words: str) -> dict[str, Any]:
        def find() -> dict[str, Any] | None:
            return next((line for line in self.lines if words in line["message"]), None)

        found: dict[str, Any] = until(lambda: find() or (self.process.poll() is not None and find()), f"'{words}'")
        return found

    @property
    def port(self) -> int:
        """As soon as it listens."""
        return int(self.said("listening on")["message"].split(";")[0].rsplit(":", 1)[1])

    def ready(self) -> Running:
        """A supervised server says so each time it was started; this waits for the first."""

        def is_ready() -> bool:
            assert self.process.poll() is None, self.log
            return "ready on " in self._out.read_text()

        until(is_ready, "readiness")
        return self

    @property
    def grpc_port(self) -> int:
        line = next(line for line in self._out.read_text().splitlines() if line.startswith("gRPC on "))
        return int(line.rsplit(":", 1)[1])

    def connect(self, context: ssl.SSLContext | None = None, port: int | None = None) -> http.client.HTTPConnection:
        chosen = port or self.port
        if context is not None:
            return http.client.HTTPSConnection("127.0.0.1", chosen, timeout=_PATIENCE_S, context=context)
        return http.client.HTTPConnection("127.0.0.1", chosen, timeout=_PATIENCE_S)

    def ask(self, path: str, body: Any = None, *, port: int | None = None, **headers: str) -> tuple[int, str]:
        """GET, or POST where there is a body."""
        connection = self.connect(port=port)
        try:
            return asked(connection, path, body, **headers)
        finally:
            connection.close()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        return self.process.wait(_PATIENCE_S)

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.end()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def asked(connection: http.client.HTTPConnection, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET" if body is None else "POST", path, data, given)
    response = connection.getresponse()
    return response.status, response.read().decode()


def predict(server: Running, **about: Any) -> int:
    """The status of a plain request."""
    return server.ask("/predict", BODY, **about)[0]


def is_refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
    except ConnectionError:
        return True
    return False


def request(body: Any) -> bytes:
    data = json.dumps(body).encode()
    return b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)


def is_waited_for(server: Running, port: int) -> bool:
    """Whether a second request, sent to find out, would have to wait for the first."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as second:
        second.sendall(request(BODY))
        scraped = metrics(server, port)
    return any(value > 0 for (name, _), value in scraped.items() if name == "hasten_waiting")


def metrics(server: Running, port: int) -> dict[tuple[str, tuple[str, ...]], float]:
    """All samples of one scrape, by name and labels."""
    from prometheus_client.parser import text_string_to_metric_families

    status, text = server.ask("/metrics", port=port)
    assert status == 200
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, tuple(sample.labels.values())): sample.value for sample in samples}


def swap(link: Path, target: Path) -> None:
    """In one step, as deployments do it."""
    fresh = link.with_name(f".{link.name}")
    fresh.symlink_to(target)
    fresh.replace(link)


def sealed(bundle: Bundle) -> Bundle:
    """As if it had been built this way: with the hashes of the files as they are now."""
    files = {name: sha256(bundle.path / name) for name in bundle.manifest.files}
    (bundle.path / "manifest.json").write_bytes(replace(bundle.manifest, files=files).sealed().to_json())
    return open_bundle(bundle.path)


# Installed as another package's backend would be. While a file of that name lies in OBSTINATE, it does not open, does
# not come back, which "hangs" tells then, or fails.
OBSTINATE = """
import os, time
from pathlib import Path
from hasten.backends import PaddedSession
from hasten.backends.graph import Graph

FOLDER = Path(os.environ["OBSTINATE"])

class Session(PaddedSession):
    def __init__(self, inner):
        self.spec, self._inner = inner.spec, inner

    def run(self, batch):
        while (FOLDER / "hang").exists():
            (FOLDER / "hangs").touch()
            time.sleep(0.01)
        if (FOLDER / "fail").exists():
            raise RuntimeError("out of luck")
        return self._inner.run(batch)

class Obstinate(Graph):
    name = "obstinate"

    def open(self, artifact, options):
        while (FOLDER / "wait").exists():
            time.sleep(0.01)
        return Session(super().open(artifact, options))

BACKEND = Obstinate()
"""


def install_obstinate(site: Path) -> None:
    """A real distribution with an entry point, as pip would leave it."""
    info = site / "obstinate-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: obstinate\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hasten.backends]\nobstinate = hasten_test_obstinate:BACKEND\n")
    (site / "hasten_test_obstinate.py").write_text(OBSTINATE)


def obstinacy(bundle: Bundle, folder: Path) -> dict[str, str]:
    """The environment of a server of that backend's, which looks for those files in this folder."""
    path = os.pathsep.join([str(bundle.path.parent / "site"), os.environ.get("PYTHONPATH", "")])
    return {"OBSTINATE": str(folder), "PYTHONPATH": path}
