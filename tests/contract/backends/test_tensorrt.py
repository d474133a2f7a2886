"""Test typed graphs of real exports, on the CPU where it can run them, and engines in a fake TensorRT."""

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

from hasten.backends import BACKENDS, MODEL, Artifact, Dialect, RunOptions, Source
from hasten.backends.tensorrt import infer, load_engine
from hasten.backends.tensorrt.typed_graph import weight_precision, write_typed
from hasten.core.errors import StageError
from hasten.core.plan import Range, Shapes
from hasten.core.system.hardware import this_machine
from hasten.core.tensors import Batch, Signature, pad
from hasten.core.variant import CUDA, Precision, Variant
from hasten.quantize.analysis.calibration import Calibration
from hasten.quantize.analysis.overflow import find_overflows
from support.fakes.cuda_driver import driver

onnx: Any = pytest.importorskip("onnx")

FLOAT, FLOAT16, BFLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16
KINDS = {Precision.FP16: FLOAT16, Precision.BF16: BFLOAT16}
# Norm of the error over norm of the output, of random models; a lost mask would give 0.6. Unlike GPUs, CPUs with fp16
# arithmetic also accumulate in fp16: 0.024 on a Neoverse-N1. CPUs that widen values first have smaller errors.
TOLERANCES = {Precision.FP16: 4e-2 if this_machine().has("fp16") else 2e-2, Precision.BF16: 1e-1}
FAKE = Path(__file__).parents[2] / "support" / "fakes" / "tensorrt"
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
    """Return the portable graph of a tiny model, exported once."""
    models = {
        "classifier": lambda: tiny_classifier("bert"),
        "embedder": tiny_embedder,
        "relative bias": lambda: tiny_classifier("mpnet"),
        "masks": lambda: tiny_model("distilbert", "ForMaskedLM"),
    }
    exported: dict[str, tuple[Path, Signature]] = {}

    def graph(name: str) -> tuple[Path, Signature]:
        if name not in exported:
            loaded = load_tiny(models[name]())
            exported[name] = make_graphs(loaded, tmp_path_factory.mktemp("graphs"))[Dialect.ONNX], loaded.signature
        return exported[name]

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


def answer_exactly(graph: Path, signature: Signature) -> Any:
    """Run ONNX's reference evaluator, which rounds after every operator.

    ONNX Runtime on the CPU does not round between consecutive operators, and has no bf16.
    """
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
def test_matmuls_are_in_half_precision_and_norms_in_fp32(
    name: str, precision: Precision, plain: Plain, tmp_path: Path
) -> None:
    graph, _ = plain(name)
    typed = tmp_path / "model.onnx"
    write_typed(graph, typed, precision)
    model = onnx.load(typed)
    assert weight_precision(model) is precision
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True).graph
    kinds = {entry.name: entry.type.tensor_type.elem_type for entry in (*inferred.value_info, *inferred.output)}
    types: dict[str, set[int]] = {}
    for node in inferred.node:
        types.setdefault(node.op_type, set()).add(kinds[node.output[0]])
    assert types["MatMul"] == {KINDS[precision]}
    assert types["LayerNormalization"] == types["Softmax"] == {FLOAT}
    # Inputs and outputs keep their names and types.
    before = onnx.load(graph).graph
    for ours, theirs in ((model.graph.input, before.input), (model.graph.output, before.output)):
        assert [(entry.name, entry.type.tensor_type.elem_type) for entry in ours] == [
            (entry.name, entry.type.tensor_type.elem_type) for entry in theirs
        ]


@pytest.mark.parametrize("name", ["classifier", "embedder", "relative bias", "masks"])
def test_fp16_graph_answers_like_fp32(name: str, plain: Plain, tmp_path: Path) -> None:
    """ONNX Runtime rejects a graph with inconsistent types."""
    graph, signature = plain(name)
    write_typed(graph, tmp_path / "model.onnx", Precision.FP16)
    relative_error = error(answer(tmp_path / "model.onnx", signature), answer(graph, signature))
    assert 0 < relative_error <= TOLERANCES[Precision.FP16]


@pytest.mark.parametrize("precision", list(KINDS))
def test_graph_rounded_after_every_operator_answers_like_fp32(
    precision: Precision, plain: Plain, tmp_path: Path
) -> None:
    graph, signature = plain("classifier")
    write_typed(graph, tmp_path / "model.onnx", precision)
    ours = answer_exactly(tmp_path / "model.onnx", signature)
    assert ours.dtype == np.float32
    assert 0 < error(ours, answer_exactly(graph, signature)) <= TOLERANCES[precision]


def test_fp32_graph_is_unchanged(plain: Plain, tmp_path: Path) -> None:
    graph, signature = plain("classifier")
    write_typed(graph, tmp_path / "model.onnx", Precision.FP32)
    np.testing.assert_array_equal(answer(tmp_path / "model.onnx", signature), answer(graph, signature))


