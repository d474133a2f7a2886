"""The graphs that TensorRT is given, of real exports: their types, and what they answer where the CPU can run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from drivers import driver
from hasten.backends import BACKENDS, MODEL, Artifact, Dialect, RunOptions, Source
from hasten.backends.tensorrt import infer, load_engine
from hasten.backends.tensorrt.typed import stored_in, write_typed
from hasten.core.errors import StageError
from hasten.core.hardware import this_machine
from hasten.core.plan import Range, Shapes
from hasten.core.tensors import Batch, Signature, pad
from hasten.core.variant import Precision, Variant
from hasten.quantize.calibration import Calibration
from hasten.quantize.overflow import overflows

onnx: Any = pytest.importorskip("onnx")

FLOAT, FLOAT16, BFLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16
KINDS = {Precision.FP16: FLOAT16, Precision.BF16: BFLOAT16}
# The norm of the error over the norm of the output, of random models; a lost mask would be 0.6. A processor that
# computes in fp16 sums in it too, as no GPU does: 0.024 on a Neoverse-N1; where values are widened first it is less.
TOLERANCES = {Precision.FP16: 4e-2 if this_machine().has("fp16") else 2e-2, Precision.BF16: 1e-1}
STANDIN = Path(__file__).parents[1] / "tensorrt_standin"
ENGINE = Variant.parse("tensorrt-fp16@cuda")
Plain = Callable[[str], tuple[Path, Signature]]


@pytest.fixture(scope="module")
def plain(
    tiny_classifier: Any,
    tiny_embedder: Any,
    tiny_model: Any,
    load_tiny: Any,
    make_graphs: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Plain:
    """The portable graph of a tiny model, exported once."""
    models = {
        "classifier": lambda: tiny_classifier("bert"),
        "embedder": tiny_embedder,
        "relative bias": lambda: tiny_classifier("mpnet"),
        "masks": lambda: tiny_model("distilbert", "ForMaskedLM"),
    }
    made: dict[str, tuple[Path, Signature]] = {}

    def graph(name: str) -> tuple[Path, Signature]:
        if name not in made:
            loaded = load_tiny(models[name]())
            made[name] = make_graphs(loaded, tmp_path_factory.mktemp("graphs"))[Dialect.ONNX], loaded.signature
        return made[name]

    return graph


def batch_of(signature: Signature) -> Batch:
    lengths, draw = np.array([1, 60, 17], np.int32), np.random.default_rng(0)
    values = {spec.name: np.zeros(lengths.sum(), np.int32) for spec in signature.inputs}
    values["input_ids"] = draw.integers(5, 60, lengths.sum()).astype(np.int32)
    if signature.mask_id is not None:
        values["input_ids"][[1, 5]] = signature.mask_id
    return Batch(values, lengths)


def answer(graph: Path, signature: Signature) -> Any:
    artifact = Artifact(Variant("graph", Precision.FP32), signature, graph.parent, {MODEL: graph.name})
    with BACKENDS.get("graph").open(artifact, RunOptions(1)) as session:
        return np.concatenate([value.ravel() for value in session.run(batch_of(signature)).values()])


def exactly(graph: Path, signature: Signature) -> Any:
    """By ONNX's own reference, in NumPy, which rounds after every operator: ONNX Runtime's CPU leaves that out where
    two follow each other, and has no bf16."""
    from onnx.reference import ReferenceEvaluator

    reference = ReferenceEvaluator(str(graph))
    feeds = pad(batch_of(signature), signature)
    with np.errstate(over="ignore", invalid="ignore"):
        return reference.run(None, {name: feeds[name] for name in reference.input_names})[0]


def error(ours: Any, theirs: Any) -> float:
    assert ours.shape == theirs.shape
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@pytest.mark.parametrize("precision", list(KINDS))
@pytest.mark.parametrize("name", ["classifier", "embedder", "relative bias", "masks"])
def test_products_are_in_half_precision_and_norms_are_not(
    name: str, precision: Precision, plain: Plain, tmp_path: Path
) -> None:
    graph, _ = plain(name)
    typed = tmp_path / "model.onnx"
    write_typed(graph, typed, precision)
    model = onnx.load(typed)
    assert stored_in(model) is precision
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True).graph
    kinds = {entry.name: entry.type.tensor_type.elem_type for entry in (*inferred.value_info, *inferred.output)}
    found: dict[str, set[int]] = {}
    for node in inferred.node:
        found.setdefault(node.op_type, set()).add(kinds[node.output[0]])
    assert found["MatMul"] == {KINDS[precision]}
    assert found["LayerNormalization"] == found["Softmax"] == {FLOAT}
    # Whoever feeds and reads it sees the same model.
    before = onnx.load(graph).graph
    for ours, theirs in ((model.graph.input, before.input), (model.graph.output, before.output)):
        assert [(one.name, one.type.tensor_type.elem_type) for one in ours] == [
            (one.name, one.type.tensor_type.elem_type) for one in theirs
        ]


@pytest.mark.parametrize("name", ["classifier", "embedder", "relative bias", "masks"])
def test_fp16_answers_like_fp32(name: str, plain: Plain, tmp_path: Path) -> None:
    """In ONNX Runtime, which refuses a graph whose types do not fit."""
    graph, signature = plain(name)
    write_typed(graph, tmp_path / "model.onnx", Precision.FP16)
    found = error(answer(tmp_path / "model.onnx", signature), answer(graph, signature))
    assert 0 < found <= TOLERANCES[Precision.FP16]


@pytest.mark.parametrize("precision", list(KINDS))
def test_rounded_after_every_operator_it_answers_like_fp32(precision: Precision, plain: Plain, tmp_path: Path) -> None:
    graph, signature = plain("classifier")
    write_typed(graph, tmp_path / "model.onnx", precision)
    ours = exactly(tmp_path / "model.onnx", signature)
    assert ours.dtype == np.float32
    assert 0 < error(ours, exactly(graph, signature)) <= TOLERANCES[precision]


def test_fp32_is_left_as_it_is(plain: Plain, tmp_path: Path) -> None:
    graph, signature = plain("classifier")
    write_typed(graph, tmp_path / "model.onnx", Precision.FP32)
    np.testing.assert_array_equal(answer(tmp_path / "model.onnx", signature), answer(graph, signature))


def test_values_beyond_fp16_stay_in_fp32(plain: Plain, tmp_path: Path) -> None:
    """What one product multiplies, the next divides again; in between fp16 would be infinite."""
    graph, signature = plain("classifier")
    model = onnx.load(graph)
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    first, second = (
        next(node for node in model.graph.node if node.name.endswith(f"layer.0/{part}/dense/MatMul"))
        for part in ("intermediate", "output")
    )
    for node, factor in ((first, 1e6), (second, 1e-6)):
        tensor = weights[node.input[1]]
        tensor.CopyFrom(
            onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) * np.float32(factor), tensor.name)
        )
    wide = tmp_path / "wide.onnx"
    onnx.save_model(model, wide)
    beyond = frozenset(one.tensor for one in overflows(wide, Calibration(batch_of(signature), signature)))
    assert first.output[0] in beyond
    for name, kept in (("guarded.onnx", beyond), ("unguarded.onnx", frozenset())):
        write_typed(wide, tmp_path / name, Precision.FP16, kept)
    expected = exactly(wide, signature)
    assert error(exactly(tmp_path / "guarded.onnx", signature), expected) <= TOLERANCES[Precision.FP16]
    assert not np.isfinite(exactly(tmp_path / "unguarded.onnx", signature)).all()


@pytest.fixture
def here(standin: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Be where TensorRT is of this version, with a cache that is empty at first."""
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))

    def move(version: str) -> None:
        monkeypatch.setattr(standin, "__version__", version)

    move("11.4.0")
    return move


