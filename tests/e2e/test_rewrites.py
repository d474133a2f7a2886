"""What the rewrites are for, on real weights: int8 embeddings that point where the float ones do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.core.tensors import Batch, pad
from hasten.quantize.calibration import Calibration
from hasten.quantize.dynamic import quantize_dynamic
from hasten.quantize.propose import propose
from hasten.quantize.recipe import Method, Recipe
from hasten.quantize.rewrite import rewrite


@pytest.fixture(scope="module")
def fused(minilm: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The fused graph, and a way from texts to rows."""
    from hasten.builder.export import export
    from hasten.builder.load import load_model
    from hasten.builder.passes import apply_passes
    from hasten.builder.source import find_model
    from hasten.builder.tokenizer import save_tokenizer
    from hasten.core.plan import Plan
    from hasten.core.tokenizer import Tokenizer

    plan, folder = Plan(model=minilm), tmp_path_factory.mktemp("rewrites")
    loaded = load_model(find_model(plan), plan)
    export(loaded, folder / "model.onnx")
    save_tokenizer(loaded, folder / "tokenizer.json")
    tokenizer = Tokenizer.open(folder / "tokenizer.json", loaded.tokenizer)
    graphs = apply_passes(folder / "model.onnx", folder, loaded.config, external_data=False)

    def rows(texts: list[str]) -> Calibration:
        return Calibration(tokenizer.encode(texts).batch, loaded.signature)

    return graphs.fused, rows


def cosines(graph: Path, other: Path, rows: Batch, signature: Any) -> np.ndarray:
    import onnxruntime

    found = []
    for file in (graph, other):
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        parts = [
            session.run(None, pad(rows.take(np.arange(at, min(at + 8, len(rows)))), signature))[0]
            for at in range(0, len(rows), 8)
        ]
        vectors = np.concatenate(parts)
        found.append(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    return (found[0] * found[1]).sum(axis=1)


def texts_of(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]


def test_embeddings_survive_int8(fused: Any, real_data: Path, tmp_path: Path) -> None:
    graph, rows = fused
    judged = rows(texts_of(real_data / "stsb_validation.jsonl")[:200])
    calibration = rows(texts_of(real_data / "sst2_calibration.jsonl")[:256])
    smooth, split = propose(graph, calibration)
    assert len(smooth) >= 12  # what reads each norm
    assert 3 <= len(split) <= 6
    plain = Recipe(variant="onnxruntime-int8", method=Method.DYNAMIC, target="amx", attention=True)
    kept = Recipe(
        variant="onnxruntime-int8", method=Method.DYNAMIC, target="amx", attention=True, smooth=smooth, split=split
    )
    means = {}
    for name, recipe in (("plain", plain), ("kept", kept)):
        rewritten, quantized = tmp_path / f"{name}.onnx", tmp_path / f"{name}-int8.onnx"
        rewrite(graph, rewritten, recipe, external_data=False)
        quantize_dynamic(rewritten, quantized, recipe, external_data=False)
        means[name] = cosines(graph, quantized, judged.rows, judged.signature).mean()
    assert means["plain"] < 0.996
    assert means["kept"] > 0.998
