"""What serving a bundle imports, seen in a fresh process: not PyTorch, not transformers, not another runtime."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hasten.backends import BACKENDS
from hasten.core.variant import Precision, Variant

HEAVY = {"torch", "transformers", "onnx", "sentence_transformers", "huggingface_hub", "safetensors"}


def modules_after(code: str, *arguments: str) -> set[str]:
    """The top-level modules that code adds to those of a bare interpreter."""
    program = f"import json, sys\nbefore = set(sys.modules)\n{code}\nprint(json.dumps([*set(sys.modules) - before]))"
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def test_importing_hasten_imports_no_library() -> None:
    found = modules_after("import hasten; dir(hasten); hasten.__version__")
    assert found - set(sys.stdlib_module_names) == {"hasten"}


def test_onnxruntime_reports_nothing_and_keeps_no_identity(tmp_path: Path) -> None:
    """Outside of tests and CI, where it would not report in any case."""
    quiet = ("CI", "TF_BUILD", "GITHUB_ACTIONS", "ORT_DISABLE_TELEMETRY", "ORT_RUNNING_UNIT_TESTS", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in quiet}
    environment |= {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", "import hasten, onnxruntime"], check=True, env=environment)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", [backend.name for backend in BACKENDS.all() if backend.is_stored])
@pytest.mark.parametrize("task", ["text-classification", "sentence-similarity"])
def test_answering_imports_only_its_runtime(
    task: str, backend: str, quick_build: Any, tiny_classifier: Any, tiny_embedder: Any
) -> None:
    from hasten.core.hardware import this_machine

    variant = Variant(backend, Precision.FP32)
    support = BACKENDS.get(backend).probe(this_machine(), variant)
    if not support.ok:
        pytest.skip(f"{variant}: {support.reason}")
    model = tiny_classifier("bert") if task == "text-classification" else tiny_embedder()
    bundle = quick_build(model, variants=[variant.name])
    found = modules_after("import hasten; hasten.load(sys.argv[1])(['a text', 'another'])", str(bundle.path))
    others = {package for other in BACKENDS.all() for package in other.requires} - set(BACKENDS.get(backend).requires)
    assert found & set(BACKENDS.get(backend).requires)
    assert not found & (HEAVY | others)


def test_writing_imports_only_its_runtime(tmp_path: Path) -> None:
    import writers

    backend = writers.byte_level()
    module = writers.model("gpt2", writers.vocabulary_of(backend))
    bundle = writers.bundle(
        module, backend, tmp_path, writers.spec_of(module, chat_template="{{ messages[0].content }}")
    )
    code = "import hasten; hasten.load(sys.argv[1])([[{'role': 'user', 'content': 'a text'}], 'another'], max_tokens=3)"
    found = modules_after(code, str(bundle.path))
    assert {"onnxruntime", "jinja2"} <= found
    assert not found & HEAVY
    assert "jinja2" not in modules_after("import hasten; hasten.load(sys.argv[1])('a', max_tokens=3)", str(bundle.path))
