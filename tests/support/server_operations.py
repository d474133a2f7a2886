"""`hasten serve` as a process: its log, its signals, its metrics and plain requests."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from hasten.bundle import Bundle, open_bundle
from hasten.bundle.manifest import sha256
from support.wait import wait_until

TEXT = "one answer"
BODY = {"inputs": TEXT}
# One session of one thread: nothing is measured to choose them.
LEAN = ("--port", "0", "--threads", "1", "--instances", "1")
QUIET = (*LEAN, "--no-grpc")

_numbers = count()
# The machine may be busy with other tests.
_TIMEOUT_S = 60.0


class Running:
    """A server process; `ready` waits until it accepts requests. It logs JSON by default."""

    def __init__(self, folder: Path, *words: str, form: str = "json", **environment: str) -> None:
        number = next(_numbers)
        self._log, self._out = folder / f"log-{number}", folder / f"out-{number}"
        command = [sys.executable, "-m", "hasten", "serve", *words, "--log-format", form]
        with self._log.open("wb") as log, self._out.open("wb") as out:
            # In its own process group, as a shell does it: Ctrl-C reaches the whole group.
            self.process = subprocess.Popen(
                command, stdout=out, stderr=log, env={**os.environ, **environment}, process_group=0
            )

    @property
    def log(self) -> str:
        """Return the log so far."""
        return self._log.read_text(encoding="utf-8")

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Return the complete lines of the JSON log."""
        return [json.loads(line) for line in self.log.split("\n")[:-1]]

    def said(self, words: str) -> dict[str, Any]:
        """Wait for a log line whose message contains the words."""

        def find() -> dict[str, Any] | None:
            return next((line for line in self.lines if words in line["message"]), None)

        line: dict[str, Any] = wait_until(lambda: find() or (self.process.poll() is not None and find()), f"'{words}'")
        return line

    @property
    def port(self) -> int:
        """Wait until the server listens and return its port."""
        return int(self.said("listening on")["message"].split(";")[0].rsplit(":", 1)[1])

    def ready(self) -> Running:
        """Wait until all models are loaded."""

        def is_ready() -> bool:
            assert self.process.poll() is None, self.log
            return "ready on " in self._out.read_text()

        wait_until(is_ready, "readiness")
        return self

    @property
    def grpc_port(self) -> int:
        """Return the port of gRPC."""
        line = next(line for line in self._out.read_text().splitlines() if line.startswith("gRPC on "))
        return int(line.rsplit(":", 1)[1])

    def connect(self, context: ssl.SSLContext | None = None, port: int | None = None) -> http.client.HTTPConnection:
        """Return a new connection."""
        chosen = port or self.port
        if context is not None:
            return http.client.HTTPSConnection("127.0.0.1", chosen, timeout=_TIMEOUT_S, context=context)
        return http.client.HTTPConnection("127.0.0.1", chosen, timeout=_TIMEOUT_S)

    def ask(self, path: str, body: Any = None, *, port: int | None = None, **headers: str) -> tuple[int, str]:
        """Send a GET request, or a POST request if there is a body."""
        connection = self.connect(port=port)
        try:
            return asked(connection, path, body, **headers)
        finally:
            connection.close()

    def signal(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for the process and return its exit code."""
        return self.process.wait(_TIMEOUT_S)

    def stop(self) -> int:
        """Stop the server with SIGTERM and return its exit code."""
        self.signal(signal.SIGTERM)
        return self.end()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def asked(connection: http.client.HTTPConnection, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
    """Send a request on a connection and return status and body."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request(
        "GET" if body is None else "POST",
        path,
        data,
        {name.replace("_", "-"): value for name, value in headers.items()},
    )
    response = connection.getresponse()
    return response.status, response.read().decode()


def predict(server: Running, **options: Any) -> int:
    """Send a plain request and return its status."""
    return server.ask("/predict", BODY, **options)[0]


def is_refused(port: int) -> bool:
    """Return whether the port refuses connections."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
    except ConnectionError:
        return True
    return False


def request(body: Any) -> bytes:
    """Return the bytes of a request."""
    data = json.dumps(body).encode()
    return b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)


def is_busy(server: Running, port: int) -> bool:
    """Return whether a second request, sent as a probe, is queued behind the first."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as second:
        second.sendall(request(BODY))
        scraped = metrics(server, port)
    return any(value > 0 for (name, _), value in scraped.items() if name == "hasten_queue_size")


def metrics(server: Running, port: int) -> dict[tuple[str, tuple[str, ...]], float]:
    """Scrape the metrics and return the samples by name and labels."""
    status, text = server.ask("/metrics", port=port)
    assert status == 200
    return parsed_metrics(text)


def parsed_metrics(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return the samples of a scrape by name and labels."""
    from prometheus_client.parser import text_string_to_metric_families

    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, tuple(sample.labels.values())): sample.value for sample in samples}


def swap(link: Path, target: Path) -> None:
    """Point a link to another target atomically, as deployments do."""
    fresh = link.with_name(f".{link.name}")
    fresh.symlink_to(target)
    fresh.replace(link)


def sealed(bundle: Bundle) -> Bundle:
    """Seal the manifest with the present hashes of the files, as if the bundle had been built this way."""
    files = {name: sha256(bundle.path / name) for name in bundle.manifest.files}
    (bundle.path / "manifest.json").write_bytes(replace(bundle.manifest, files=files).sealed().to_json())
    return open_bundle(bundle.path)
