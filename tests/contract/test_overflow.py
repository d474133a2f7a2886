"""fp16 with values it cannot hold, and numbers that are none: kept in fp32, or refused by the operator's name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.backends import BACKENDS, MODEL, Artifact, Dialect, FindsNonFinite, RunOptions, Source
from hasten.cli import main
from hasten.core.errors import AccuracyError
from hasten.core.hardware import this_machine
from hasten.core.tensors import Batch
from hasten.core.variant import Precision, Variant
from hasten.quantize.calibration import Calibration
from hasten.quantize.overflow import describe, overflows

FP32, FP16 = (Variant("openvino", precision) for precision in (Precision.FP32, Precision.FP16))
WIDE = "encoder.layer.1.intermediate.dense."
NARROW = "encoder.layer.1.output.dense.weight"
FIRST = "/model/bert/encoder/layer.1/intermediate/dense/MatMul"
# Products of 1e1 become 1e7, far beyond fp16, and the next ones 1e1 again.
FACTOR = 1e6


@pytest.fixture(scope="module")
def fp16() -> None:
    """For what needs a processor that computes in it."""
    support = BACKENDS.get("openvino").probe(this_machine(), FP16)
    if not support.ok:
        pytest.skip(support.reason)


def changed(model: Path, folder: Path, change: Callable[[str, Any], Any]) -> Path:
    """A copy of a model with other weights."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    weights = {name: change(name, value) for name, value in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def wide_model(tiny_classifier: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It answers as before: what one product multiplies, the next divides again."""

    def change(name: str, value: Any) -> Any:
        if WIDE in name:
            return value * FACTOR
        return value / FACTOR if name.endswith(NARROW) else value

    return changed(tiny_classifier("bert"), tmp_path_factory.mktemp("wide") / "model", change)


