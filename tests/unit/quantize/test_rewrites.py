"""Rewrites before quantization, run on hand-made graphs: outputs in float stay exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from hasten.core.errors import PlanError, StageError  # noqa: E402
from hasten.core.tensors import BATCH, SEQUENCE, Batch, DType, Signature, TensorSpec  # noqa: E402
from hasten.quantize.analysis.calibration import Calibration  # noqa: E402
from hasten.quantize.analysis.matmuls import find_embedding_lookups, find_feed_forward_pairs, find_matmuls  # noqa: E402
from hasten.quantize.analysis.ranges import input_maxima  # noqa: E402
from hasten.quantize.recipe import Method, Recipe  # noqa: E402
from hasten.quantize.rewrites.apply_rewrites import rewrite  # noqa: E402
from hasten.quantize.rewrites.gelu import approximate_gelu  # noqa: E402
from hasten.quantize.rewrites.smooth import smooth, smoothing_exponents  # noqa: E402
from hasten.quantize.rewrites.smoothing_search import (  # noqa: E402
    activation_powers,
    relative_error,
    search_smoothing,
    weight_powers,
)
from hasten.quantize.rewrites.split import OUTLIER_CHANNELS, find_splits, float_nodes, split  # noqa: E402
from support.models.small_graphs import FUSED, WIDE, WIDTH, WORDS, Graph, gated, run  # noqa: E402


def portable(graph: Graph) -> str:
    """Return a feed-forward layer with its residual, the first bias on the left as exporters put it."""
    first = graph.add("Add", graph.weight(WIDE), graph.matmul(graph.hidden, WIDTH, WIDE, "first"))
    second = graph.matmul(graph.erf_gelu(first), WIDE, WIDTH, "second")
    return graph.add("Add", graph.add("Add", second, graph.weight(WIDTH)), graph.hidden)


def fused(graph: Graph) -> str:
    first = graph.matmul(graph.hidden, WIDTH, WIDE, "first")
    gelu = graph.add("BiasGelu", first, graph.weight(WIDE), domain=FUSED)
    norm = [graph.weight(WIDTH), graph.weight(WIDTH), graph.weight(WIDTH)]
    second = graph.matmul(gelu, WIDE, WIDTH, "second")
    return graph.add("SkipLayerNormalization", second, graph.hidden, *norm, domain=FUSED)


def gemms(graph: Graph) -> str:
    """Return Gemms as in a classification head: two axes, transposed weights, biases inside."""
    first_token = graph.add("Gather", graph.hidden, graph.constant(np.int64(0)), axis=1)
    first = graph.add("Gemm", first_token, graph.weight(WIDE, WIDTH), graph.weight(WIDE), name="first", transB=1)
    tanh = graph.add("Tanh", first)
    return graph.add("Gemm", tanh, graph.weight(5, WIDE), graph.weight(5), name="second", transB=1)


def relu(graph: Graph) -> str:
    first = graph.add("Mul", graph.matmul(graph.hidden, WIDTH, WIDE, "first"), graph.weight(1, 1, WIDE))
    return graph.matmul(graph.add("Relu", first), WIDE, WIDTH, "second")


LAYERS = (portable, fused, gemms, relu)


def norm_between(graph: Graph) -> str:
    first = graph.matmul(graph.hidden, WIDTH, WIDTH, "first")
    return graph.matmul(graph.norm(first), WIDTH, WIDTH, "second")


def read_elsewhere(graph: Graph) -> str:
    first = graph.add("Relu", graph.matmul(graph.hidden, WIDTH, WIDTH, "first"))
    return graph.add("Add", graph.matmul(first, WIDTH, WIDTH, "second"), first)


def constant_by_token(graph: Graph) -> str:
    first = graph.add("Add", graph.matmul(graph.hidden, WIDTH, WIDE, "first"), graph.weight(6, WIDE))
    return graph.matmul(first, WIDE, WIDTH, "second")


def copy(model: Any) -> Any:
    other = onnx.ModelProto()
    other.CopyFrom(model)
    return other


def node(model: Any, name: str) -> Any:
    return next(node for node in model.graph.node if node.name == name)


def constant(model: Any, name: str) -> np.ndarray:
    return numpy_helper.to_array(next(tensor for tensor in model.graph.initializer if tensor.name == name))


@pytest.fixture
def calibration() -> Calibration:
    lengths = np.array([3, 9, 1, 5], np.int32)
    ids = np.random.default_rng(8).integers(0, WORDS, int(lengths.sum())).astype(np.int32)
    signature = Signature((TensorSpec("input_ids", DType.INT64, (BATCH, SEQUENCE)),), (), max_length=16)
    return Calibration(Batch({"input_ids": ids}, lengths), signature)


@pytest.mark.parametrize("layer", LAYERS)
def test_feed_forward_pairs_are_found_by_structure(layer: Any) -> None:
    graph = Graph()
    model = graph.model(layer(graph))
    matmuls = find_matmuls(model)
    assert [matmul.name for matmul in matmuls] == ["first", "second"]
    assert (matmuls[0].inputs, matmuls[0].outputs) == (WIDTH, WIDE)
    (pair,) = find_feed_forward_pairs(model, matmuls)
    assert (pair.first, pair.second) == tuple(matmuls)


@pytest.mark.parametrize("layer", [gated, norm_between, read_elsewhere, constant_by_token])
def test_other_structures_are_not_feed_forward_pairs(layer: Any) -> None:
    graph = Graph()
    model = graph.model(layer(graph))
    matmuls = find_matmuls(model)
    assert len(matmuls) >= 2
    assert find_feed_forward_pairs(model, matmuls) == []


def test_layer_with_an_intermediate_output_is_not_a_pair() -> None:
    graph = Graph()
    middle = graph.add("Relu", graph.matmul(graph.hidden, WIDTH, WIDE, "first"))
    model = graph.model(graph.matmul(middle, WIDE, WIDTH, "second"), middle)
    assert find_feed_forward_pairs(model, find_matmuls(model)) == []


def test_middle_of_three_matmuls_belongs_to_the_first_pair() -> None:
    graph = Graph()
    first = graph.add("Relu", graph.matmul(graph.hidden, WIDTH, WIDE, "one"))
    second = graph.add("Relu", graph.matmul(first, WIDE, WIDE, "two"))
    model = graph.model(graph.matmul(second, WIDE, WIDTH, "three"))
    assert [pair.second.name for pair in find_feed_forward_pairs(model, find_matmuls(model))] == ["two"]


def test_matmuls_without_a_unique_name_are_ignored() -> None:
    graph = Graph()
    hidden = graph.matmul(graph.hidden, WIDTH, WIDTH, "")
    for _ in range(2):
        hidden = graph.matmul(hidden, WIDTH, WIDTH, "twice")
    model = graph.model(graph.matmul(hidden, WIDTH, WIDTH, "once"))
    assert [matmul.name for matmul in find_matmuls(model)] == ["once"]
    assert find_embedding_lookups(model) == ["words"]


def test_aliases_of_a_weight_are_resolved() -> None:
    graph = Graph()
    weight = graph.weight(WIDTH, WIDTH)
    hidden = graph.add("MatMul", graph.hidden, weight, name="one")
    model = graph.model(graph.add("MatMul", hidden, graph.add("Identity", weight), name="two"))
    assert {matmul.weight for matmul in find_matmuls(model)} == {weight}


@pytest.mark.parametrize("channels", [[0], [47, 3, 20], list(range(0, 48, 3))])
@pytest.mark.parametrize("layer", LAYERS)
def test_split_is_exact(layer: Any, channels: list[int]) -> None:
    graph = Graph()
    model = graph.model(layer(graph))
    before = run(model)
    split(model, {"second": channels})
    # Additions are in another order: up to 1e-6 on x86-64 with AVX-512 (2026-11), for values up to 7.
    np.testing.assert_allclose(run(model), before, rtol=0, atol=4e-6)
    sizes = {name: constant(model, node(model, name).input[1]).size for name in ("first", "second")}
    side = {name: constant(model, node(model, f"second/outliers/{name}").input[1]).size for name in sizes}
    assert sizes["first"] == WIDTH * (WIDE - len(channels))
    assert side["first"] == WIDTH * len(channels)
    assert side["second"] * (WIDE - len(channels)) == sizes["second"] * len(channels)


def test_ordinary_branch_lacks_only_the_outliers() -> None:
    graph = Graph()
    model = graph.model(relu(graph))
    without = copy(model)
    weight = next(tensor for tensor in without.graph.initializer if tensor.name == node(without, "second").input[1])
    values = numpy_helper.to_array(weight).copy()
    values[[2, 30]] = 0
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    split(model, {"second": [2, 30]})
    ordinary = node(model, "second").output[0]
    model.graph.output.append(helper.make_tensor_value_info(ordinary, TensorProto.FLOAT, None))
    np.testing.assert_allclose(run(model, ordinary), run(without), rtol=0, atol=1e-6)


@pytest.mark.parametrize("channels", [[], [48], [-1], list(range(48))])
def test_split_of_unknown_channels_is_rejected(channels: list[int]) -> None:
    graph = Graph()
    model = graph.model(relu(graph))
    with pytest.raises(PlanError, match="channels that 'second' does not have: it has 48"):
        split(model, {"second": channels})


def test_recipe_for_another_graph_is_rejected() -> None:
    graph = Graph()
    model = graph.model(relu(graph))
    with pytest.raises(PlanError, match="splits 'third'"):
        split(model, {"third": [0]})
    with pytest.raises(PlanError, match="smooths 'third'"):
        smooth(model, {"third": [0]})
    with pytest.raises(PlanError, match="smooths 2 channels of 'second', which has 48"):
        smooth(model, {"second": [0, 1]})


def test_splits_are_found_only_for_outliers() -> None:
    flat = np.ones(512, np.float32)
    peaked = flat.copy()
    peaked[[7, 500]] = 20
    splits = find_splits({"flat": flat, "peaked": peaked, "narrow": peaked[:64]}, channels=16)
    assert list(splits) == ["peaked"]
    assert len(splits["peaked"]) == 16
    assert {7, 500} < set(splits["peaked"])


@pytest.mark.parametrize("layer", [*LAYERS, gated, norm_between])
def test_smoothing_is_exact_to_the_last_bit(layer: Any) -> None:
    graph = Graph()
    model = graph.model(layer(graph))
    before, random = run(model), np.random.default_rng(9)
    exponents = {p.name: random.integers(-6, 7, p.inputs).tolist() for p in find_matmuls(model)}
    smooth(model, exponents)
    np.testing.assert_array_equal(run(model), before)
    divisions = [each for each in model.graph.node if each.op_type == "Mul" and "/smoothed/" in each.name]
    # The norm between the matmuls divides its own output.
    assert len(divisions) == len(exponents) - (layer is norm_between)


def test_smoothing_of_fused_attention_is_exact_to_the_last_bit() -> None:
    graph = Graph()
    packed, bias = graph.weight(WIDTH, 3 * WIDTH), graph.weight(3 * WIDTH)
    model = graph.model(graph.add("Attention", graph.hidden, packed, bias, name="all", domain=FUSED, num_heads=4))
    before = run(model)
    (matmul,) = find_matmuls(model)
    assert (matmul.operator, matmul.outputs) == ("Attention", 3 * WIDTH)
    smooth(model, {"all": [3, -2] * 8})
    np.testing.assert_array_equal(run(model), before)
    np.testing.assert_array_equal(constant(model, node(model, "all").input[1])[0], 8 * constant(model, packed)[0])


def test_matmuls_that_read_one_tensor_share_its_division() -> None:
    graph = Graph()
    model = graph.model(gated(graph))
    smooth(model, {"gate": [1] * WIDTH, "up": [1] * WIDTH})
    assert node(model, "gate").input[0] == node(model, "up").input[0]
    graph = Graph()
    model = graph.model(gated(graph))
    smooth(model, {"gate": [1] * WIDTH, "up": [2] * WIDTH})
    assert node(model, "gate").input[0] != node(model, "up").input[0]


def test_norm_with_another_consumer_is_not_scaled() -> None:
    graph = Graph()
    norm = graph.norm(graph.hidden)
    model = graph.model(graph.add("Add", graph.matmul(norm, WIDTH, WIDTH, "matmul"), norm))
    before = run(model)
    smooth(model, {"matmul": [2] * WIDTH})
    np.testing.assert_array_equal(run(model), before)
    assert node(model, "matmul").input[0] != norm


def test_smoothing_exponents_move_outliers_into_weights() -> None:
    maxima, weights = np.array([1.0, 32.0, 1.0, 0.0]), np.array([1.0, 1.0, 1.0, 1.0])
    assert smoothing_exponents(maxima, weights, 1.0) == [0, 5, 0, 0]
    assert smoothing_exponents(maxima, weights, 0.6) == [0, 3, 0, 0]
    assert smoothing_exponents(np.ones(3), np.array([1.0, 0.25, 1.0]), 0.5) == [0, 1, 0]
    assert max(smoothing_exponents(np.array([1.0, 1e30, 1.0]), np.ones(3), 1.0)) == 8


def simulated_error(values: np.ndarray, weight: np.ndarray, factors: np.ndarray) -> float:
    divided, multiplied = values / factors, weight * factors[:, None]
    scale = (max(0.0, divided.max()) - min(0.0, divided.min())) / 255
    scales = np.abs(multiplied).max(axis=0) / 127
    rounded = (np.rint(divided / scale) * scale) @ (np.rint(multiplied / scales) * scales)
    exact = values @ weight
    return float(np.square(rounded - exact).mean() / np.square(exact).mean())


@pytest.mark.parametrize("outlier", [1.0, 100.0])
@pytest.mark.parametrize("exponent", [0, 3, 6])
def test_estimated_quantization_error_is_that_of_a_simulated_matmul(outlier: float, exponent: int) -> None:
    random = np.random.default_rng(4)
    values, weight = random.normal(size=(256, 32)), random.normal(size=(32, 64))
    values[:, 5] *= outlier
    weight[5] /= outlier
    factors = np.exp2([exponent if channel == 5 else 0 for channel in range(32)])
    estimated = relative_error(*activation_powers(values, factors), weight_powers(weight, factors))
    assert estimated == pytest.approx(simulated_error(values, weight, factors), rel=0.2)


@pytest.mark.parametrize("opset", [17, 20])
def test_input_maxima_cover_all_rows(tmp_path: Path, calibration: Calibration, opset: int) -> None:
    graph = Graph()
    model = graph.model(relu(graph), opset=opset)
    onnx.save_model(model, tmp_path / "model.onnx")
    maxima = input_maxima(tmp_path / "model.onnx", find_matmuls(model), calibration)
    ids = np.unique(np.append(calibration.rows.values["input_ids"], 0))  # padding counts
    table = constant(model, "constant_0")[ids]
    np.testing.assert_array_equal(maxima["first"], np.abs(table).max(axis=0))
    assert maxima["second"].shape == (WIDE,)


def test_nan_counts_as_infinite_in_input_maxima(tmp_path: Path, calibration: Calibration) -> None:
    graph = Graph()
    model = graph.model(graph.matmul(graph.add("Sqrt", graph.hidden), WIDTH, WIDTH, "matmul"))
    onnx.save_model(model, tmp_path / "model.onnx")
    maxima = input_maxima(tmp_path / "model.onnx", find_matmuls(model), calibration)
    assert np.isinf(maxima["matmul"]).any()


def test_graph_with_unknown_operator_is_a_stage_error(tmp_path: Path, calibration: Calibration) -> None:
    graph = Graph()
    model = graph.model(graph.matmul(graph.add("NoSuchOperator", graph.hidden), WIDTH, WIDTH, "matmul"))
    onnx.save_model(model, tmp_path / "model.onnx")
    with pytest.raises(StageError, match="cannot open the graph"):
        input_maxima(tmp_path / "model.onnx", find_matmuls(model), calibration)


def test_weights_are_passed_to_sessions_separately(
    tmp_path: Path, calibration: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph past 2 GiB cannot be serialised with its weights, so weights in and beside the file are passed apart."""
    graph = Graph()
    first = graph.matmul(graph.hidden, WIDTH, 4096, "first")
    model = graph.model(graph.matmul(graph.add("Relu", first), 4096, WIDTH, "second"))
    onnx.save_model(model, tmp_path / "one.onnx")
    onnx.save_model(model, tmp_path / "two.onnx", save_as_external_data=True, location="two.onnx.data")
    graph_bytes: list[int] = []
    open_session = ort.InferenceSession

    def open_and_record(graph: bytes, *args: Any, **kwargs: Any) -> Any:
        graph_bytes.append(len(graph))
        return open_session(graph, *args, **kwargs)

    monkeypatch.setattr(ort, "InferenceSession", open_and_record)
    smooths, splits = search_smoothing(tmp_path / "one.onnx", calibration, ratio=1.0)
    assert len(splits["second"]) == OUTLIER_CHANNELS
    assert search_smoothing(tmp_path / "two.onnx", calibration, ratio=1.0) == (smooths, splits)
    assert len(graph_bytes) == 4
    assert max(graph_bytes) < 2**13 < 2**18 < (tmp_path / "one.onnx").stat().st_size