def test_values_beyond_fp16_stay_in_fp32(plain: Plain, tmp_path: Path) -> None:
    """One matmul scales up and the next one down; in between, fp16 would be infinite."""
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
    overflows = frozenset(
        overflow.tensor for overflow in find_overflows(wide, Calibration(batch_of(signature), signature).feeds())
    )
    assert first.output[0] in overflows
    for name, tensors in (("guarded.onnx", overflows), ("unguarded.onnx", frozenset())):
        write_typed(wide, tmp_path / name, Precision.FP16, tensors)
    expected = answer_exactly(wide, signature)
    assert error(answer_exactly(tmp_path / "guarded.onnx", signature), expected) <= TOLERANCES[Precision.FP16]
    assert not np.isfinite(answer_exactly(tmp_path / "unguarded.onnx", signature)).all()


@pytest.fixture
def set_version(standin: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Set the version of the fake TensorRT; the cache is empty at first."""
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))

    def set_to(version: str) -> None:
        monkeypatch.setattr(standin, "__version__", version)

    set_to("11.4.0")
    return set_to


def make_engine(graph: Path, signature: Signature, folder: Path, backend: str = "tensorrt") -> Artifact:
    folder.mkdir()
    source = Source(signature, {MODEL: graph}, shapes=Shapes(Range(1, 2, 2), Range(8, 16, 16)), workspace_bytes=2**20)
    return BACKENDS.get(backend).make(source, Variant(backend, Precision.FP16, CUDA), folder)


@pytest.mark.usefixtures("set_version")
@pytest.mark.parametrize(
    ("name", "backend"), [("classifier", "tensorrt"), ("classifier", "tensorrt-rtx"), ("masks", "tensorrt")]
)
def test_engine_answers_batches_of_any_shape(name: str, backend: str, plain: Plain, tmp_path: Path) -> None:
    """Rows are shorter and longer than requested, more than the profiles allow, with and without masks."""
    from cuda.bindings.runtime import ALLOCATIONS

    graph, signature = plain(name)
    artifact = make_engine(graph, signature, tmp_path / "variant", backend)
    with BACKENDS.get(backend).open(artifact, RunOptions()) as session:
        assert ALLOCATIONS
        outputs = session.run(batch_of(signature))
        ours = np.concatenate([value.ravel() for value in outputs.values()])
        with pytest.raises(StageError, match=r"no optimization profile of the engine covers inputs of \(1, 65\)"):
            session.run(Batch({name: np.ones(65, np.int32) for name in batch_of(signature).values}, np.array([65])))
    assert not ALLOCATIONS
    with pytest.raises(StageError, match="the engine is closed"):
        session.run(batch_of(signature))
    assert 0 < error(ours, answer(graph, signature)) <= TOLERANCES[Precision.FP16]


def test_engine_is_rebuilt_once_for_another_version(
    plain: Plain, set_version: Callable[[str], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graph, signature = plain("classifier")
    artifact = make_engine(graph, signature, tmp_path / "variant")
    before = {file: file.read_bytes() for file in artifact.directory.iterdir()}
    answers = []
    for version, is_built in (("11.4.0", False), ("10.13", True), ("10.13", False), ("11.4.0", False)):
        set_version(version)
        caplog.clear()
        with BACKENDS.get("tensorrt").open(artifact, RunOptions()) as session:
            answers.append(session.run(batch_of(signature))["logits"])
        assert (f"for {this_machine().gpus[0].name} (9.0) with TensorRT 10.13" in caplog.text) is is_built
    assert all((logits == answers[0]).all() for logits in answers)
    cached = sorted(file.suffix for file in (tmp_path / "cache" / "tensorrt").iterdir())
    assert cached == [".plan", ".timings", ".timings"]
    assert {file: file.read_bytes() for file in artifact.directory.iterdir()} == before


@pytest.mark.usefixtures("set_version")
def test_engine_file_runs_in_scripts(plain: Plain, tmp_path: Path) -> None:
    graph, signature = plain("classifier")
    plan = make_engine(graph, signature, tmp_path / "variant").path()
    feeds = pad(batch_of(signature).take(np.array([0, 2])), signature)
    with load_engine(plan) as engine:
        logits = infer(engine, feeds)["logits"]
        assert logits.shape == (2, 3)
        with pytest.raises(StageError, match=r"the engine takes .*, and input_ids is missing"):
            infer(engine, {name: feed for name, feed in feeds.items() if name != "input_ids"})
        with pytest.raises(StageError, match="no optimization profile of the engine covers inputs of"):
            infer(engine, {name: feed.repeat(2, axis=0) for name, feed in feeds.items()})
    with pytest.raises(StageError, match=r"nowhere\.plan cannot be read"):
        load_engine(tmp_path / "nowhere.plan")
    plan.write_bytes(b"no engine")
    with pytest.raises(StageError, match=r"TensorRT cannot load model\.plan: Expecting value"):
        load_engine(plan)


@pytest.mark.slow
def test_contract_suite_passes_with_fake_tensorrt(tmp_path: Path) -> None:
    """Run test_backends.py for `tensorrt` and `tensorrt-rtx`: our side of the contract holds."""
    path = f"{FAKE}:{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"TRITON_LIBCUDA_PATH": str(driver(tmp_path, "Fake", major=12)), "PYTHONPATH": path}
    words = ["pytest", "tests/contract/backends/test_backends.py", "-q", "-k", "tensorrt", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=FAKE.parents[3])
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) > 40