def made(graph: Path, signature: Signature, folder: Path) -> Artifact:
    folder.mkdir()
    source = Source(signature, {MODEL: graph}, shapes=Shapes(Range(1, 2, 2), Range(8, 16, 16)), workspace_bytes=2**20)
    return BACKENDS.get("tensorrt").make(source, ENGINE, folder)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["classifier", "masks"])
def test_rows_of_any_length_and_number_are_answered(name: str, plain: Plain, tmp_path: Path) -> None:
    """Longer and shorter than was asked for, more than fit at once, masks or none: in TensorRT's place a stand-in."""
    from cuda.bindings.runtime import HELD

    graph, signature = plain(name)
    artifact = made(graph, signature, tmp_path / "variant")
    with BACKENDS.get("tensorrt").open(artifact, RunOptions()) as session:
        assert HELD
        found = session.run(batch_of(signature))
        ours = np.concatenate([value.ravel() for value in found.values()])
        with pytest.raises(StageError, match=r"the engine takes no inputs of \(1, 65\)"):
            session.run(Batch({name: np.ones(65, np.int32) for name in batch_of(signature).values}, np.array([65])))
    assert not HELD
    with pytest.raises(StageError, match="the engine is closed"):
        session.run(batch_of(signature))
    assert 0 < error(ours, answer(graph, signature)) <= TOLERANCES[Precision.FP16]


