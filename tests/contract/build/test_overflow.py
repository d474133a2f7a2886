"""Values beyond the range of fp16 stay in fp32; non-finite outputs are rejected with the operator's name."""

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
from hasten.core.system.hardware import this_machine
from hasten.core.tensors import Batch
from hasten.core.variant import Precision, Variant
from hasten.quantize.analysis.calibration import Calibration
from hasten.quantize.analysis.overflow import describe_overflows, find_overflows

FP32, FP16 = (Variant("openvino", precision) for precision in (Precision.FP32, Precision.FP16))
WIDE = "encoder.layer.1.intermediate.dense."
NARROW = "encoder.layer.1.output.dense.weight"
FIRST = "/model/bert/encoder/layer.1/intermediate/dense/MatMul"
# Activations of 1e1 become 1e7, far beyond fp16, and 1e1 again after the next matmul.
FACTOR = 1e6
# The relative error of fp16 in which overflowing operators stay in fp32: 3.2e-3 on x86-64 with AVX-512 FP16 (2026-11).
# Arm's CPUs also accumulate in fp16; there it has not been measured.
GUARDED = 2e-2 if this_machine().has("fp16") else 1e-2


@pytest.fixture(scope="module")
def fp16() -> None:
    """Skip tests on CPUs that do not compute in fp16."""
    support = BACKENDS.get("openvino").probe(this_machine(), FP16)
    if not support.ok:
        pytest.skip(support.reason)


def copy_with_weights(model: Path, folder: Path, change: Callable[[str, Any], Any]) -> Path:
    """Copy a model with changed weights."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    weights = {name: change(name, value) for name, value in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def wide_model(tiny_classifier: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with the same outputs: one matmul scales values up, the next scales them down."""

    def change(name: str, value: Any) -> Any:
        if WIDE in name:
            return value * FACTOR
        return value / FACTOR if name.endswith(NARROW) else value

    return copy_with_weights(tiny_classifier("bert"), tmp_path_factory.mktemp("wide") / "model", change)


