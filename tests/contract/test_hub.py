"""Loading from the hub, against a real HTTP server on this machine that speaks the part of its protocol we use."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def repositories(tiny_classifier: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model as weights, as graphs, as both, and an adapter; which of their files are fetched is the question."""
    both = shutil.copytree(tiny_classifier("bert"), tmp_path_factory.mktemp("hub") / "both")
    (both / "onnx").mkdir()
    for name in ("model.onnx", "model.onnx_data", "model_quantized.onnx"):
        (both / "onnx" / name).write_bytes(name.encode())
    graphs = shutil.copytree(both, both.with_name("graphs"))
    (graphs / "model.safetensors").unlink()
    adapter = both.with_name("adapter")
    adapter.mkdir()
    about = {"base_model_name_or_path": "org/both", "task_type": "SEQ_CLS", "revision": None}
    (adapter / "adapter_config.json").write_text(json.dumps(about))
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    return {"org/tiny": tiny_classifier("bert"), "org/graphs": graphs, "org/both": both, "org/adapter": adapter}


@pytest.fixture(scope="module")
def hub(repositories: dict[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """Knows those repositories (one revision), `org/gated`, and nothing else; records the paths it was asked for."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            asked.append(self.path)
            path = self.path.split("?")[0]
            repository = "/".join(path.removeprefix("/api/models").split("/")[1:3])
            folder = repositories.get(repository)
            if path.startswith("/api/models/org/gated"):
                self.refuse(403, "GatedRepo")
            elif folder is None:
                self.refuse(404, "RepoNotFound")
            elif path.endswith(f"/tree/{COMMIT}"):
                files = [
                    {"type": "file", "path": name, "size": (folder / name).stat().st_size, "oid": COMMIT}
                    for name in names(folder)
                ]
                self.answer(json.dumps(files).encode())
            elif path.startswith("/api/") and not path.endswith(("/revision/main", f"/revision/{COMMIT}", repository)):
                self.refuse(404, "RevisionNotFound")
            elif path.startswith("/api/"):
                files = [{"rfilename": name} for name in names(folder)]
                self.answer(json.dumps({"id": repository, "sha": COMMIT, "siblings": files}).encode())
            else:
                self.answer((folder / path.split(f"/resolve/{COMMIT}/")[1]).read_bytes())

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


def names(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


def python(hub: str, cache: Path, *words: str, is_offline: bool = False) -> subprocess.CompletedProcess[str]:
    # In its own process: the hub's library reads its settings when it is imported.
    settings = {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": str(int(is_offline)), "HF_HOME": str(cache), "HF_TOKEN": "secret"}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env={**os.environ, **settings}, check=False
    )


def hasten(hub: str, cache: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python(hub, cache, "-m", "hasten", *words)


@pytest.mark.slow
def test_a_hub_model_is_built_and_its_revision_recorded(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    words = ["build", "org/tiny", "-o", str(target), "--bench-budget", "0.2s", "-b", "1", "-s", "8"]
    done = hasten(hub[0], tmp_path / "cache", *words, "--variants", "onnxruntime-fp32")
    assert done.returncode == 0, done.stderr
    assert json.loads((target / "manifest.json").read_text())["model"] == {
        "id": "org/tiny",
        "revision": COMMIT,
        "architecture": "BertForSequenceClassification",
        "file": None,
    }


def test_a_dry_run_does_not_download_weights(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    before = len(hub[1])
    assert hasten(hub[0], tmp_path / "cache", "build", "org/tiny", "--dry-run").returncode == 0
    assert not [path for path in hub[1][before:] if path.endswith(".safetensors")]


FIND = """
import json, sys
from pathlib import Path
from hasten.builder.source import find_model, list_files
from hasten.core.plan import Plan
found = find_model(Plan(sys.argv[1], file_name=sys.argv[2] or None), with_weights=sys.argv[3] == "all")
folders = [found.path] if found.base is None else [found.path, found.base.path]
names = [name for folder in folders for name in list_files(folder)]
print(json.dumps([found.graph, [name for name in names if ".onnx" in name or "safetensors" in name]]))
"""
QUANTIZED = "onnx/model_quantized.onnx"


@pytest.mark.parametrize(
    ("model", "file_name", "how_much", "graph", "fetched"),
    [
        ("org/both", "", "all", None, ["model.safetensors"]),
        ("org/both", QUANTIZED, "all", QUANTIZED, [QUANTIZED]),
        ("org/graphs", "", "all", "onnx/model.onnx", ["onnx/model.onnx", "onnx/model.onnx_data"]),
        ("org/graphs", "", "about", "onnx/model.onnx", []),
        ("org/adapter", "", "all", None, ["adapter_model.safetensors", "model.safetensors"]),
    ],
)
def test_of_a_model_in_many_forms_one_is_fetched(
    hub: tuple[str, list[str]],
    tmp_path: Path,
    model: str,
    file_name: str,
    how_much: str,
    graph: str | None,
    fetched: list[str],
) -> None:
    """The early look knows which it will be without fetching it, and what was fetched is found without the network."""
    words = ["-c", FIND, model, file_name, how_much]
    done = python(hub[0], tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [graph, fetched]
    if how_much == "all":
        again = python(hub[0], tmp_path, *words, is_offline=True)
        assert again.returncode == 0, again.stderr
        assert json.loads(again.stdout) == [graph, fetched]


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