def test_search_of_graph_without_matmuls_is_empty(tmp_path: Path, calibration: Calibration) -> None:
    graph = Graph()
    onnx.save_model(graph.model(graph.add("Relu", graph.hidden)), tmp_path / "model.onnx")
    assert search_smoothing(tmp_path / "model.onnx", calibration) == ({}, {})


def test_gelu_operators_are_approximated() -> None:
    graph = Graph()
    model = graph.model(fused(graph))
    before = run(model)
    assert approximate_gelu(model) == 1
    assert 0 < np.abs(run(model) - before).max() < 1e-2
    graph = Graph()
    model = graph.model(graph.add("Gelu", graph.hidden), opset=20)
    before = run(model)
    assert approximate_gelu(model) == 1
    assert 0 < np.abs(run(model) - before).max() < 1e-3
    graph = Graph()
    assert approximate_gelu(graph.model(graph.add("Gelu", graph.hidden, approximate="tanh"), opset=20)) == 0


def recipe(**fields: Any) -> Recipe:
    return Recipe(variant="onnxruntime-int8", method=Method.DYNAMIC, target="amx", **fields)


def test_all_rewrites_combine(tmp_path: Path) -> None:
    graph = Graph()
    model = graph.model(fused(graph))
    onnx.save_model(model, tmp_path / "model.onnx")
    rewrites = recipe(split={"second": [1, 5]}, smooth={"first": [1] * WIDTH, "second": [-1] * (WIDE - 2)}, gelu=True)
    rewrite(tmp_path / "model.onnx", tmp_path / "new.onnx", rewrites, external_data=False)
    new = onnx.load(tmp_path / "new.onnx")
    assert np.abs(run(new) - run(model)).max() < 6e-4  # 2e-4 on x86-64 (2026-11), of the approximate GELU
    kinds = [each.op_type for each in new.graph.node]
    assert (kinds.count("FastGelu"), kinds.count("BiasGelu"), kinds.count("Mul"), kinds.count("MatMul")) == (2, 0, 2, 4)