@pytest.fixture(scope="module")
def wide(wide_model: Path, load_tiny: Any, make_graphs: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    loaded = load_tiny(wide_model)
    return loaded, make_graphs(loaded, tmp_path_factory.mktemp("graphs"))[Dialect.ONNX]


def rows_for(loaded: Any) -> Batch:
    lengths = np.array([5, 30, 1, 17, 64], np.int32)
    ids = np.random.default_rng(3).integers(5, 100, int(lengths.sum())).astype(np.int32)
    return Batch({spec.name: np.zeros_like(ids) for spec in loaded.signature.inputs} | {"input_ids": ids}, lengths)


def build_and_run(variant: Variant, source: Source, folder: Path) -> tuple[Artifact, np.ndarray]:
    folder.mkdir()
    artifact = BACKENDS.get(variant.backend).make(source, variant, folder)
    with BACKENDS.get(variant.backend).open(artifact, RunOptions(1)) as session:
        assert session.spec.precision == variant.precision
        return artifact, session.run(rows_for(source))["logits"]


def test_overflows_are_found(wide: Any) -> None:
    loaded, graph = wide
    overflows = find_overflows(graph, Calibration(rows_for(loaded), loaded.signature).feeds())
    assert {each.operator.removeprefix("/model/bert/encoder/layer.1/") for each in overflows} == {
        "intermediate/dense/MatMul",
        "intermediate/dense/Add",
        "intermediate/intermediate_act_fn/Div",
        "intermediate/intermediate_act_fn/Mul",
        "intermediate/intermediate_act_fn/Mul_1",
    }
    assert max(each.largest for each in overflows) > 1e6
    assert describe_overflows(overflows).startswith("5 operators kept in fp32: values reach ")
    assert FIRST in describe_overflows(overflows)


def test_ordinary_model_has_no_overflows(
    tiny_classifier: Any, load_tiny: Any, make_graphs: Any, tmp_path: Path
) -> None:
    """The mask holds the lowest fp32 number, which is a constant."""
    loaded = load_tiny(tiny_classifier("bert"))
    graph = make_graphs(loaded, tmp_path)[Dialect.ONNX]
    assert find_overflows(graph, Calibration(rows_for(loaded), loaded.signature).feeds()) == ()


@pytest.mark.usefixtures("fp16")
def test_guarded_openvino_variant_agrees_with_fp32(wide: Any, tmp_path: Path) -> None:
    loaded, graph = wide
    plain = Source(loaded.signature, {MODEL: graph})
    overflows = find_overflows(graph, Calibration(rows_for(loaded), loaded.signature).feeds())
    guarded = Source(
        loaded.signature, {MODEL: graph}, fp16_overflow_tensors=frozenset(each.tensor for each in overflows)
    )
    _, expected = build_and_run(FP32, plain, tmp_path / "fp32")
    artifact, overflown = build_and_run(FP16, plain, tmp_path / "plain")
    assert not np.isfinite(overflown).all()
    guarded_artifact, guarded_logits = build_and_run(FP16, guarded, tmp_path / "guarded")
    assert np.abs(guarded_logits - expected).max() < GUARDED * np.abs(expected).max()
    # Only those: most matmuls still run in fp16.
    executed = {(run.operator, run.on): run.count for run in BACKENDS.get("openvino").placements(guarded_artifact)}  # type: ignore[attr-defined]
    assert executed["FullyConnected", "CPU fp32"] == 2
    assert executed["FullyConnected", "CPU fp16"] > 6
    backend = BACKENDS.get("openvino")
    assert isinstance(backend, FindsNonFinite)
    assert backend.first_non_finite(artifact, rows_for(loaded)) == FIRST
    assert backend.first_non_finite(guarded_artifact, rows_for(loaded)) is None


def test_guarded_fp16_graph_agrees_with_fp32(wide: Any, make_graphs: Any, tmp_path: Path) -> None:
    """The fused graph for GPUs is run on the CPU, with casts."""
    from hasten.backends.onnxruntime import stored_precision
    from hasten.backends.onnxruntime.cuda import CudaSession
    from hasten.quantize.methods.fp16 import convert_to_fp16

    loaded, _ = wide
    graph = make_graphs(loaded, tmp_path)[Dialect.ORT_CUDA]
    rows = rows_for(loaded)
    overflows = find_overflows(graph, Calibration(rows, loaded.signature).feeds())
    assert max(each.largest for each in overflows) > 1e6

    def run(file: Path, precision: Precision) -> np.ndarray:
        variant = Variant("onnxruntime", precision, "cuda")
        artifact = Artifact(variant, loaded.signature, file.parent, {MODEL: file.name})
        with CudaSession(artifact, RunOptions(1), device="cpu") as session:
            return session.run(rows)["logits"]

    expected = run(graph, Precision.FP32)
    converted = {}
    for name, tensors in {"unguarded": frozenset(), "guarded": frozenset(each.tensor for each in overflows)}.items():
        (tmp_path / name).mkdir()
        converted[name] = convert_to_fp16({MODEL: graph}, tmp_path / name, {MODEL: tensors})[MODEL]
    unguarded, guarded = converted["unguarded"], converted["guarded"]
    assert stored_precision(guarded) is Precision.FP16
    assert not np.abs(run(unguarded, Precision.FP16) - expected).max() < GUARDED * np.abs(expected).max()
    assert np.abs(run(guarded, Precision.FP16) - expected).max() < GUARDED * np.abs(expected).max()


@pytest.mark.usefixtures("fp16")
def test_weight_out_of_range_stays_in_fp32(wide: Any, tmp_path: Path) -> None:
    """Clipping the weight to the largest fp16 number would change it without any infinite value."""
    loaded, graph = wide
    weight = next(each for each in find_overflows(graph, Calibration(rows_for(loaded), loaded.signature).feeds()))
    assert weight.operator == FIRST
    assert "output" not in weight.tensor
    source = Source(loaded.signature, {MODEL: graph}, fp16_overflow_tensors=frozenset({weight.tensor}))
    artifact, _ = build_and_run(FP16, source, tmp_path / "weight")
    executed = {(run.operator, run.on): run.count for run in BACKENDS.get("openvino").placements(artifact)}  # type: ignore[attr-defined]
    assert executed["FullyConnected", "CPU fp32"] == 1


@pytest.mark.usefixtures("fp16")
def test_masked_rows_are_unaffected_by_padding_in_fp16(
    tiny_classifier: Any, load_tiny: Any, make_graphs: Any, tmp_path: Path
) -> None:
    """The mask's lowest fp32 number becomes fp16's lowest: padding must still have no influence."""
    loaded = load_tiny(tiny_classifier("bert"))
    source = Source(loaded.signature, {MODEL: make_graphs(loaded, tmp_path)[Dialect.ONNX]})
    artifact, together = build_and_run(FP16, source, tmp_path / "fp16")
    rows = rows_for(loaded)
    with BACKENDS.get("openvino").open(artifact, RunOptions(1)) as session:
        alone = [session.run(rows.take(np.array([row])))["logits"] for row in range(len(rows))]
    assert np.abs(together - np.concatenate(alone)).max() < 1e-2 * np.abs(together).max()


@pytest.mark.usefixtures("fp16")
def test_build_reports_the_operators_kept_in_fp32(wide_model: Path, quick_build: Any) -> None:
    bundle = quick_build(wide_model, variants=["openvino-fp16"])
    guard = next(done for done in bundle.report.passes if done.name == "guard")
    assert guard.variants == ("openvino-fp16",)
    assert guard.notes[0].startswith("5 operators kept in fp32: values reach ")
    stage = next(stage for stage in bundle.report.stages if stage.name == "search")
    assert guard.notes[0] in stage.notes


@pytest.mark.usefixtures("fp16")
def test_overflowing_variant_is_rejected_with_the_operator(
    wide_model: Path, quick_build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard is disabled, as if later rows differed from those it measures."""
    monkeypatch.setattr("hasten.builder.search.variant_builder.find_overflows", lambda *_: ())
    with pytest.raises(AccuracyError) as caught:
        quick_build(wide_model, variants=["openvino-fp16"])
    assert [each.reason for each in caught.value.candidates] == [
        f"some outputs are not finite numbers: first at {FIRST}"
    ]


def test_model_with_nan_outputs_is_rejected_with_the_operator(
    tiny_classifier: Any, texts_file: Path, no_leftovers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = copy_with_weights(
        tiny_classifier("bert"),
        tmp_path / "nan",
        lambda name, value: value * np.nan if name.endswith("layer.1.attention.output.dense.bias") else value,
    )
    assert main(["build", str(model), "-o", str(no_leftovers), "--data", str(texts_file), "-q"]) == 5
    assert "not finite: first at /model/bert/encoder/layer.1/attention/output/dense/Add" in capsys.readouterr().err


@pytest.mark.parametrize("variant", ["onnxruntime-fp32", "onnxruntime-int8", "openvino-fp32"])
def test_every_runtime_names_the_first_non_finite_operator(
    variant: str, wide: Any, make_graphs: Any, tmp_path: Path
) -> None:
    """An infinite weight shows first in the operator that reads it."""
    import onnx

    from hasten.quantize.methods.dynamic import quantize_dynamic
    from hasten.quantize.recipe import Method, Recipe

    loaded, _ = wide
    parsed = Variant.parse(variant)
    graph = make_graphs(loaded, tmp_path)[BACKENDS.get(parsed.backend).dialect]
    model = onnx.load(graph)
    bias = next(tensor for tensor in model.graph.initializer if tensor.name.endswith("intermediate.dense.bias"))
    bias.CopyFrom(onnx.numpy_helper.from_array(np.full(tuple(bias.dims), np.inf, np.float32), bias.name))
    onnx.save(model, graph)
    if parsed.precision is Precision.INT8:
        recipe = Recipe(variant=variant, method=Method.DYNAMIC, target="avx512_vnni")
        quantize_dynamic(graph, graph, recipe, external_data=False)
    folder = tmp_path / variant
    folder.mkdir()
    backend = BACKENDS.get(parsed.backend)
    artifact = backend.make(Source(loaded.signature, {MODEL: graph}), parsed, folder)
    assert isinstance(backend, FindsNonFinite)
    nodes = onnx.load(graph).graph.node
    # Other layers read the same zeros through Identity nodes, which OpenVINO removes.
    reader = next(node for node in nodes if bias.name in node.input and node.op_type != "Identity")
    assert backend.first_non_finite(artifact, rows_for(loaded)) == reader.name