def test_another_version_builds_it_again_once(
    plain: Plain, here: Callable[[str], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graph, signature = plain("classifier")
    artifact = made(graph, signature, tmp_path / "variant")
    before = {file: file.read_bytes() for file in artifact.directory.iterdir()}
    answers = []
    for version, is_built in (("11.4.0", False), ("10.13", True), ("10.13", False), ("11.4.0", False)):
        here(version)
        caplog.clear()
        with BACKENDS.get("tensorrt").open(artifact, RunOptions()) as session:
            answers.append(session.run(batch_of(signature))["logits"])
        assert (f"for {this_machine().gpus[0].name} (9.0) with TensorRT 10.13" in caplog.text) is is_built
    assert all((one == answers[0]).all() for one in answers)
    kept = sorted(file.suffix for file in (tmp_path / "cache" / "tensorrt").iterdir())
    assert kept == [".plan", ".timings", ".timings"]
    assert {file: file.read_bytes() for file in artifact.directory.iterdir()} == before


@pytest.mark.usefixtures("here")
def test_an_engine_for_scripts(plain: Plain, tmp_path: Path) -> None:
    graph, signature = plain("classifier")
    plan = made(graph, signature, tmp_path / "variant").path()
    feeds = pad(batch_of(signature).take(np.array([0, 2])), signature)
    with load_engine(plan) as engine:
        logits = infer(engine, feeds)["logits"]
        assert logits.shape == (2, 3)
        with pytest.raises(StageError, match=r"the engine takes .*, and input_ids is not given"):
            infer(engine, {name: feed for name, feed in feeds.items() if name != "input_ids"})
        with pytest.raises(StageError, match="the engine takes no inputs of"):
            infer(engine, {name: feed.repeat(2, axis=0) for name, feed in feeds.items()})
    with pytest.raises(StageError, match=r"nowhere\.plan cannot be read"):
        load_engine(tmp_path / "nowhere.plan")
    plan.write_bytes(b"no engine")
    with pytest.raises(StageError, match=r"TensorRT cannot load model\.plan: Expecting value"):
        load_engine(plan)


@pytest.mark.slow
def test_the_contract_is_kept_beside_a_standin(tmp_path: Path) -> None:
    """All that test_backends.py asks of a backend, as far as it is ours to keep."""
    path = f"{STANDIN}:{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"TRITON_LIBCUDA_PATH": str(driver(tmp_path, "Stand-in")), "PYTHONPATH": path}
    words = ["pytest", "tests/contract/test_backends.py", "-q", "-k", "tensorrt", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=STANDIN.parents[1])
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) > 20


@pytest.mark.parametrize("name", ["classifier", "relative bias", "masks"])
def test_the_second_road_answers_from_the_typed_graph(
    name: str, plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT inside ONNX Runtime, made for a GPU and opened on the CPU: all of it but TensorRT."""
    from hasten.backends import onnxruntime_tensorrt as road
    from hasten.backends.tensorrt.planning import Place

    monkeypatch.setattr(road, "this_place", lambda: Place("a GPU", "9.0", "none"))
    monkeypatch.setattr(road, "check_placements", lambda *_: None)
    graph, signature = plain(name)
    source = Source(signature, {MODEL: graph}, shapes=Shapes(Range(1, 2, 2), Range(16, 16, 16)))
    artifact = road.BACKEND.make(source, Variant.parse("onnxruntime-tensorrt-fp16@cuda"), tmp_path)
    batch = batch_of(signature)
    with road.ProviderSession(artifact, RunOptions(1), device="cpu") as session:
        # Three rows, and engines for two.
        found = np.concatenate([value.ravel() for value in session.run(batch).values()])
    assert 0 < error(found, answer(graph, signature)) <= TOLERANCES[Precision.FP16]
    artifact.path().with_suffix(".json").write_bytes(b"{}")
    with pytest.raises(StageError, match="does not say what its engine is"):
        road.ProviderSession(artifact, RunOptions(1), device="cpu")
