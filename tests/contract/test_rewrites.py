"""Graphs of many architectures, in both dialects, answer in float as before they were rewritten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.backends import Dialect
from hasten.core.tensors import Batch, pad
from hasten.graph import operators, read_graph
from hasten.quantize.calibration import Calibration
from hasten.quantize.dynamic import quantize_dynamic
from hasten.quantize.products import find_pairs, find_products, find_tables
from hasten.quantize.propose import propose
from hasten.quantize.recipe import Method, Recipe
from hasten.quantize.rewrite import rewrite

HEAD = "ForSequenceClassification"
# Feed-forward layers of each, beside the head's own pair; one whose layers are gated has none.
LAYERS = {"bert": 2, "distilbert": 2, "albert": 2, "mpnet": 2, "deberta-v2": 2, "modernbert": 0}
PRE_NORM = "roberta-prelayernorm"
COPIES = {"electra": 2, "roberta": 2, "xlm-roberta": 2, "mobilebert": 8}
NAMES = [*LAYERS, PRE_NORM, *(pytest.param(name, marks=pytest.mark.slow) for name in COPIES)]
DIALECTS = [Dialect.ONNX, Dialect.ORT]


def as_written(graph: Path, feeds: dict[str, Any]) -> np.ndarray:
    """Node by node: what ONNX Runtime fuses when it loads a graph adds in another order."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    taken = {entry.name for entry in session.get_inputs()}
    return session.run(None, {name: value for name, value in feeds.items() if name in taken})[0]


def mixed_lengths(loaded: Any) -> Batch:
    lengths = np.array([1, 9, 33, 2, 17], np.int32)
    ids = np.random.default_rng(5).integers(5, 60, int(lengths.sum())).astype(np.int32)
    columns = {spec.name: np.zeros_like(ids) for spec in loaded.signature.inputs} | {"input_ids": ids}
    return Batch(columns, lengths)


def recipe(**about: Any) -> Recipe:
    return Recipe(variant="onnxruntime-int8", method=Method.DYNAMIC, target="amx", **about)


@pytest.fixture(scope="module")
def graphs(tiny_model: Any, load_tiny: Any, make_graphs: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            loaded = load_tiny(tiny_model(name, HEAD))
            made[name] = (loaded, make_graphs(loaded, tmp_path_factory.mktemp("rewrites")))
        return made[name]

    return get


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", NAMES)
def test_feed_forward_layers_are_split_exactly(graphs: Any, name: str, dialect: Dialect, tmp_path: Path) -> None:
    loaded, by_dialect = graphs(name)
    graph, feeds = by_dialect[dialect], pad(mixed_lengths(loaded), loaded.signature)
    model = read_graph(graph, with_weights=False)
    pairs = find_pairs(model, find_products(model))
    layers = [pair for pair in pairs if "classifier" not in pair.second.name]
    assert len(layers) == (LAYERS | COPIES).get(name, 2)
    asked = recipe(split={pair.second.name: [0, 7, 21] for pair in pairs})
    rewrite(graph, tmp_path / "model.onnx", asked, external_data=False)
    expected = as_written(graph, feeds)
    np.testing.assert_allclose(
        as_written(tmp_path / "model.onnx", feeds),
        expected,
        rtol=0,
        # Sums are added in another order, and processors differ in how they add: on a Neoverse-N1 the eight
        # feed-forward layers of MobileBERT come to 1.7e-5.
        atol=3e-5 * max(1.0, float(np.abs(expected).max())),
    )


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", NAMES)
def test_every_product_is_smoothed_to_the_last_bit(graphs: Any, name: str, dialect: Dialect, tmp_path: Path) -> None:
    loaded, by_dialect = graphs(name)
    graph, feeds = by_dialect[dialect], pad(mixed_lengths(loaded), loaded.signature)
    products = find_products(read_graph(graph, with_weights=False))
    assert len(products) >= 9
    # Wide and narrow channels, the same for all that read one tensor.
    exponents = {product.name: [place % 7 - 3 for place in range(product.inputs)] for product in products}
    rewrite(graph, tmp_path / "model.onnx", recipe(smooth=exponents), external_data=False)
    np.testing.assert_array_equal(as_written(tmp_path / "model.onnx", feeds), as_written(graph, feeds))
    assert {product.name for product in find_products(read_graph(tmp_path / "model.onnx"))} >= set(exponents)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_norms_that_feed_products_alone_divide_for_nothing(graphs: Any, dialect: Dialect, tmp_path: Path) -> None:
    """Pre-norm: the residual goes around them."""
    _, by_dialect = graphs(PRE_NORM)
    products = find_products(read_graph(by_dialect[dialect], with_weights=False))
    firsts = {product.name: [1] * product.inputs for product in products if "intermediate" in product.name}
    assert len(firsts) == 2
    rewrite(by_dialect[dialect], tmp_path / "model.onnx", recipe(smooth=firsts), external_data=False)
    assert operators(tmp_path / "model.onnx").get("Mul") == operators(by_dialect[dialect]).get("Mul")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_shared_weights_stay_shared(graphs: Any, dialect: Dialect, tmp_path: Path) -> None:
    """ALBERT's layers are one layer: its weights must not be stored once for each."""
    loaded, by_dialect = graphs("albert")
    calibration = Calibration(mixed_lengths(loaded), loaded.signature)
    smooths, _ = propose(by_dialect[dialect], calibration)
    pairs = find_pairs(model := read_graph(by_dialect[dialect], with_weights=False), find_products(model))
    split = {pair.second.name: [1, 2] for pair in pairs}
    firsts = {name: exponents for name, exponents in smooths.items() if name not in split}
    rewrite(by_dialect[dialect], tmp_path / "model.onnx", recipe(smooth=firsts, split=split), external_data=False)
    before, after = (file.stat().st_size for file in (by_dialect[dialect], tmp_path / "model.onnx"))
    assert after < 1.15 * before


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_is_proposed_can_be_made(graphs: Any, dialect: Dialect, tmp_path: Path) -> None:
    loaded, by_dialect = graphs("bert")
    graph = by_dialect[dialect]
    calibration = Calibration(mixed_lengths(loaded), loaded.signature)
    smooths, splits = propose(graph, calibration, channels=4)
    tables = tuple(find_tables(read_graph(graph, with_weights=False)))
    asked = recipe(smooth=smooths, split=splits, gelu=True, attention=True, keep=tables)
    rewritten, quantized = tmp_path / "rewritten.onnx", tmp_path / "quantized.onnx"
    rewrite(graph, rewritten, asked, external_data=True)
    quantize_dynamic(rewritten, quantized, asked, external_data=False)
    feeds = pad(mixed_lengths(loaded), loaded.signature)
    expected = as_written(graph, feeds)
    assert np.abs(as_written(quantized, feeds) - expected).max() < 0.2 * np.abs(expected).max()
    kinds = {node.op_type for node in read_graph(quantized, with_weights=False).graph.node}
    assert kinds >= ({"MatMulInteger", "QAttention", "FastGelu"} if dialect is Dialect.ORT else {"MatMulInteger"})