def test_graph_is_not_copied_without_rewrites(tmp_path: Path) -> None:
    source, file = tmp_path / "model.onnx", tmp_path / "new.onnx"
    assert rewrite(source, file, recipe(), external_data=False) == source
    assert not file.exists()


@pytest.mark.parametrize("layer", [portable, gemms])
def test_side_branch_stays_in_float(tmp_path: Path, layer: Any) -> None:
    from hasten.quantize.methods.dynamic import quantize_dynamic

    graph = Graph()
    onnx.save_model(graph.model(layer(graph)), tmp_path / "model.onnx")
    rewrites = recipe(split={"second": [1, 5]}, keep=("words",))
    rewrite(tmp_path / "model.onnx", tmp_path / "new.onnx", rewrites, external_data=False)
    quantize_dynamic(tmp_path / "new.onnx", tmp_path / "int8.onnx", rewrites, external_data=False)
    nodes = onnx.load(tmp_path / "int8.onnx").graph.node
    assert sum(each.op_type == "MatMulInteger" for each in nodes) == 2
    in_float = [each.name for each in nodes if each.op_type in ("MatMul", "Gemm")]
    assert len(in_float) == 2
    assert set(in_float) < set(float_nodes(rewrites))


def test_search_finds_the_outlier_channels(tmp_path: Path, calibration: Calibration) -> None:
    """One channel of the embeddings is a hundred times the others, and so is one between the matmuls."""
    graph = Graph()
    table = constant_of(graph, 0)
    table[:, 3] *= 100
    graph.constants[0] = numpy_helper.from_array(table, "constant_0")
    result = relu(graph)
    scale = constant_of(graph, 2)
    scale[..., 11] = 300
    graph.constants[2] = numpy_helper.from_array(scale, "constant_2")
    onnx.save_model(graph.model(result), tmp_path / "model.onnx")
    smooths, splits = search_smoothing(tmp_path / "model.onnx", calibration, channels=4)
    assert 11 in splits["second"]
    assert max(smooths["first"]) == smooths["first"][3] > 0


def constant_of(graph: Graph, number: int) -> np.ndarray:
    return numpy_helper.to_array(graph.constants[number]).copy()
