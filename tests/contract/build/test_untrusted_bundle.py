"""A bundle must not run code when it is opened, whatever its manifest says."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hasten
from hasten.backends import BACKENDS, Artifact, RunOptions
from hasten.bundle.manifest import read_manifest, sha256
from hasten.core.errors import BundleError, StageError
from hasten.core.tensors import Signature
from hasten.core.variant import Variant
from hasten.measure.bench import BenchWorker

FILE = "module.pt"


class TouchesFile:
    """An object whose unpickling creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.fixture(params=["torch", "inductor"])
def malicious(
    request: pytest.FixtureRequest, tmp_path: Path, tiny_classifier: Any, quick_build: Callable[..., Any]
) -> Path:
    """Add a pickled module to a bundle, as the fastest variant of a sealed manifest."""
    path = tmp_path / "malicious"
    shutil.copytree(quick_build(tiny_classifier("bert"), variants=["onnxruntime-fp32"]).path, path)
    name = f"{request.param}-fp32"
    file = path / "variants" / name / FILE
    file.parent.mkdir()
    file.write_bytes(pickle.dumps(TouchesFile(tmp_path / "code-ran")))
    manifest = read_manifest(path)
    entry = replace(manifest.variants[0], name=name, backend=request.param, requires=(), graphs={"model": FILE})
    files = manifest.files | {f"variants/{name}/{FILE}": sha256(file)}
    changed = replace(manifest, variants=(entry, *manifest.variants), files=files).sealed()
    (path / "manifest.json").write_bytes(changed.to_json())
    return path


@pytest.mark.parametrize("command", [["run", "a text"], ["verify"], ["bench"], ["inspect"], ["serve", "--port", "0"]])
def test_variant_of_a_backend_that_unpickles_is_rejected(malicious: Path, command: list[str]) -> None:
    with pytest.raises(BundleError, match="which a bundle cannot store"):
        hasten.load(malicious)
    words = [sys.executable, "-m", "hasten", command[0], str(malicious), *command[1:]]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == BundleError.exit_code
    assert "which a bundle cannot store" in " ".join(done.stderr.split())
    assert not (malicious.parent / "code-ran").exists()


@pytest.mark.parametrize("backend", ["torch", "inductor"])
def test_only_modules_that_this_build_saved_are_unpickled(backend: str, tmp_path: Path) -> None:
    """A benchmark process loads pickled modules by a secret name, which no bundle and no download can have."""
    (tmp_path / FILE).write_bytes(pickle.dumps(TouchesFile(tmp_path / "code-ran")))
    artifact = Artifact(Variant.parse(f"{backend}-fp32"), Signature((), (), 8), tmp_path, {"model": FILE})
    with pytest.raises(StageError, match="was not saved by this build"):
        BACKENDS.get(backend).open(artifact, RunOptions(1))
    if backend == "torch":
        with pytest.raises(StageError, match="was not saved by this build"):
            BenchWorker(artifact, 1, (sys.executable, "-m", "hasten.measure.bench_worker"))
    assert not (tmp_path / "code-ran").exists()
