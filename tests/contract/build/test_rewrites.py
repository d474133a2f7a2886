"""Rewrites keep the float outputs of many architectures, in both dialects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.backends import Dialect
from hasten.core.tensors import Batch, pad
from hasten.onnx_graph import operators, read_graph
from hasten.quantize.analysis.calibration import Calibration
from hasten.quantize.analysis.matmuls import find_embedding_lookups, find_feed_forward_pairs, find_matmuls
from hasten.quantize.methods.dynamic import quantize_dynamic
from hasten.quantize.recipe import Recipe
from hasten.quantize.rewrites.apply_rewrites import rewrite
from hasten.quantize.rewrites.smoothing_search import search_smoothing
from support.int8 import recipe_here

HEAD = "ForSequenceClassification"
# The number of feed-forward pairs besides the head's; gated layers have none.
LAYERS = {"bert": 2, "distilbert": 2, "albert": 2, "mpnet": 2, "deberta-v2": 2, "modernbert": 0}
PRE_NORM = "roberta-prelayernorm"
COPIES = {"electra": 2, "roberta": 2, "xlm-roberta": 2, "mobilebert": 8}
NAMES = [*LAYERS, PRE_NORM, *(pytest.param(name, marks=pytest.mark.slow) for name in COPIES)]
DIALECTS = [Dialect.ONNX, Dialect.ORT]


def run_unoptimized(graph: Path, feeds: dict[str, Any]) -> np.ndarray:
    """Run a graph without ONNX Runtime's fusions, which add in another order."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    input_names = {entry.name for entry in session.get_inputs()}
    return session.run(None, {name: value for name, value in feeds.items() if name in input_names})[0]


def mixed_lengths(loaded: Any) -> Batch:
    lengths = np.array([1, 9, 33, 2, 17], np.int32)
    ids = np.random.default_rng(5).integers(5, 60, int(lengths.sum())).astype(np.int32)
    columns = {spec.name: np.zeros_like(ids) for spec in loaded.signature.inputs} | {"input_ids": ids}
    return Batch(columns, lengths)


def recipe(**fields: Any) -> Recipe:
    return recipe_here("onnxruntime-int8", **fields)


@pytest.fixture(scope="module")
def graphs(tiny_model: Any, load_tiny: Any, make_graphs: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    cache: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in cache:
            loaded = load_tiny(tiny_model(name, HEAD))
            cache[name] = (loaded, make_graphs(loaded, tmp_path_factory.mktemp("rewrites")))
        return cache[name]

    return get


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", NAMES)
def test_feed_forward_layers_are_split_exactly(graphs: Any, name: str, dialect: Dialect, tmp_path: Path) -> None:
    loaded, by_dialect = graphs(name)
    graph, feeds = by_dialect[dialect], pad(mixed_lengths(loaded), loaded.signature)
    model = read_graph(graph, with_weights=False)
    pairs = find_feed_forward_pairs(model, find_matmuls(model))
    layers = [pair for pair in pairs if "classifier" not in pair.second.name]
    assert len(layers) == (LAYERS | COPIES).get(name, 2)
    rewrites = recipe(split={pair.second.name: [0, 7, 21] for pair in pairs})
    rewritten = rewrite(graph, tmp_path / "model.onnx", rewrites, external_data=False)
    expected = run_unoptimized(graph, feeds)
    np.testing.assert_allclose(
        run_unoptimized(rewritten, feeds),
        expected,
        rtol=0,
        # Additions are in another order, and CPUs differ in how they add: on a Neoverse-N1 the eight
        # feed-forward layers of MobileBERT come to 1.7e-5.
        atol=3e-5 * max(1.0, float(np.abs(expected).max())),
    )


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", NAMES)
def test_smoothing_of_every_matmul_is_exact(graphs: Any, name: str, dialect: Dialect, tmp_path: Path) -> None:
    loaded, by_dialect = graphs(name)
    graph, feeds = by_dialect[dialect], pad(mixed_lengths(loaded), loaded.signature)
    matmuls = find_matmuls(read_graph(graph, with_weights=False))
    assert len(matmuls) >= 9
    # Large and small exponents, the same for all matmuls that read one tensor.
    exponents = {matmul.name: [channel % 7 - 3 for channel in range(matmul.inputs)] for matmul in matmuls}
    rewrite(graph, tmp_path / "model.onnx", recipe(smooth=exponents), external_data=False)
    np.testing.assert_array_equal(run_unoptimized(tmp_path / "model.onnx", feeds), run_unoptimized(graph, feeds))
    assert {matmul.name for matmul in find_matmuls(read_graph(tmp_path / "model.onnx"))} >= set(exponents)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_norms_read_only_by_matmuls_absorb_the_division(graphs: Any, dialect: Dialect, tmp_path: Path) -> None:
    """In pre-norm models the residual bypasses the norms."""
    _, by_dialect = graphs(PRE_NORM)
    matmuls = find_matmuls(read_graph(by_dialect[dialect], with_weights=False))
    firsts = {matmul.name: [1] * matmul.inputs for matmul in matmuls if "intermediate" in matmul.name}
    assert len(firsts) == 2
    rewrite(by_dialect[dialect], tmp_path / "model.onnx", recipe(smooth=firsts), external_data=False)
    assert operators(tmp_path / "model.onnx").get("Mul") == operators(by_dialect[dialect]).get("Mul")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_shared_weights_stay_shared(graphs: Any, dialect: Dialect, tmp_path: Path) -> None:
    """ALBERT's layers share their weights, which must not be stored once for each layer."""
    loaded, by_dialect = graphs("albert")
    calibration = Calibration(mixed_lengths(loaded), loaded.signature)
    smooths, _ = search_smoothing(by_dialect[dialect], calibration)
    pairs = find_feed_forward_pairs(model := read_graph(by_dialect[dialect], with_weights=False), find_matmuls(model))
    split = {pair.second.name: [1, 2] for pair in pairs}
    firsts = {name: exponents for name, exponents in smooths.items() if name not in split}
    rewrite(by_dialect[dialect], tmp_path / "model.onnx", recipe(smooth=firsts, split=split), external_data=False)
    before, after = (file.stat().st_size for file in (by_dialect[dialect], tmp_path / "model.onnx"))
    assert after < 1.15 * before


@pytest.mark.parametrize("dialect", DIALECTS)
def test_search_result_can_be_applied(graphs: Any, dialect: Dialect, tmp_path: Path) -> None:
    loaded, by_dialect = graphs("bert")
    graph = by_dialect[dialect]
    calibration = Calibration(mixed_lengths(loaded), loaded.signature)
    smooths, splits = search_smoothing(graph, calibration, channels=4)
    lookups = tuple(find_embedding_lookups(read_graph(graph, with_weights=False)))
    rewrites = recipe(smooth=smooths, split=splits, gelu=True, attention=True, keep=lookups)
    rewritten, quantized = tmp_path / "rewritten.onnx", tmp_path / "quantized.onnx"
    rewrite(graph, rewritten, rewrites, external_data=True)
    quantize_dynamic(rewritten, quantized, rewrites, external_data=False)
    feeds = pad(mixed_lengths(loaded), loaded.signature)
    expected = run_unoptimized(graph, feeds)
    assert np.abs(run_unoptimized(quantized, feeds) - expected).max() < 0.2 * np.abs(expected).max()
    kinds = {node.op_type for node in read_graph(quantized, with_weights=False).graph.node}
    assert kinds >= ({"MatMulInteger", "QAttention", "FastGelu"} if dialect is Dialect.ORT else {"MatMulInteger"})
