"""Short ways to what the contract tests start from: a loaded model, its graphs, a bundle without the benchmark."""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hasten.backends import Artifact, Dialect
from hasten.bundle import Bundle
from hasten.core.report import Bench, Footprint, Timing
from hasten.core.statistics import Interval
from hasten.core.tensors import Shape

Loader = Callable[..., Any]
QuickBuild = Callable[..., Bundle]


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
def texts_file(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[str, ...]) -> Path:
    """A handful of texts and pairs: the built-in sample has 400, which fifty builds do not need."""
    file = tmp_path_factory.mktemp("data") / "texts.jsonl"
    rows = [{"text": text} for text in corpus] + [{"text": corpus[0], "text_pair": corpus[3]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def quick_build(tmp_path_factory: pytest.TempPathFactory, texts_file: Path) -> QuickBuild:
    """`hasten.build`, its benchmark answered at once; `speeds` says what each variant would have taken, in ms.

    A real benchmark starts a PyTorch process, ten seconds here. test_build.py runs it where it is the subject.
    """

    def build(model: Path | str, output: Path | None = None, *, speeds: dict[str, float] | None = None, **options: Any):
        import hasten

        def timed(contenders: Sequence[Artifact], shapes: Sequence[Shape], *_: object, **__: object) -> Bench:
            names = [artifact.variant.name for artifact in contenders]
            timings = tuple(_timing(name, shapes[0], (speeds or {}).get(name, 1.0)) for name in names)
            return Bench(names[0], timings, tuple(Footprint(name, 1.0, 1, 1) for name in names))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hasten.builder.build.bench", timed)
            target = output or tmp_path_factory.mktemp("bundles") / "bundle"
            # One thread: handing work this small to a second one takes longer than doing it.
            return hasten.build(model, target, **({"data": texts_file, "threads": 1} | options))

    return build


@pytest.fixture(scope="session")
def classifier_bundle(tiny_classifier: Any, quick_build: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    target = tmp_path_factory.mktemp("operate") / "classifier"
    return quick_build(tiny_classifier("bert"), target, variants=["onnxruntime-fp32"])


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


def _timing(variant: str, shape: Shape, ms: float) -> Timing:
    return Timing(
        variant=variant,
        shape=shape,
        samples=1,
        p50_ms=ms,
        p90_ms=ms,
        p99_ms=None,
        sentences_per_s=shape.batch * 1e3 / ms,
        speedup=Interval(1.0, 1.0, 1.0),
        round_medians_ms=(ms,),
    )
