"""Short ways to what the contract tests start from: a loaded model, its graphs, bundles to operate on."""

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

from drivers import driver
from engines import with_engine
from hasten.backends import Dialect
from hasten.bundle import Bundle

Loader = Callable[..., Any]


@pytest.fixture(scope="session")
def load_tiny() -> Loader:
    """A directory as the builder loads it; keywords are the plan's."""

    def load(model: Path, **plan: Any) -> Any:
        from hasten.builder.load import load_model
        from hasten.builder.source import find_model
        from hasten.core.plan import Plan

        wanted = Plan(model=str(model), **plan)
        return load_model(find_model(wanted), wanted)

    return load


@pytest.fixture(scope="session")
def make_graphs() -> Callable[..., dict[Dialect, Path]]:
    """The graphs of a loaded model, by dialect, the way the build makes them."""

    def make(loaded: Any, folder: Path, *, external_data: bool = False) -> dict[Dialect, Path]:
        from hasten.builder.export import EXTERNAL_DATA_BYTES, export
        from hasten.builder.passes import apply_passes

        graph = folder / "model.onnx"
        export(loaded, graph, external_data_bytes=0 if external_data else EXTERNAL_DATA_BYTES)
        return apply_passes(graph, folder, loaded.config, external_data=external_data).by_dialect()

    return make


@pytest.fixture(scope="session")
def classifier_bundle(tiny_classifier: Any, quick_build: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    target = tmp_path_factory.mktemp("operate") / "classifier"
    return quick_build(tiny_classifier("bert"), target, variants=["onnxruntime-fp32"])


@pytest.fixture(scope="session")
def engine_bundle(classifier_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The same with an engine of TensorRT in front."""
    return with_engine(classifier_bundle, tmp_path_factory.mktemp("operate"))


@pytest.fixture(scope="session")
def gpu() -> Callable[[], AbstractContextManager[pytest.MonkeyPatch]]:
    """Where there is none, the session for it runs on the CPU, and nobody looks what landed there."""
    from hasten.backends import BACKENDS
    from hasten.backends.onnxruntime.cuda import CudaSession
    from hasten.core.hardware import this_machine
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
    """Built for one, in both precisions; the one of half precision is the faster."""
    with gpu():
        names = ["onnxruntime-fp16@cuda", "onnxruntime-fp32@cuda"]
        return quick_build(tiny_classifier("bert"), variants=names, speeds={"onnxruntime-fp32@cuda": 2.0})


@pytest.fixture(scope="session")
def other_bundle(tiny_classifier: Any, quick_build: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The same model, with other words for its labels."""
    target = tmp_path_factory.mktemp("operate") / "other"
    return quick_build(tiny_classifier("bert", labels=("x", "y", "z")), target, variants=["onnxruntime-fp32"])


@pytest.fixture(scope="session")
def obstinate_bundle(tiny_classifier: Any, quick_build: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """For another package's backend, which no other test sees: operating.obstinacy makes it known to a server."""
    from operating import install_obstinate

    folder = tmp_path_factory.mktemp("operate")
    install_obstinate(folder / "site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OBSTINATE", str(folder))
        patch.syspath_prepend(folder / "site")
        return quick_build(tiny_classifier("bert"), folder / "obstinate", variants=["obstinate-fp32"])


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """A GPU and a TensorRT that are none (tests/tensorrt_standin), in the place of any that there may be."""
    from hasten.backends.tensorrt import engine
    from hasten.core.hardware import this_machine

    folder = Path(__file__).parents[1] / "tensorrt_standin"
    names = ("tensorrt", "cuda", "cuda.bindings", "cuda.bindings.runtime")
    caches = (engine._log, engine.loading_error, this_machine)
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
    """For a server that must be found where it was before, or before it says where it is."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture
def no_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a failed build was to write; afterwards nothing may lie there, nor in the temporary directory."""
    place, temporary = tmp_path / "place", tmp_path / "temporary"
    place.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    # PyTorch makes its compiler's cache there as soon as it is imported.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    yield place / "bundle"
    assert list(place.iterdir()) == []
    assert list(temporary.iterdir()) == []


@pytest.fixture(scope="session")
def writer_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A tiny model that writes, and never ends by itself."""
    import writer_bundles

    folder = tmp_path_factory.mktemp("writer")
    return writer_bundles.build(writer_bundles.save(folder / "model"), folder / "writer")
