"""Fused rotary attention answers like the exported graph, and its memory grows linearly with the length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.backends import Dialect
from hasten.backends.onnxruntime.session import node_placements, session_options
from hasten.onnx_graph import operators

WINDOW = {"local_attention": 128, "layer_types": ["full_attention", "sliding_attention"]}
CONFIGS = {
    "modernbert": WINDOW,
    "gemma3_text": {"sliding_window": 33},
    "eurobert": {},
    "nomic_bert": {},
    "mistral": {},
    "qwen3": {},
}
# Fused attention, fused rotary embeddings and the matmuls that splitting packed projections adds, in two layers.
FUSED = {
    "modernbert": (2, 4, 6),
    "gemma3_text": (2, 4, 0),
    "eurobert": (2, 4, 0),
    "nomic_bert": (2, 4, 0),
    # Causal attention is left to the general operators.
    "mistral": (0, 4, 0),
    "qwen3": (0, 4, 0),
}


@pytest.fixture(scope="module")
def graphs(tiny_model: Any, load_tiny: Any, make_graphs: Any, tmp_path_factory: Any) -> Any:
    """Return the exported graph of an architecture and its graph for ONNX Runtime on CPUs."""
    cache: dict[str, tuple[Path, Path]] = {}

    def get(name: str) -> tuple[Path, Path]:
        if name not in cache:
            model = tiny_model(name, "Model", positions=600, **CONFIGS[name])
            folder = tmp_path_factory.mktemp("attend")
            after = make_graphs(load_tiny(model, task="feature-extraction"), folder)
            cache[name] = folder / "model.onnx", after[Dialect.ORT]
        return cache[name]

    return get


def run(graph: Path, ids: np.ndarray, mask: np.ndarray, profile_folder: str | None = None) -> tuple[np.ndarray, Any]:
    import onnxruntime

    options = session_options(1, profile_folder)
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    feeds = {"input_ids": ids, "attention_mask": mask}
    return session.run(None, {entry.name: feeds[entry.name] for entry in session.get_inputs()})[0], session


def padded(length: int, *, pads_left: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and the mask of a long text, a shorter one and one of a token."""
    ids = np.random.default_rng(length).integers(5, 60, (3, length)).astype(np.int32)
    lengths = np.array([length, length // 2 + 1, 1])[:, None]
    columns = np.arange(length)[None, :]
    return ids, (columns >= length - lengths if pads_left else columns < lengths).astype(np.int32)


@pytest.mark.parametrize("name", CONFIGS)
def test_rotary_attention_is_fused(graphs: Any, name: str) -> None:
    exported, fused = graphs(name)
    before, after = operators(exported), operators(fused)
    attention, rotary, added_matmuls = FUSED[name]
    assert (after.get("MultiHeadAttention", 0), after["RotaryEmbedding"]) == (attention, rotary)
    # Each fused attention had two matmuls.
    assert after["MatMul"] == before["MatMul"] - 2 * attention + added_matmuls


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 66, 127, 128, 129, 130, 200, 256, 257, 513])
def test_modernbert_answers_like_the_exported_graph(graphs: Any, length: int) -> None:
    check(graphs("modernbert"), length)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "modernbert"])
@pytest.mark.parametrize("length", [1, 33, 97, 200, 257])
def test_relatives_answer_like_the_exported_graph(graphs: Any, name: str, length: int) -> None:
    check(graphs(name), length)


def check(pair: tuple[Path, Path], length: int) -> None:
    exported, fused = pair
    for pads_left in (False, True):
        ids, mask = padded(length, pads_left=pads_left)
        (ours, _), (theirs, _) = run(fused, ids, mask), run(exported, ids, mask)
        assert np.isfinite(ours).all()
        scale = max(1.0, float(np.abs(theirs).max()))
        np.testing.assert_allclose(ours[mask == 1], theirs[mask == 1], rtol=0, atol=1e-5 * scale)


def test_largest_tensor_grows_linearly_with_the_length(graphs: Any, tmp_path: Path) -> None:
    exported, fused = graphs("modernbert")
    sizes = {}
    for graph in (exported, fused):
        for length in (512, 2048):
            ids = np.full((1, length), 7, np.int32)
            _, session = run(graph, ids, np.ones_like(ids), str(tmp_path))
            sizes[graph, length] = max(placement.output_bytes for placement in node_placements(session))
    assert sizes[fused, 2048] <= 4 * sizes[fused, 512]
    # The exported graph stores the scores of all pairs.
    assert sizes[exported, 2048] >= 12 * sizes[exported, 512]
