"""Models load from the hub: a local HTTP server implements the used part of its protocol."""

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
    """A model as weights, as graphs, as both, and an adapter."""
    both = shutil.copytree(tiny_classifier("bert"), tmp_path_factory.mktemp("hub") / "both")
    (both / "onnx").mkdir()
    for name in ("model.onnx", "model.onnx_data", "model_quantized.onnx"):
        (both / "onnx" / name).write_bytes(name.encode())
    graphs = shutil.copytree(both, both.with_name("graphs"))
    (graphs / "model.safetensors").unlink()
    adapter = both.with_name("adapter")
    adapter.mkdir()
    config = {"base_model_name_or_path": "org/both", "task_type": "SEQ_CLS", "revision": None}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    return {"org/tiny": tiny_classifier("bert"), "org/graphs": graphs, "org/both": both, "org/adapter": adapter}


@pytest.fixture(scope="module")
def hub(repositories: dict[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """A hub with these repositories (one revision) and `org/gated`; records the requested paths."""
    requested: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            requested.append(self.path)
            path = self.path.split("?")[0]
            repository = "/".join(path.removeprefix("/api/models").split("/")[1:3])
            folder = repositories.get(repository)
            if path.startswith("/api/models/org/gated"):
                self.reject(403, "GatedRepo")
            elif folder is None:
                self.reject(404, "RepoNotFound")
            elif path.endswith(f"/tree/{COMMIT}"):
                files = [
                    {"type": "file", "path": name, "size": (folder / name).stat().st_size, "oid": COMMIT}
                    for name in file_names(folder)
                ]
                self.reply(json.dumps(files).encode())
            elif path.startswith("/api/") and not path.endswith(("/revision/main", f"/revision/{COMMIT}", repository)):
                self.reject(404, "RevisionNotFound")
            elif path.startswith("/api/"):
                files = [{"rfilename": name} for name in file_names(folder)]
                self.reply(json.dumps({"id": repository, "sha": COMMIT, "siblings": files}).encode())
            else:
                self.reply((folder / path.split(f"/resolve/{COMMIT}/")[1]).read_bytes())

        def reply(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def reject(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", requested
    server.shutdown()
    server.server_close()
    thread.join()


def file_names(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


def run_python(hub: str, cache: Path, *args: str, is_offline: bool = False) -> subprocess.CompletedProcess[str]:
    # In a separate process: huggingface_hub reads its settings on import.
    settings = {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": str(int(is_offline)), "HF_HOME": str(cache), "HF_TOKEN": "secret"}
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, env={**os.environ, **settings}, check=False
    )


def run_hasten(hub: str, cache: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return run_python(hub, cache, "-m", "hasten", *args)


@pytest.mark.slow
def test_hub_model_is_built_and_its_revision_recorded(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    args = ["build", "org/tiny", "-o", str(target), "--bench-budget", "0.2s", "-b", "1", "-s", "8"]
    done = run_hasten(hub[0], tmp_path / "cache", *args, "--variants", "onnxruntime-fp32")
    assert done.returncode == 0, done.stderr
    assert json.loads((target / "manifest.json").read_text())["model"] == {
        "id": "org/tiny",
        "revision": COMMIT,
        "architecture": "BertForSequenceClassification",
        "file": None,
    }


def test_dry_run_does_not_download_weights(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    before = len(hub[1])
    assert run_hasten(hub[0], tmp_path / "cache", "build", "org/tiny", "--dry-run").returncode == 0
    assert not [path for path in hub[1][before:] if path.endswith(".safetensors")]


FIND = """
import json, sys
from pathlib import Path
from hasten.builder.sources.directory import list_files
from hasten.builder.sources.locate import find_model
from hasten.core.plan import Plan
model = find_model(Plan(sys.argv[1], file_name=sys.argv[2] or None), with_weights=sys.argv[3] == "all")
folders = [model.path] if model.base is None else [model.path, model.base.path]
names = [name for folder in folders for name in list_files(folder)]
print(json.dumps([model.graph, [name for name in names if ".onnx" in name or "safetensors" in name]]))
"""
QUANTIZED = "onnx/model_quantized.onnx"


@pytest.mark.parametrize(
    ("model", "file_name", "amount", "graph", "fetched"),
    [
        ("org/both", "", "all", None, ["model.safetensors"]),
        ("org/both", QUANTIZED, "all", QUANTIZED, [QUANTIZED]),
        ("org/graphs", "", "all", "onnx/model.onnx", ["onnx/model.onnx", "onnx/model.onnx_data"]),
        ("org/graphs", "", "config", "onnx/model.onnx", []),
        ("org/adapter", "", "all", None, ["adapter_model.safetensors", "model.safetensors"]),
    ],
)
def test_only_one_format_of_a_model_is_downloaded(
    hub: tuple[str, list[str]],
    tmp_path: Path,
    model: str,
    file_name: str,
    amount: str,
    graph: str | None,
    fetched: list[str],
) -> None:
    """The graph is known before the download, and downloaded files are found offline."""
    args = ["-c", FIND, model, file_name, amount]
    done = run_python(hub[0], tmp_path, *args)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [graph, fetched]
    if amount == "all":
        offline = run_python(hub[0], tmp_path, *args, is_offline=True)
        assert offline.returncode == 0, offline.stderr
        assert json.loads(offline.stdout) == [graph, fetched]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["org/unknown"], "neither a local directory nor a model on the hub"),
        (["org/tiny", "--revision", "nope"], "revision"),
        (["org/gated"], "is gated"),
    ],
)
def test_hub_error_is_one_line(hub: tuple[str, list[str]], tmp_path: Path, args: list[str], message: str) -> None:
    done = run_hasten(hub[0], tmp_path / "cache", "build", *args)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) <= 2
