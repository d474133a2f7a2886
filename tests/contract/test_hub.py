"""Loading from the hub, against a real HTTP server on this machine that speaks the part of its protocol we use."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def hub(tiny_classifier: Callable[..., Path]) -> Iterator[tuple[str, list[str]]]:
    """Knows `org/tiny` (one revision), `org/gated`, and nothing else; records the paths it was asked for."""
    folder = tiny_classifier("bert")
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            asked.append(self.path)
            path = self.path.split("?")[0]
            if path.startswith("/api/models/org/gated"):
                self.refuse(403, "GatedRepo")
            elif not path.startswith(("/api/models/org/tiny", "/org/tiny/resolve/")):
                self.refuse(404, "RepoNotFound")
            elif path.endswith(f"/tree/{COMMIT}"):
                files = [
                    {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": COMMIT}
                    for file in sorted(folder.iterdir())
                ]
                self.answer(json.dumps(files).encode())
            elif path.startswith("/api/") and not path.endswith(("/revision/main", f"/revision/{COMMIT}", "org/tiny")):
                self.refuse(404, "RevisionNotFound")
            elif path.startswith("/api/"):
                files = [{"rfilename": file.name} for file in sorted(folder.iterdir())]
                self.answer(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": files}).encode())
            else:
                self.answer((folder / path.rsplit("/", 1)[-1]).read_bytes())

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()
    thread.join()


def hasten(hub: str, cache: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # In its own process: the hub's library reads its settings when it is imported.
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_HOME": str(cache), "HF_TOKEN": "secret"}
    command = [sys.executable, "-m", "hasten", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_a_hub_model_is_built_and_its_revision_recorded(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    words = ["build", "org/tiny", "-o", str(target), "--bench-budget", "0.2s", "-b", "1", "-s", "8"]
    done = hasten(hub[0], tmp_path / "cache", *words, "--variants", "onnxruntime-fp32")
    assert done.returncode == 0, done.stderr
    assert json.loads((target / "manifest.json").read_text())["model"] == {
        "id": "org/tiny",
        "revision": COMMIT,
        "architecture": "BertForSequenceClassification",
    }


def test_a_dry_run_does_not_download_weights(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    before = len(hub[1])
    assert hasten(hub[0], tmp_path / "cache", "build", "org/tiny", "--dry-run").returncode == 0
    assert not [path for path in hub[1][before:] if path.endswith(".safetensors")]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["org/unknown"], "neither a local directory nor a model on the hub"),
        (["org/tiny", "--revision", "nope"], "revision"),
        (["org/gated"], "is gated"),
    ],
)
def test_what_the_hub_does_not_give_is_one_clear_line(
    hub: tuple[str, list[str]], tmp_path: Path, words: list[str], says: str
) -> None:
    done = hasten(hub[0], tmp_path / "cache", "build", *words)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) <= 2
