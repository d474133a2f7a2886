"""Every quantization method on a real architecture: precision, kernels and agreement with fp32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.backends import BACKENDS, Artifact, Dialect, RunOptions, Source
from hasten.core.errors import StageError
from hasten.core.system.hardware import this_machine
from hasten.core.tensors import Batch
from hasten.core.variant import Precision, Variant
from hasten.quantize.analysis.calibration import Calibration
from hasten.quantize.apply import make_graph
from hasten.quantize.methods.static import find_ranges
from hasten.quantize.recipe import Calibrator, Method, Recipe
from support.int8 import recipe_here

# The norm of the error relative to that of the outputs, for a random model: see test_backends.py.
ALLOWED = {Precision.INT8: 0.2, Precision.INT4: 0.6}
# ONNX Runtime's int8 matmul operators, by method.
KERNELS = {
    Method.DYNAMIC: {"DynamicQuantizeMatMul", "MatMulIntegerToFloat"},
    Method.STATIC: {"MatMulIntegerToFloat"},
    Method.BLOCKS: {"MatMulNBits"},
}
RECIPES = {
    "dynamic": recipe_here("onnxruntime-int8", Method.DYNAMIC),
    "dynamic attention": recipe_here("onnxruntime-int8", Method.DYNAMIC, attention=True),
    "static": recipe_here("onnxruntime-int8", Method.STATIC),
    "static attention": recipe_here("onnxruntime-int8", Method.STATIC, attention=True),
    "blocks 8": recipe_here("onnxruntime-int8", Method.BLOCKS),
    "blocks 4": recipe_here("onnxruntime-int4", Method.BLOCKS, bits=4, block_size=16),
    "nncf": recipe_here("openvino-int8", Method.NNCF),
    "nncf weights": recipe_here("openvino-int8+dynamic", Method.WEIGHTS),
}
OPENVINO_METHODS = (Method.NNCF, Method.WEIGHTS)


def rows(count: int, seed: int) -> Batch:
    return rows_of(np.random.default_rng(seed).integers(3, 40, count), seed)


def rows_of(lengths: np.ndarray, seed: int) -> Batch:
    random = np.random.default_rng(seed)
    values = {
        "input_ids": random.integers(5, 150, lengths.sum()),
        "token_type_ids": random.integers(0, 2, lengths.sum()),
    }
    return Batch({name: value.astype(np.int32) for name, value in values.items()}, lengths.astype(np.int32))


@pytest.fixture(scope="module")
def model(
    tiny_classifier: Any, load_tiny: Any, make_graphs: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, dict[Dialect, Path], Calibration]:
    loaded = load_tiny(tiny_classifier("bert"))
    return loaded, make_graphs(loaded, tmp_path_factory.mktemp("graphs")), Calibration(rows(24, 1), loaded.signature)


@pytest.fixture(scope="module")
def make(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Recipe, Dialect], Artifact]:
    def build(recipe: Recipe, dialect: Dialect) -> Artifact:
        loaded, graphs, calibration = model
        variant, folder = Variant.parse(recipe.variant), tmp_path_factory.mktemp("variants")
        backend = BACKENDS.get(variant.backend)
        if not (support := backend.probe(this_machine(), variant)).ok:
            pytest.skip(support.reason)
        if recipe.method is Method.STATIC:
            ranges = find_ranges(graphs[dialect], calibration, Calibrator.MINMAX, recipe)
            recipe = replace(recipe, ranges=ranges, calibrator=Calibrator.MINMAX)
        if recipe.method in OPENVINO_METHODS:
            pytest.importorskip("nncf")
        if recipe.method is Method.NNCF:
            recipe = replace(recipe, calibration=calibration.digest)
        file = folder / ("model.xml" if recipe.method in OPENVINO_METHODS else "model.onnx")
        make_graph(graphs[dialect], file, recipe, calibration, external_data=False)
        (folder / "variant").mkdir()
        return backend.make(Source(loaded.signature, {"model": file}), variant, folder / "variant")

    return build


@pytest.mark.parametrize("dialect", [Dialect.ORT, Dialect.ONNX])
@pytest.mark.parametrize("name", RECIPES)
def test_method_agrees_with_fp32_and_runs_in_its_precision(model: Any, make: Any, name: str, dialect: Dialect) -> None:
    loaded, graphs, _ = model
    recipe = RECIPES[name]
    if recipe.method in OPENVINO_METHODS and dialect is Dialect.ORT:
        pytest.skip("OpenVINO does not read ONNX Runtime's operators")
    artifact = make(recipe, dialect)
    backend = BACKENDS.get(artifact.variant.backend)
    # Other rows than those of the calibration.
    batch = rows(16, 2)
    plain = Artifact(
        Variant("graph", Precision.FP32), loaded.signature, graphs[Dialect.ONNX].parent, {"model": "model.onnx"}
    )
    with backend.open(artifact, RunOptions(1)) as session, BACKENDS.get("graph").open(plain, RunOptions(1)) as exact:
        assert session.spec.precision == artifact.variant.precision
        expected, actual = exact.run(batch)["logits"], session.run(batch)["logits"]
    assert np.linalg.norm(actual - expected) <= ALLOWED[artifact.variant.precision] * np.linalg.norm(expected)
    assert not np.array_equal(actual, expected)
    executed = {(execution.operator, execution.on) for execution in backend.placements(artifact)}
    if recipe.method in OPENVINO_METHODS:
        assert ("FullyConnected", "CPU int8") in executed
        assert ("FullyConnected", "CPU fp32") not in executed
    else:
        # The runtime replaced the QDQ operators of the file by its int8 kernels.
        assert KERNELS[recipe.method] & {operator for operator, _ in executed}
        if recipe.attention and dialect is Dialect.ORT:
            assert ("QAttention", "CPUExecutionProvider") in executed


@pytest.mark.parametrize(
    ("name", "dialect"),
    [("static attention", Dialect.ORT), ("nncf", Dialect.ONNX), ("nncf weights", Dialect.ONNX)],
)
def test_outputs_do_not_depend_on_the_batch(make: Any, name: str, dialect: Dialect) -> None:
    """Unlike with ONNX Runtime's dynamic int8, a row is rounded alike whatever the other rows of the batch."""
    artifact = make(RECIPES[name], dialect)
    batch = rows_of(np.arange(1, 41), seed=4)
    with BACKENDS.get(artifact.variant.backend).open(artifact, RunOptions(1)) as session:
        together = session.run(batch)["logits"]
        alone = np.concatenate([session.run(batch.take(np.array([row])))["logits"] for row in range(len(batch))])
    assert (np.linalg.norm(together - alone, axis=1) <= 0.05 * np.linalg.norm(alone, axis=1)).all()


