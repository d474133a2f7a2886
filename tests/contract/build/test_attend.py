"""Fused rotary attention answers like the exported graph, and its memory grows linearly with the length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.backends import Dialect
from hasten.backends.onnxruntime.session import node_placements, session_options
from hasten.onnx_graph import operators

CONFIGS: dict[str, dict[str, Any]] = {
    "modernbert": {"local_attention": 128, "layer_types": ["full_attention", "sliding_attention"]},
    "gemma3_text": {"sliding_window": 33},
    "eurobert": {},
    "nomic_bert": {},
    "mistral": {"sliding_window": 33},
    "qwen3": {},
}
# Fused attention, fused rotary embeddings and the matmuls that splitting packed projections adds, in two layers.
FUSED = {
    "modernbert": (2, 4, 6),
    "gemma3_text": (2, 4, 0),
    "eurobert": (2, 4, 0),
    "nomic_bert": (2, 4, 0),
    "mistral": (2, 4, 0),
    # Causal attention to all earlier keys is left to the general operators.
    "qwen3": (0, 4, 0),
}
# Around the half and the whole of ModernBERT's window, and the lengths from which texts are cut into blocks.
MODERNBERT_LENGTHS = (1, 2, 63, 64, 65, 66, 127, 128, 129, 130, 200, 256, 257, 513)
LENGTHS = (1, 33, 97, 200, 257)


@dataclass(frozen=True)
class Pair:
    """An exported graph and the graph for ONNX Runtime on CPUs that the passes make from it."""

    exported: Path
    fused: Path

    @cached_property
    def sessions(self) -> tuple[Any, Any]:
        return open_session(self.exported), open_session(self.fused)


def open_session(graph: Path, profile_folder: str | None = None) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(
        str(graph), session_options(1, profile_folder), providers=["CPUExecutionProvider"]
    )


@pytest.fixture(scope="module")
def pair(tiny_model: Any, load_tiny: Any, make_graphs: Any, tmp_path_factory: Any) -> Callable[..., Pair]:
    """Return the graphs of an architecture, made once."""
    cache: dict[tuple[str, str], Pair] = {}

    def get(name: str, head: str = "Model", task: str = "feature-extraction", *, external_data: bool = False) -> Pair:
        if (name, head) not in cache:
            model, folder = tiny_model(name, head, positions=600, **CONFIGS[name]), tmp_path_factory.mktemp("attend")
            after = make_graphs(load_tiny(model, task=task), folder, external_data=external_data)
            cache[name, head] = Pair(folder / "model.onnx", after[Dialect.ORT])
        return cache[name, head]

    return get


def padded(length: int, *, pads_left: bool) -> dict[str, np.ndarray]:
    """Return a batch of a long text, a shorter one and one of a single token."""
    ids = np.random.default_rng(length).integers(5, 60, (3, length)).astype(np.int32)
    lengths = np.array([length, length // 2 + 1, 1])[:, None]
    columns = np.arange(length)[None, :]
    is_real = columns >= length - lengths if pads_left else columns < lengths
    return {"input_ids": ids, "attention_mask": is_real.astype(np.int32), "token_type_ids": np.zeros_like(ids)}


def run(session: Any, batch: dict[str, np.ndarray]) -> np.ndarray:
    return session.run(None, {entry.name: batch[entry.name] for entry in session.get_inputs()})[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_rotary_attention_is_fused(pair: Any, name: str) -> None:
    before, after = operators(pair(name).exported), operators(pair(name).fused)
    attention, rotary, added_matmuls = FUSED[name]
    assert (after.get("MultiHeadAttention", 0), after["RotaryEmbedding"]) == (attention, rotary)
    # Each fused attention had two matmuls.
    assert after["MatMul"] == before["MatMul"] - 2 * attention + added_matmuls


@pytest.mark.parametrize("name", CONFIGS)
def test_fused_graph_answers_like_the_exported_graph(pair: Any, name: str) -> None:
    exported, fused = pair(name).sessions
    for length in MODERNBERT_LENGTHS if name == "modernbert" else LENGTHS:
        for pads_left in (False, True):
            batch = padded(length, pads_left=pads_left)
            is_real = batch["attention_mask"] == 1
            ours, theirs = run(fused, batch), run(exported, batch)
            assert np.isfinite(ours).all()
            tolerance = 1e-5 * max(1.0, float(np.abs(theirs).max()))
            note = f"{length} tokens, padded on the {'left' if pads_left else 'right'}"
            np.testing.assert_allclose(ours[is_real], theirs[is_real], rtol=0, atol=tolerance, err_msg=note)


@pytest.mark.parametrize("name", ["modernbert", "nomic_bert"])
def test_pruned_classifier_answers_like_the_exported_graph(pair: Any, name: str) -> None:
    """The last layer has one query; the weights are in an external file."""
    graphs = pair(name, "ForSequenceClassification", "text-classification", external_data=True)
    exported, fused = graphs.sessions
    for length in (1, 65, 200, 300):
        batch = padded(length, pads_left=False)
        ours, theirs = run(fused, batch), run(exported, batch)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * max(1.0, float(np.abs(theirs).max())))


def test_largest_tensor_grows_linearly_with_the_length(pair: Any, tmp_path: Path) -> None:
    def largest_bytes(graph: Path, length: int) -> int:
        session = open_session(graph, str(tmp_path))
        ids = np.full((1, length), 7, np.int32)
        run(session, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
        return max(placement.output_bytes for placement in node_placements(session))

    graphs = pair("modernbert")
    assert largest_bytes(graphs.fused, 2048) <= 4 * largest_bytes(graphs.fused, 512)
    # The exported graph stores the scores of all pairs.
    assert largest_bytes(graphs.exported, 2048) >= 12 * largest_bytes(graphs.exported, 512)
