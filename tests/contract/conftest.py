"""Fixtures of contract tests: loaded models, their graphs, bundles to serve."""

from __future__ import annotations

import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hasten.backends import Dialect
from hasten.bundle import Bundle
from support.fakes.cuda_driver import driver
from support.fakes.engine_bundle import with_engine

Loader = Callable[..., Any]


@pytest.fixture(scope="session")
def load_tiny() -> Loader:
    """Load a model directory as the builder does; keywords are fields of the plan."""

    def load(model: Path, **plan: Any) -> Any:
        from hasten.builder.sources.locate import find_model
        from hasten.builder.sources.pytorch_model import load_model
        from hasten.core.plan import Plan

        request = Plan(model=str(model), **plan)
        return load_model(find_model(request), request)

    return load


@pytest.fixture(scope="session")
def make_graphs() -> Callable[..., dict[Dialect, Path]]:
    """Export the graphs of a loaded model, by dialect, as the build does."""

    def make(loaded: Any, folder: Path, *, external_data: bool = False) -> dict[Dialect, Path]:
        from hasten.builder.export.encoder import EXTERNAL_DATA_BYTES, export
        from hasten.builder.passes.pipeline import apply_passes

        graph = folder / "model.onnx"
        export(loaded, graph, external_data_bytes=0 if external_data else EXTERNAL_DATA_BYTES)
        return apply_passes(graph, folder, loaded.config).by_dialect()

    return make


@pytest.fixture(scope="session")
def classifier_bundle(tiny_classifier: Any, quick_build: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    target = tmp_path_factory.mktemp("operate") / "classifier"
    return quick_build(tiny_classifier("bert"), target, variants=["onnxruntime-fp32"])


@pytest.fixture(scope="session")
def engine_bundle(classifier_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The classifier bundle with a TensorRT engine as its first variant."""
    return with_engine(classifier_bundle, tmp_path_factory.mktemp("operate"))


@pytest.fixture(scope="session")
def gpu() -> Callable[[], AbstractContextManager[pytest.MonkeyPatch]]:
    """Use a GPU. Without one, the CUDA session runs on the CPU, and operator placement is not checked."""
    from hasten.backends import BACKENDS
    from hasten.backends.onnxruntime.cuda import CudaSession
    from hasten.core.system.hardware import this_machine
    from hasten.core.variant import Support, Variant

    @contextmanager
    def use() -> Iterator[pytest.MonkeyPatch]:
        with pytest.MonkeyPatch.context() as patch:
            if not BACKENDS.get("onnxruntime").probe(this_machine(), Variant.parse("onnxruntime-fp16@cuda")).ok:
                patch.setattr("hasten.backends.onnxruntime.probe_provider", lambda _: Support.yes())
                patch.setattr("hasten.backends.onnxruntime.check_placements", lambda _: None)
                patch.setattr("hasten.backends.onnxruntime.CudaSession", partial(CudaSession, device="cpu"))
            yield patch

    return use


@pytest.fixture(scope="session")
def gpu_bundle(tiny_classifier: Any, quick_build: Any, gpu: Any) -> Bundle:
    """A bundle for GPUs in both precisions, of which fp16 is the faster."""
    with gpu():
        names = ["onnxruntime-fp16@cuda", "onnxruntime-fp32@cuda"]
        return quick_build(tiny_classifier("bert"), variants=names, speeds={"onnxruntime-fp32@cuda": 2.0})


@pytest.fixture(scope="session")
def other_bundle(tiny_classifier: Any, quick_build: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The same model with other label names."""
    target = tmp_path_factory.mktemp("operate") / "other"
    return quick_build(tiny_classifier("bert", labels=("x", "y", "z")), target, variants=["onnxruntime-fp32"])


@pytest.fixture(scope="session")
def faulty_bundle(tiny_classifier: Any, quick_build: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle for a backend that only servers with `faulty_environment` find."""
    from support.faulty_backend import install_faulty_backend

    folder = tmp_path_factory.mktemp("operate")
    install_faulty_backend(folder / "site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULTY_FOLDER", str(folder))
        patch.syspath_prepend(folder / "site")
        return quick_build(tiny_classifier("bert"), folder / "faulty", variants=["faulty-fp32"])


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """Replace TensorRT and the GPU by fakes (tests/support/fakes/tensorrt)."""
    from hasten.backends.tensorrt import engine, library
    from hasten.core.system.hardware import this_machine

    folder = Path(__file__).parents[1] / "support" / "fakes" / "tensorrt"
    names = ("tensorrt", "tensorrt_rtx_bindings", "cuda", "cuda.bindings", "cuda.bindings.runtime")
    caches = (engine._log, library.loading_error, this_machine)
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(driver(tmp_path_factory.mktemp("driver"), "Stand-in")))
    for cached in caches:
        cached.cache_clear()
    yield import_module("tensorrt")
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def free_port() -> int:
    """Return a port for a server that must be reachable before it reports its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture
def no_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the target of a build that fails; afterwards it and the temporary directory must be empty."""
    parent, temporary = tmp_path / "parent", tmp_path / "temporary"
    parent.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    # PyTorch creates its compiler cache there on import.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    yield parent / "bundle"
    assert list(parent.iterdir()) == []
    assert list(temporary.iterdir()) == []


@pytest.fixture(scope="session")
def generator_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A tiny generative model that never emits an end token."""
    from support.models import generation_bundles

    folder = tmp_path_factory.mktemp("generator")
    return generation_bundles.build(generation_bundles.save(folder / "model"), folder / "generator")