@pytest.fixture(scope="module")
def wide(wide_model: Path, load_tiny: Any, make_graphs: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    loaded = load_tiny(wide_model)
    return loaded, make_graphs(loaded, tmp_path_factory.mktemp("graphs"))[Dialect.ONNX]


def rows_for(loaded: Any) -> Batch:
    lengths = np.array([5, 30, 1, 17, 64], np.int32)
    ids = np.random.default_rng(3).integers(5, 100, int(lengths.sum())).astype(np.int32)
    return Batch({spec.name: np.zeros_like(ids) for spec in loaded.signature.inputs} | {"input_ids": ids}, lengths)


def answers(variant: Variant, source: Source, folder: Path) -> tuple[Artifact, np.ndarray]:
    folder.mkdir()
    artifact = BACKENDS.get(variant.backend).make(source, variant, folder)
    with BACKENDS.get(variant.backend).open(artifact, RunOptions(1)) as session:
        assert session.spec.precision == variant.precision
        return artifact, session.run(rows_for(source))["logits"]


def test_what_leaves_the_range_is_found(wide: Any) -> None:
    loaded, graph = wide
    found = overflows(graph, Calibration(rows_for(loaded), loaded.signature))
    assert {one.operator.removeprefix("/model/bert/encoder/layer.1/") for one in found} == {
        "intermediate/dense/MatMul",
        "intermediate/dense/Add",
        "intermediate/intermediate_act_fn/Div",
        "intermediate/intermediate_act_fn/Mul",
        "intermediate/intermediate_act_fn/Mul_1",
    }
    assert max(one.largest for one in found) > 1e6
    assert describe(found).startswith("5 operators kept in fp32: values reach ")
    assert FIRST in describe(found)


def test_nothing_is_found_in_an_ordinary_model(
    tiny_classifier: Any, load_tiny: Any, make_graphs: Any, tmp_path: Path
) -> None:
    """Its mask holds the lowest number of fp32, which is not computed."""
    loaded = load_tiny(tiny_classifier("bert"))
    graph = make_graphs(loaded, tmp_path)[Dialect.ONNX]
    assert overflows(graph, Calibration(rows_for(loaded), loaded.signature)) == ()


@pytest.mark.usefixtures("fp16")
def test_kept_in_fp32_it_answers_right(wide: Any, tmp_path: Path) -> None:
    loaded, graph = wide
    plain = Source(loaded.signature, {MODEL: graph})
    found = overflows(graph, Calibration(rows_for(loaded), loaded.signature))
    guarded = Source(loaded.signature, {MODEL: graph}, beyond_fp16=frozenset(one.tensor for one in found))
    _, expected = answers(FP32, plain, tmp_path / "fp32")
    artifact, overflown = answers(FP16, plain, tmp_path / "plain")
    assert not np.isfinite(overflown).all()
    kept, right = answers(FP16, guarded, tmp_path / "guarded")
    assert np.abs(right - expected).max() < 2e-2 * np.abs(expected).max()
    # And no more than those: most products still run in fp16.
    ran = {(run.operator, run.on): run.count for run in BACKENDS.get("openvino").executions(kept)}  # type: ignore[attr-defined]
    assert ran["FullyConnected", "CPU fp32"] == 2
    assert ran["FullyConnected", "CPU fp16"] > 6
    backend = BACKENDS.get("openvino")
    assert isinstance(backend, FindsNonFinite)
    assert backend.first_non_finite(artifact, rows_for(loaded)) == FIRST
    assert backend.first_non_finite(kept, rows_for(loaded)) is None


def test_a_graph_made_in_fp16_keeps_them_too(wide: Any, make_graphs: Any, tmp_path: Path) -> None:
    """Fused, as GPUs run it; here through the CPU's casts."""
    from hasten.backends.onnxruntime import stored_precision
    from hasten.backends.onnxruntime.cuda import CudaSession
    from hasten.quantize.half import halve

    loaded, _ = wide
    graph = make_graphs(loaded, tmp_path)[Dialect.ORT_CUDA]
    rows = rows_for(loaded)
    found = overflows(graph, Calibration(rows, loaded.signature))
    assert max(one.largest for one in found) > 1e6

    def answer(file: Path, precision: Precision) -> np.ndarray:
        variant = Variant("onnxruntime", precision, "cuda")
        artifact = Artifact(variant, loaded.signature, file.parent, {MODEL: file.name})
        with CudaSession(artifact, RunOptions(1), device="cpu") as session:
            return session.run(rows)["logits"]

    expected = answer(graph, Precision.FP32)
    halved, kept = tmp_path / "halved.onnx", tmp_path / "kept.onnx"
    halve(graph, halved, frozenset(), external_data=False)
    halve(graph, kept, frozenset(one.tensor for one in found), external_data=False)
    assert stored_precision(kept) is Precision.FP16
    assert not np.abs(answer(halved, Precision.FP16) - expected).max() < 2e-2 * np.abs(expected).max()
    assert np.abs(answer(kept, Precision.FP16) - expected).max() < 2e-2 * np.abs(expected).max()


@pytest.mark.usefixtures("fp16")
def test_a_weight_out_of_range_alone_is_kept(wide: Any, tmp_path: Path) -> None:
    """Clipped to fp16's largest it would be another weight, and nothing would be infinite."""
    loaded, graph = wide
    weight = next(one for one in overflows(graph, Calibration(rows_for(loaded), loaded.signature)))
    assert weight.operator == FIRST
    assert "output" not in weight.tensor
    source = Source(loaded.signature, {MODEL: graph}, beyond_fp16=frozenset({weight.tensor}))
    artifact, _ = answers(FP16, source, tmp_path / "weight")
    ran = {(run.operator, run.on): run.count for run in BACKENDS.get("openvino").executions(artifact)}  # type: ignore[attr-defined]
    assert ran["FullyConnected", "CPU fp32"] == 1


@pytest.mark.usefixtures("fp16")
def test_a_masked_row_answers_right_in_fp16(
    tiny_classifier: Any, load_tiny: Any, make_graphs: Any, tmp_path: Path
) -> None:
    """The mask's lowest number of fp32 becomes fp16's, beside scores: padding must still count for nothing."""
    loaded = load_tiny(tiny_classifier("bert"))
    source = Source(loaded.signature, {MODEL: make_graphs(loaded, tmp_path)[Dialect.ONNX]})
    artifact, together = answers(FP16, source, tmp_path / "fp16")
    rows = rows_for(loaded)
    with BACKENDS.get("openvino").open(artifact, RunOptions(1)) as session:
        alone = [session.run(rows.take(np.array([row])))["logits"] for row in range(len(rows))]
    assert np.abs(together - np.concatenate(alone)).max() < 1e-2 * np.abs(together).max()


@pytest.mark.usefixtures("fp16")
def test_a_build_says_what_it_kept(wide_model: Path, quick_build: Any) -> None:
    bundle = quick_build(wide_model, variants=["openvino-fp16"])
    guard = next(done for done in bundle.report.passes if done.name == "guard")
    assert guard.variants == ("openvino-fp16",)
    assert guard.notes[0].startswith("5 operators kept in fp32: values reach ")
    stage = next(stage for stage in bundle.report.stages if stage.name == "search")
    assert guard.notes[0] in stage.notes


@pytest.mark.usefixtures("fp16")
def test_a_variant_that_overflows_is_refused_by_name(
    wide_model: Path, quick_build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the guard, which measures on the same rows: as where rows to come are unlike them."""
    monkeypatch.setattr("hasten.builder.attempt.overflows", lambda *_: ())
    with pytest.raises(AccuracyError) as caught:
        quick_build(wide_model, variants=["openvino-fp16"])
    assert [one.reason for one in caught.value.candidates] == [f"some outputs are not finite numbers: first at {FIRST}"]


def test_a_model_that_answers_with_nan_is_refused_by_name(
    tiny_classifier: Any, texts_file: Path, no_leftovers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = changed(
        tiny_classifier("bert"),
        tmp_path / "nan",
        lambda name, value: value * np.nan if name.endswith("layer.1.attention.output.dense.bias") else value,
    )
    assert main(["build", str(model), "-o", str(no_leftovers), "--data", str(texts_file), "-q"]) == 5
    assert "not finite: first at /model/bert/encoder/layer.1/attention/output/dense/Add" in capsys.readouterr().err


@pytest.mark.parametrize("variant", ["onnxruntime-fp32", "onnxruntime-int8", "openvino-fp32"])
def test_every_runtime_names_the_operator(variant: str, wide: Any, make_graphs: Any, tmp_path: Path) -> None:
    """A weight that is infinite shows first in what reads it."""
    import onnx

    from hasten.quantize.dynamic import quantize_dynamic
    from hasten.quantize.recipe import Method, Recipe

    loaded, _ = wide
    wanted = Variant.parse(variant)
    graph = make_graphs(loaded, tmp_path)[BACKENDS.get(wanted.backend).dialect]
    model = onnx.load(graph)
    bias = next(tensor for tensor in model.graph.initializer if tensor.name.endswith("intermediate.dense.bias"))
    bias.CopyFrom(onnx.numpy_helper.from_array(np.full(tuple(bias.dims), np.inf, np.float32), bias.name))
    onnx.save(model, graph)
    if wanted.precision is Precision.INT8:
        recipe = Recipe(variant=variant, method=Method.DYNAMIC, target="avx512_vnni")
        quantize_dynamic(graph, graph, recipe, external_data=False)
    folder = tmp_path / variant
    folder.mkdir()
    backend = BACKENDS.get(wanted.backend)
    artifact = backend.make(Source(loaded.signature, {MODEL: graph}), wanted, folder)
    assert isinstance(backend, FindsNonFinite)
    nodes = onnx.load(graph).graph.node
    # Other layers read the same zeros, through nodes that only hand them on, which OpenVINO leaves out.
    reader = next(node for node in nodes if bias.name in node.input and node.op_type != "Identity")
    assert backend.first_non_finite(artifact, rows_for(loaded)) == reader.name
