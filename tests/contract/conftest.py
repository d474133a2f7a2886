"""Short ways to what the contract tests start from: a loaded model, its graphs, bundles to operate on."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hasten.backends import MODEL, Artifact, Dialect
from hasten.bundle import Bundle
from hasten.core.tensors import DType
from hasten.core.variant import Precision, Variant

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
    """The same with an engine in front, which no TensorRT has built: what is deployed of it is only copied."""
    import msgspec

    from hasten.backends.tensorrt.planning import Order, Place, Record, profiles
    from hasten.bundle.read import TOKENIZER
    from hasten.bundle.write import BundleWriter

    folder = tmp_path_factory.mktemp("operate")
    manifest, reference = classifier_bundle.manifest, classifier_bundle.reference()
    order = Order(profiles(classifier_bundle.report.plan.shapes, manifest.signature.max_length))
    # Other types than the manifest says, and one input less: the engine has the last word.
    inputs = {"input_ids": DType.INT64, "attention_mask": DType.INT64}
    place = Place("NVIDIA H200", "9.0", "11.4.0")
    record = Record(place, order, Precision.FP16, inputs, {"logits": DType.FLOAT16})
    engine = Artifact(Variant.parse("tensorrt-fp16@cuda"), manifest.signature, folder / "engine", {MODEL: "model.plan"})
    engine.directory.mkdir()
    for name, content in (("plan", b"engine"), ("onnx", b"graph"), ("json", msgspec.json.encode(record))):
        (engine.directory / f"model.{name}").write_bytes(content)
    entry = replace(
        manifest.chosen,
        name=engine.variant.name,
        backend="tensorrt",
        precision=Precision.FP16,
        device="cuda",
        graphs=dict(engine.graphs),
    )
    with BundleWriter(folder / "bundle") as writer:
        writer.add_graph(classifier_bundle.graph().path())
        for artifact in (engine, classifier_bundle.artifact(manifest.chosen)):
            writer.add_variant(artifact)
        writer.add_tokenizer(classifier_bundle.path / TOKENIZER)
        writer.add_reference(reference.rows, reference.outputs)
        writer.add_report(classifier_bundle.report)
        return writer.commit(replace(manifest, variants=(entry, *manifest.variants)))


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
