"""The rewrites before quantization, on graphs made by hand and really run: exact in float, whatever lies between."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from hasten.core.errors import PlanError, StageError  # noqa: E402
from hasten.core.tensors import BATCH, SEQUENCE, Batch, DType, Signature, TensorSpec  # noqa: E402
from hasten.quantize.calibration import Calibration  # noqa: E402
from hasten.quantize.gelu import approximate_gelu  # noqa: E402
from hasten.quantize.products import find_pairs, find_products, find_tables  # noqa: E402
from hasten.quantize.propose import propose, quantization_error  # noqa: E402
from hasten.quantize.ranges import input_maxima  # noqa: E402
from hasten.quantize.recipe import Method, Recipe  # noqa: E402
from hasten.quantize.rewrite import rewrite  # noqa: E402
from hasten.quantize.sensitivity import sensitivity  # noqa: E402
from hasten.quantize.smooth import smooth, smoothing  # noqa: E402
from hasten.quantize.split import CHANNELS, find_splits, kept, split  # noqa: E402

WIDTH, WIDE, WORDS = 16, 48, 40
FUSED = "com.microsoft"


class Graph:
    """A graph from `input_ids` to `result`: words looked up, then what a test puts behind."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.random = np.random.default_rng(3)
        self.hidden = self.add("Gather", self.weight(WORDS, WIDTH, scale=1.0), "input_ids", name="words")

    def add(self, kind: str, *inputs: str, name: str | None = None, **about: Any) -> str:
        output = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], name=output if name is None else name, **about))
        return output

    def constant(self, values: Any) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def weight(self, *shape: int, scale: float = 0.3) -> str:
        return self.constant(self.random.normal(scale=scale, size=shape).astype(np.float32))

    def product(self, taken: str, inputs: int, outputs: int, name: str) -> str:
        return self.add("MatMul", taken, self.weight(inputs, outputs), name=name)

    def norm(self, taken: str) -> str:
        return self.add("LayerNormalization", taken, self.weight(WIDTH, scale=1.0), self.weight(WIDTH), axis=-1)

    def erf_gelu(self, taken: str) -> str:
        erf = self.add("Erf", self.add("Div", taken, self.constant(np.float32(2**0.5))))
        one = self.add("Add", erf, self.constant(np.float32(1)))
        return self.add("Mul", self.add("Mul", taken, one), self.constant(np.float32(0.5)))

    def model(self, result: str, *also: str, opset: int = 17) -> Any:
        self.nodes.append(helper.make_node("Identity", [result], ["result"]))
        outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("result", *also)]
        ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])
        graph = helper.make_graph(self.nodes, "test", [ids], outputs, self.constants)
        opsets = [helper.make_opsetid("", opset), helper.make_opsetid(FUSED, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def portable(graph: Graph) -> str:
    """A feed-forward layer with its residual, the first bias on the left as exporters put it."""
    first = graph.add("Add", graph.weight(WIDE), graph.product(graph.hidden, WIDTH, WIDE, "first"))
    second = graph.product(graph.erf_gelu(first), WIDE, WIDTH, "second")
    return graph.add("Add", graph.add("Add", second, graph.weight(WIDTH)), graph.hidden)


def fused(graph: Graph) -> str:
    product = graph.product(graph.hidden, WIDTH, WIDE, "first")
    gelu = graph.add("BiasGelu", product, graph.weight(WIDE), domain=FUSED)
    norm = [graph.weight(WIDTH), graph.weight(WIDTH), graph.weight(WIDTH)]
    second = graph.product(gelu, WIDE, WIDTH, "second")
    return graph.add("SkipLayerNormalization", second, graph.hidden, *norm, domain=FUSED)


def gemms(graph: Graph) -> str:
    """As a head has them: two axes, weights the other way round, biases inside."""
    first_token = graph.add("Gather", graph.hidden, graph.constant(np.int64(0)), axis=1)
    first = graph.add("Gemm", first_token, graph.weight(WIDE, WIDTH), graph.weight(WIDE), name="first", transB=1)
    tanh = graph.add("Tanh", first)
    return graph.add("Gemm", tanh, graph.weight(5, WIDE), graph.weight(5), name="second", transB=1)


def relu(graph: Graph) -> str:
    first = graph.add("Mul", graph.product(graph.hidden, WIDTH, WIDE, "first"), graph.weight(1, 1, WIDE))
    return graph.product(graph.add("Relu", first), WIDE, WIDTH, "second")


LAYERS = (portable, fused, gemms, relu)


def gated(graph: Graph) -> str:
    gate = graph.add("Sigmoid", graph.product(graph.hidden, WIDTH, WIDE, "gate"))
    up = graph.product(graph.hidden, WIDTH, WIDE, "up")
    return graph.product(graph.add("Mul", gate, up), WIDE, WIDTH, "second")


def norm_between(graph: Graph) -> str:
    first = graph.product(graph.hidden, WIDTH, WIDTH, "first")
    return graph.product(graph.norm(first), WIDTH, WIDTH, "second")


def read_elsewhere(graph: Graph) -> str:
    first = graph.add("Relu", graph.product(graph.hidden, WIDTH, WIDTH, "first"))
    return graph.add("Add", graph.product(first, WIDTH, WIDTH, "second"), first)


def constant_by_token(graph: Graph) -> str:
    first = graph.add("Add", graph.product(graph.hidden, WIDTH, WIDE, "first"), graph.weight(6, WIDE))
    return graph.product(first, WIDE, WIDTH, "second")


def answers(model: Any, output: str = "result") -> np.ndarray:
    """Node by node, as written."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    ids = np.random.default_rng(5).integers(0, WORDS, (3, 6))
    result: np.ndarray = session.run([output], {"input_ids": ids})[0]
    return result


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
def test_pairs_are_found_by_structure(layer: Any) -> None:
    graph = Graph()
    model = graph.model(layer(graph))
    products = find_products(model)
    assert [product.name for product in products] == ["first", "second"]
    assert (products[0].inputs, products[0].outputs) == (WIDTH, WIDE)
    (pair,) = find_pairs(model, products)
    assert (pair.first, pair.second) == tuple(products)


@pytest.mark.parametrize("layer", [gated, norm_between, read_elsewhere, constant_by_token])
def test_what_is_built_otherwise_is_no_pair(layer: Any) -> None:
    graph = Graph()
    model = graph.model(layer(graph))
    products = find_products(model)
    assert len(products) >= 2
    assert find_pairs(model, products) == []


def test_a_layer_whose_middle_is_an_output_is_no_pair() -> None:
    graph = Graph()
    middle = graph.add("Relu", graph.product(graph.hidden, WIDTH, WIDE, "first"))
    model = graph.model(graph.product(middle, WIDE, WIDTH, "second"), middle)
    assert find_pairs(model, find_products(model)) == []


def test_the_middle_of_three_belongs_to_the_pair_before() -> None:
    graph = Graph()
    one = graph.add("Relu", graph.product(graph.hidden, WIDTH, WIDE, "one"))
    two = graph.add("Relu", graph.product(one, WIDE, WIDE, "two"))
    model = graph.model(graph.product(two, WIDE, WIDTH, "three"))
    assert [pair.second.name for pair in find_pairs(model, find_products(model))] == ["two"]


def test_products_without_a_name_of_their_own_are_left_alone() -> None:
    graph = Graph()
    hidden = graph.product(graph.hidden, WIDTH, WIDTH, "")
    for _ in range(2):
        hidden = graph.product(hidden, WIDTH, WIDTH, "twice")
    model = graph.model(graph.product(hidden, WIDTH, WIDTH, "once"))
    assert [product.name for product in find_products(model)] == ["once"]
    assert find_tables(model) == ["words"]


def test_a_weight_with_a_second_name_is_one_weight() -> None:
    graph = Graph()
    weight = graph.weight(WIDTH, WIDTH)
    hidden = graph.add("MatMul", graph.hidden, weight, name="one")
    model = graph.model(graph.add("MatMul", hidden, graph.add("Identity", weight), name="two"))
    assert {product.weight for product in find_products(model)} == {weight}


@pytest.mark.parametrize("channels", [[0], [47, 3, 20], list(range(0, 48, 3))])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_split_is_exact(layer: Any, channels: list[int]) -> None:
    graph = Graph()
    model = graph.model(layer(graph))
    before = answers(model)
    split(model, {"second": channels})
    np.testing.assert_allclose(answers(model), before, rtol=0, atol=1e-5)
    sizes = {name: constant(model, node(model, name).input[1]).size for name in ("first", "second")}
    beside = {name: constant(model, node(model, f"second/outliers/{name}").input[1]).size for name in sizes}
    assert sizes["first"] == WIDTH * (WIDE - len(channels))
    assert beside["first"] == WIDTH * len(channels)
    assert beside["second"] * (WIDE - len(channels)) == sizes["second"] * len(channels)


def test_the_ordinary_branch_lacks_the_outliers_alone() -> None:
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
    np.testing.assert_allclose(answers(model, ordinary), answers(without), rtol=0, atol=1e-5)


@pytest.mark.parametrize("channels", [[], [48], [-1], list(range(48))])
def test_channels_that_are_not_there_are_refused(channels: list[int]) -> None:
    graph = Graph()
    model = graph.model(relu(graph))
    with pytest.raises(PlanError, match="'second' that it does not have: it has 48"):
        split(model, {"second": channels})


def test_a_recipe_for_another_graph_is_refused() -> None:
    graph = Graph()
    model = graph.model(relu(graph))
    with pytest.raises(PlanError, match="splits 'third'"):
        split(model, {"third": [0]})
    with pytest.raises(PlanError, match="smooths 'third'"):
        smooth(model, {"third": [0]})
    with pytest.raises(PlanError, match="smooths 2 channels of 'second', which has 48"):
        smooth(model, {"second": [0, 1]})


def test_splits_are_found_where_there_are_outliers() -> None:
    flat = np.ones(512, np.float32)
    peaked = flat.copy()
    peaked[[7, 500]] = 20
    found = find_splits({"flat": flat, "peaked": peaked, "narrow": peaked[:64]}, channels=16)
    assert list(found) == ["peaked"]
    assert len(found["peaked"]) == 16
    assert {7, 500} < set(found["peaked"])


@pytest.mark.parametrize("layer", [*LAYERS, gated, norm_between])
def test_smoothing_is_exact_to_the_last_bit(layer: Any) -> None:
    graph = Graph()
    model = graph.model(layer(graph))
    before, random = answers(model), np.random.default_rng(9)
    exponents = {p.name: random.integers(-6, 7, p.inputs).tolist() for p in find_products(model)}
    smooth(model, exponents)
    np.testing.assert_array_equal(answers(model), before)
    divisions = [each for each in model.graph.node if each.op_type == "Mul" and "/smoothed/" in each.name]
    # The norm between gives its channels divided already.
    assert len(divisions) == len(exponents) - (layer is norm_between)


def test_smoothing_of_fused_attention_is_exact_to_the_last_bit() -> None:
    graph = Graph()
    packed, bias = graph.weight(WIDTH, 3 * WIDTH), graph.weight(3 * WIDTH)
    model = graph.model(graph.add("Attention", graph.hidden, packed, bias, name="all", domain=FUSED, num_heads=4))
    before = answers(model)
    (product,) = find_products(model)
    assert (product.operator, product.outputs) == ("Attention", 3 * WIDTH)
    smooth(model, {"all": [3, -2] * 8})
    np.testing.assert_array_equal(answers(model), before)
    np.testing.assert_array_equal(constant(model, node(model, "all").input[1])[0], 8 * constant(model, packed)[0])


def test_products_that_read_one_tensor_share_its_division() -> None:
    graph = Graph()
    model = graph.model(gated(graph))
    smooth(model, {"gate": [1] * WIDTH, "up": [1] * WIDTH})
    assert node(model, "gate").input[0] == node(model, "up").input[0]
    graph = Graph()
    model = graph.model(gated(graph))
    smooth(model, {"gate": [1] * WIDTH, "up": [2] * WIDTH})
    assert node(model, "gate").input[0] != node(model, "up").input[0]


def test_a_norm_that_something_else_reads_stays_as_it_is() -> None:
    graph = Graph()
    norm = graph.norm(graph.hidden)
    model = graph.model(graph.add("Add", graph.product(norm, WIDTH, WIDTH, "product"), norm))
    before = answers(model)
    smooth(model, {"product": [2] * WIDTH})
    np.testing.assert_array_equal(answers(model), before)
    assert node(model, "product").input[0] != norm


def test_exponents_move_outliers_into_weights() -> None:
    maxima, weights = np.array([1.0, 32.0, 1.0, 0.0]), np.array([1.0, 1.0, 1.0, 1.0])
    assert smoothing(maxima, weights, 1.0) == [0, 5, 0, 0]
    assert smoothing(maxima, weights, 0.6) == [0, 3, 0, 0]
    assert smoothing(np.ones(3), np.array([1.0, 0.25, 1.0]), 0.5) == [0, 1, 0]
    assert max(smoothing(np.array([1.0, 1e30, 1.0]), np.ones(3), 1.0)) == 8


def test_the_simulated_error_sees_outliers() -> None:
    random = np.random.default_rng(4)
    values, weight = random.normal(size=(64, 32)), random.normal(size=(32, 16))
    values[:, 5] *= 100
    weight[5] /= 100
    smoothed = quantization_error(values, weight, [6 if channel == 5 else 0 for channel in range(32)])
    assert 0 < smoothed < quantization_error(values, weight, [0] * 32) / 10


@pytest.mark.parametrize("opset", [17, 20])
def test_maxima_are_those_of_all_rows(tmp_path: Path, calibration: Calibration, opset: int) -> None:
    graph = Graph()
    model = graph.model(relu(graph), opset=opset)
    onnx.save_model(model, tmp_path / "model.onnx")
    maxima = input_maxima(tmp_path / "model.onnx", find_products(model), calibration)
    seen = np.unique(np.append(calibration.rows.values["input_ids"], 0))  # padding counts
    table = constant(model, "constant_0")[seen]
    np.testing.assert_array_equal(maxima["first"], np.abs(table).max(axis=0))
    assert maxima["second"].shape == (WIDE,)


def test_what_is_no_number_counts_as_infinite(tmp_path: Path, calibration: Calibration) -> None:
    graph = Graph()
    model = graph.model(graph.product(graph.add("Sqrt", graph.hidden), WIDTH, WIDTH, "product"))
    onnx.save_model(model, tmp_path / "model.onnx")
    maxima = input_maxima(tmp_path / "model.onnx", find_products(model), calibration)
    assert np.isinf(maxima["product"]).any()


def test_a_graph_that_does_not_run_is_said(tmp_path: Path, calibration: Calibration) -> None:
    graph = Graph()
    model = graph.model(graph.product(graph.add("NoSuchOperator", graph.hidden), WIDTH, WIDTH, "product"))
    onnx.save_model(model, tmp_path / "model.onnx")
    with pytest.raises(StageError, match="does not open"):
        input_maxima(tmp_path / "model.onnx", find_products(model), calibration)


def test_no_graph_is_too_large_to_be_asked(
    tmp_path: Path, calibration: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past 2 GiB one cannot be handed over with its weights, so none is: inside the file, beside it, changed since."""
    graph = Graph()
    first = graph.product(graph.hidden, WIDTH, 4096, "first")
    model = graph.model(graph.product(graph.add("Relu", first), 4096, WIDTH, "second"))
    onnx.save_model(model, tmp_path / "one.onnx")
    onnx.save_model(model, tmp_path / "two.onnx", save_as_external_data=True, location="two.onnx.data")
    handed: list[int] = []
    opened = ort.InferenceSession

    def open_and_tell(graph: bytes, *given: Any, **named: Any) -> Any:
        handed.append(len(graph))
        return opened(graph, *given, **named)

    monkeypatch.setattr(ort, "InferenceSession", open_and_tell)
    smooths, splits = propose(tmp_path / "one.onnx", calibration, ratio=1.0)
    assert len(splits["second"]) == CHANNELS
    assert propose(tmp_path / "two.onnx", calibration, ratio=1.0) == (smooths, splits)
    assert len(handed) == 4
    assert max(handed) < 2**13 < 2**18 < (tmp_path / "one.onnx").stat().st_size


def test_of_a_graph_without_products_nothing_is_proposed(tmp_path: Path, calibration: Calibration) -> None:
    """As of one with branches, which are left alone."""
    graph = Graph()
    onnx.save_model(graph.model(graph.add("Relu", graph.hidden)), tmp_path / "model.onnx")
    assert propose(tmp_path / "model.onnx", calibration) == ({}, {})


def test_gelu_is_approximated_where_it_is_an_operator() -> None:
    graph = Graph()
    model = graph.model(fused(graph))
    before = answers(model)
    assert approximate_gelu(model) == 1
    assert 0 < np.abs(answers(model) - before).max() < 1e-2
    graph = Graph()
    model = graph.model(graph.add("Gelu", graph.hidden), opset=20)
    before = answers(model)
    assert approximate_gelu(model) == 1
    assert 0 < np.abs(answers(model) - before).max() < 1e-3
    graph = Graph()
    assert approximate_gelu(graph.model(graph.add("Gelu", graph.hidden, approximate="tanh"), opset=20)) == 0


def recipe(**about: Any) -> Recipe:
    return Recipe(variant="onnxruntime-int8", method=Method.DYNAMIC, target="amx", **about)


def test_all_rewrites_in_one_file(tmp_path: Path) -> None:
    graph = Graph()
    model = graph.model(fused(graph))
    onnx.save_model(model, tmp_path / "model.onnx")
    asked = recipe(split={"second": [1, 5]}, smooth={"first": [1] * WIDTH, "second": [-1] * (WIDE - 2)}, gelu=True)
    rewrite(tmp_path / "model.onnx", tmp_path / "new.onnx", asked, external_data=False)
    new = onnx.load(tmp_path / "new.onnx")
    assert np.abs(answers(new) - answers(model)).max() < 1e-2
    kinds = [each.op_type for each in new.graph.node]
    assert (kinds.count("FastGelu"), kinds.count("BiasGelu"), kinds.count("Mul"), kinds.count("MatMul")) == (2, 0, 2, 4)
    rewrite(tmp_path / "model.onnx", tmp_path / "same.onnx", recipe(), external_data=False)
    assert (tmp_path / "same.onnx").read_bytes() == (tmp_path / "model.onnx").read_bytes()


@pytest.mark.parametrize("layer", [portable, gemms])
def test_the_side_branch_stays_in_float(tmp_path: Path, layer: Any) -> None:
    from hasten.quantize.dynamic import quantize_dynamic

    graph = Graph()
    onnx.save_model(graph.model(layer(graph)), tmp_path / "model.onnx")
    asked = recipe(split={"second": [1, 5]}, keep=("words",))
    rewrite(tmp_path / "model.onnx", tmp_path / "new.onnx", asked, external_data=False)
    quantize_dynamic(tmp_path / "new.onnx", tmp_path / "int8.onnx", asked, external_data=False)
    nodes = onnx.load(tmp_path / "int8.onnx").graph.node
    assert sum(each.op_type == "MatMulInteger" for each in nodes) == 2
    left = [each.name for each in nodes if each.op_type in ("MatMul", "Gemm")]
    assert len(left) == 2
    assert set(left) < set(kept(asked))


def test_proposals_answer_to_what_was_calibrated(tmp_path: Path, calibration: Calibration) -> None:
    """One channel of the words is a hundred times the others, and so is one between the products."""
    graph = Graph()
    table = constant_of(graph, 0)
    table[:, 3] *= 100
    graph.constants[0] = numpy_helper.from_array(table, "constant_0")
    result = relu(graph)
    scale = constant_of(graph, 2)
    scale[..., 11] = 300
    graph.constants[2] = numpy_helper.from_array(scale, "constant_2")
    onnx.save_model(graph.model(result), tmp_path / "model.onnx")
    smooths, splits = propose(tmp_path / "model.onnx", calibration, channels=4)
    assert 11 in splits["second"]
    assert max(smooths["first"]) == smooths["first"][3] > 0


def constant_of(graph: Graph, number: int) -> np.ndarray:
    return numpy_helper.to_array(graph.constants[number]).copy()


class Counting:
    def __init__(self) -> None:
        self.steps: list[str | None] = []

    def start(self, what: str, total: float | None = None) -> None:
        self.total = total

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        self.steps.append(note)

    def finish(self, note: str = "", *, ok: bool = True) -> None:
        self.is_finished = ok


def test_sensitivity_tells_the_worst_first_and_stops_in_time(tmp_path: Path) -> None:
    graph = Graph()
    model = graph.model(gated(graph))
    onnx.save_model(model, tmp_path / "model.onnx")
    seen: list[Mapping[str, int]] = []
    exact = answers(model)

    def evaluate(file: Path) -> float:
        quantized = onnx.load(file)
        seen.append({each.op_type: 1 for each in quantized.graph.node})
        return float(np.abs(answers(quantized) - exact).max())

    progress = Counting()
    found = sensitivity(tmp_path / "model.onnx", recipe(keep=("up",)), evaluate, external_data=False, progress=progress)
    assert sorted(each.name for each in found) == ["gate", "second", "words"]
    assert [each.error for each in found] == sorted((each.error for each in found), reverse=True)
    assert all(each.error > 0 for each in found)
    # One at a time: the lookup alone first, then products alone.
    assert [("MatMulInteger" in kinds) for kinds in seen] == [False, True, True]
    assert (progress.total, progress.is_finished) == (3, True)
    assert progress.steps == ["words", "gate", "second"]
    assert sensitivity(tmp_path / "model.onnx", recipe(), evaluate, external_data=False, until=0.0) == []
