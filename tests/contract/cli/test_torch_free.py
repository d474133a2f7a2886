"""Running a bundle in a fresh process imports neither PyTorch nor transformers nor another runtime."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hasten.backends import BACKENDS
from hasten.core.variant import Precision, Variant
from support.import_probe import modules_after

HEAVY = {"torch", "transformers", "onnx", "sentence_transformers", "huggingface_hub", "safetensors"}


def test_importing_hasten_imports_no_library() -> None:
    modules = modules_after("import hasten; dir(hasten); hasten.__version__")
    assert modules - set(sys.stdlib_module_names) == {"hasten"}


def test_onnxruntime_telemetry_is_disabled(tmp_path: Path) -> None:
    """Run without the variables of tests and CI, which would disable it too."""
    quiet = ("CI", "TF_BUILD", "GITHUB_ACTIONS", "ORT_DISABLE_TELEMETRY", "ORT_RUNNING_UNIT_TESTS", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in quiet}
    environment |= {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", "import hasten, onnxruntime"], check=True, env=environment)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", [backend.name for backend in BACKENDS.all() if backend.is_stored])
@pytest.mark.parametrize("task", ["text-classification", "sentence-similarity"])
def test_predictor_imports_only_its_runtime(
    task: str, backend: str, quick_build: Any, tiny_classifier: Any, tiny_embedder: Any
) -> None:
    from hasten.core.system.hardware import this_machine

    variant = Variant(backend, Precision.FP32)
    support = BACKENDS.get(backend).probe(this_machine(), variant)
    if not support.ok:
        pytest.skip(f"{variant}: {support.reason}")
    model = tiny_classifier("bert") if task == "text-classification" else tiny_embedder()
    bundle = quick_build(model, variants=[variant.name])
    modules = modules_after("import hasten; hasten.load(sys.argv[1])(['a text', 'another'])", str(bundle.path))
    others = {package for other in BACKENDS.all() for package in other.requires} - set(BACKENDS.get(backend).requires)
    assert modules & set(BACKENDS.get(backend).requires)
    assert not modules & (HEAVY | others)


def test_map_imports_only_its_runtime(classifier_bundle: Any) -> None:
    code = "import hasten, pyarrow; list(hasten.map(sys.argv[1], [pyarrow.table({'text': ['a text']})]))"
    modules = modules_after(code, str(classifier_bundle.path))
    assert {"onnxruntime", "pyarrow"} <= modules
    assert not modules & (HEAVY | {"datasets"})


def test_generation_imports_only_its_runtime(tmp_path: Path) -> None:
    from support.models import tiny_decoders

    backend = tiny_decoders.byte_level()
    module = tiny_decoders.model("gpt2", tiny_decoders.vocabulary_of(backend))
    bundle = tiny_decoders.bundle(
        module, backend, tmp_path, tiny_decoders.spec_of(module, chat_template="{{ messages[0].content }}")
    )
    code = "import hasten; hasten.load(sys.argv[1])([[{'role': 'user', 'content': 'a text'}], 'another'], max_tokens=3)"
    modules = modules_after(code, str(bundle.path))
    assert {"onnxruntime", "jinja2"} <= modules
    assert not modules & HEAVY
    assert "jinja2" not in modules_after("import hasten; hasten.load(sys.argv[1])('a', max_tokens=3)", str(bundle.path))