def test_openvino_int8_rejects_a_float_graph(model: Any, tmp_path: Path) -> None:
    loaded, graphs, _ = model
    backend = BACKENDS.get("openvino")
    if not (support := backend.probe(this_machine())).ok:
        pytest.skip(support.reason)
    with pytest.raises(StageError, match="not quantized"):
        backend.make(
            Source(loaded.signature, {"model": graphs[Dialect.ONNX]}), Variant("openvino", Precision.INT8), tmp_path
        )


def test_variants_that_need_a_recipe_are_not_offered() -> None:
    """Variants that are offered automatically need neither data nor a recipe."""
    offered = {variant.name for backend in BACKENDS.all() for variant in backend.variants(this_machine())}
    assert not offered & {"onnxruntime-int4", "openvino-int8"}
    assert BACKENDS.get("openvino").requires == ("openvino",)


def test_openvino_quantizes_activations_at_run_time(tmp_path: Path) -> None:
    """The rounding of activations shows: weights alone give other outputs."""
    onnx, openvino = pytest.importorskip("onnx"), pytest.importorskip("openvino")
    pytest.importorskip("nncf")
    from hasten.backends.openvino import _compile

    recipe = RECIPES["nncf weights"]
    variant = Variant.parse(recipe.variant)
    if not (support := BACKENDS.get("openvino").probe(this_machine(), variant)).ok:
        pytest.skip(support.reason)
    random = np.random.default_rng(0)
    weight = onnx.numpy_helper.from_array(random.normal(size=(256, 256)).astype(np.float32), "weight")
    tensors = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["rows", 256]) for name in "xy"]
    node = onnx.helper.make_node("MatMul", ["x", "weight"], ["y"], name="matmul")
    graph = onnx.helper.make_graph([node], "test", tensors[:1], tensors[1:], [weight])
    onnx.save_model(onnx.helper.make_model(graph, ir_version=10), tmp_path / "model.onnx")
    make_graph(tmp_path / "model.onnx", tmp_path / "model.xml", recipe, None, external_data=False)
    options = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    in_float = openvino.Core().compile_model(tmp_path / "model.xml", "CPU", options)
    values = random.normal(size=(32, 256)).astype(np.float32)
    expected, actual = in_float([values])[0], _compile(tmp_path / "model.xml", variant, threads=1)([values])[0]
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    assert 1e-3 < error < 0.02
