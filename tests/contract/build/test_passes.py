"""Graph passes do not change answers, and have their intended effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.backends import BACKENDS, MODEL, Artifact, Dialect, RunOptions
from hasten.core.tensors import Batch, pad
from hasten.core.variant import Precision, Variant

ARCHITECTURES = ("bert", "distilbert", "roberta", "electra")


def rows_computed(graph: Path) -> dict[str, int]:
    """Return the number of rows that each matmul computes for a text of nine tokens, by output name."""
    import onnx
    import onnxruntime

    model = onnx.load(graph)
    names = [node.output[0] for node in model.graph.node if node.op_type in ("MatMul", "BiasGelu")]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {entry.name: np.ones((1, 9), np.int32) for entry in session.get_inputs()}
    return {name: result.shape[-2] for name, result in zip(names, session.run(names, feeds), strict=True)}


def run_graph(graph: Path, loaded: Any, batch: Batch) -> np.ndarray:
    artifact = Artifact(Variant("onnxruntime", Precision.FP32), loaded.signature, graph.parent, {MODEL: graph.name})
    with BACKENDS.get("onnxruntime").open(artifact, RunOptions(1)) as session:
        return session.run(batch)[loaded.signature.outputs[0].name]


def run_unoptimized(graph: Path, feeds: dict[str, Any]) -> np.ndarray:
    """Run a graph without ONNX Runtime's fusions, which add in another order."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def mixed_lengths(loaded: Any) -> Batch:
    lengths = np.array([1, 9, 33, 2, 17], np.int32)
    ids = np.random.default_rng(5).integers(5, 60, int(lengths.sum())).astype(np.int32)
    columns = {spec.name: np.zeros_like(ids) for spec in loaded.signature.inputs} | {"input_ids": ids}
    return Batch(columns, lengths)


@pytest.fixture(scope="module")
def graphs(tiny_model: Any, tiny_embedder: Any, load_tiny: Any, make_graphs: Any, tmp_path_factory: Any) -> Any:
    """Return the exported graph of a model and its graphs after the passes, cached by name."""
    cache: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in cache:
            model = tiny_embedder(pooling=name) if name in ("cls", "mean") else tiny_model(name, HEAD)
            loaded, folder = load_tiny(model), tmp_path_factory.mktemp("passes")
            cache[name] = (loaded, folder / "model.onnx", make_graphs(loaded, folder))
        return cache[name]

    return get


HEAD = "ForSequenceClassification"


@pytest.mark.parametrize("dialect", [Dialect.ONNX, Dialect.ORT])
@pytest.mark.parametrize("name", [*ARCHITECTURES, "cls", "mean"])
def test_passes_do_not_change_answers(graphs: Any, name: str, dialect: Dialect) -> None:
    loaded, exported, after = graphs(name)
    batch = mixed_lengths(loaded)
    ours, theirs = run_graph(after[dialect], loaded, batch), run_graph(exported, loaded, batch)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-6 * max(1.0, float(np.abs(theirs).max())))


@pytest.mark.parametrize("dialect", [Dialect.ONNX, Dialect.ORT])
@pytest.mark.parametrize("name", [*ARCHITECTURES, "cls"])
def test_last_layer_is_computed_for_one_token(graphs: Any, name: str, dialect: Dialect) -> None:
    """Only keys and values, two matmuls of the last layer, are computed for all tokens."""
    _, _, after = graphs(name)
    rows = list(rows_computed(after[dialect]).values())
    # Two layers of two feed-forward matmuls and four projections (one is part of ONNX Runtime's fused attention), and
    # two matmuls of the attention itself.
    assert rows.count(1) >= (5 if dialect is Dialect.ORT else 6)
    last_full = max(index for index, count in enumerate(rows) if count == 9)
    assert all(count == 1 for count in rows[last_full + 1 :])
    assert len(rows[last_full + 1 :]) >= 3


@pytest.mark.parametrize("dialect", [Dialect.ONNX, Dialect.ORT])
def test_head_that_reads_all_tokens_is_not_pruned(graphs: Any, dialect: Dialect) -> None:
    loaded, _, after = graphs("mean")
    assert set(rows_computed(after[dialect]).values()) <= {9, 8}
    assert len(loaded.signature.inputs) == 2


@pytest.mark.parametrize("name", ["roberta", "mean"])
def test_zero_token_types_are_folded_exactly(graphs: Any, name: str, tmp_path: Path) -> None:
    from hasten.builder.passes.fold import fold_types

    loaded, exported, _ = graphs(name)
    assert fold_types(exported, tmp_path / "folded.onnx")
    feeds = pad(mixed_lengths(loaded), loaded.signature)
    np.testing.assert_array_equal(run_unoptimized(tmp_path / "folded.onnx", feeds), run_unoptimized(exported, feeds))


def test_token_types_of_pairs_are_not_folded(graphs: Any, tmp_path: Path) -> None:
    from hasten.builder.passes.fold import fold_types

    loaded, exported, _ = graphs("bert")
    assert "token_type_ids" in [spec.name for spec in loaded.signature.inputs]
    assert not fold_types(exported, tmp_path / "folded.onnx")


def test_attention_is_fused_in_every_layer_but_the_pruned_one(graphs: Any) -> None:
    import onnx

    for name in ("bert", "roberta", "electra", "distilbert"):
        _, _, after = graphs(name)
        kinds = [node.op_type for node in onnx.load(after[Dialect.ORT]).graph.node]
        assert (kinds.count("Attention"), kinds.count("MultiHeadAttention"), kinds.count("Softmax")) == (1, 1, 0)


def test_exported_mask_is_one_row_wide(graphs: Any) -> None:
    """From a plain mask transformers makes one of queries × keys, which every layer would add."""
    import onnx

    loaded, exported, _ = graphs("bert")
    kinds = [node.op_type for node in onnx.load(exported).graph.node]
    assert "Range" not in kinds
    assert not loaded.module.has_additive_mask


def test_norms_are_not_fused_with_the_preceding_addition(graphs: Any) -> None:
    """Neither in the graph nor in the session, which fuses them by default."""
    for name in (*ARCHITECTURES, "mean"):
        loaded, _, after = graphs(name)
        graph = after[Dialect.ORT]
        artifact = Artifact(Variant("onnxruntime", Precision.FP32), loaded.signature, graph.parent, {MODEL: graph.name})
        executed = {execution.operator for execution in BACKENDS.get("onnxruntime").placements(artifact)}
        assert "LayerNormalization" in executed
        assert "SkipLayerNormalization" not in executed
