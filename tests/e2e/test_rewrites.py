"""Smoothing and outlier split keep int8 embeddings of real weights close to the fp32 ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.core.tensors import Batch, pad
from hasten.quantize.analysis.calibration import Calibration
from hasten.quantize.methods.dynamic import quantize_dynamic
from hasten.quantize.recipe import Method, Recipe
from hasten.quantize.rewrites.apply_rewrites import rewrite
from hasten.quantize.rewrites.smoothing_search import search_smoothing
from support.int8 import needs_exact_int8_sums


@pytest.fixture(scope="module")
def fused(minilm: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The fused graph of MiniLM, and a function that tokenizes texts."""
    from hasten.builder.export.encoder import export
    from hasten.builder.passes.pipeline import apply_passes
    from hasten.builder.sources.locate import find_model
    from hasten.builder.sources.pytorch_model import load_model
    from hasten.builder.sources.tokenizer import save_tokenizer
    from hasten.core.plan import Plan
    from hasten.core.text.tokenizer import Tokenizer

    plan, folder = Plan(model=minilm), tmp_path_factory.mktemp("rewrites")
    loaded = load_model(find_model(plan), plan)
    export(loaded, folder / "model.onnx")
    save_tokenizer(loaded.original_tokenizer, folder / "tokenizer.json")
    tokenizer = Tokenizer.open(folder / "tokenizer.json", loaded.tokenizer)
    graphs = apply_passes(folder / "model.onnx", folder, loaded.config)

    def tokenize(texts: list[str]) -> Calibration:
        return Calibration(tokenizer.encode(texts).batch, loaded.signature)

    return graphs.fused, tokenize


def cosines(graph: Path, other: Path, rows: Batch, signature: Any) -> np.ndarray:
    import onnxruntime

    normalized = []
    for file in (graph, other):
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        parts = [
            session.run(None, pad(rows.take(np.arange(start, min(start + 8, len(rows)))), signature))[0]
            for start in range(0, len(rows), 8)
        ]
        vectors = np.concatenate(parts)
        normalized.append(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    return (normalized[0] * normalized[1]).sum(axis=1)


def read_texts(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]


@needs_exact_int8_sums
def test_rewrites_keep_int8_embeddings_close_to_fp32(fused: Any, real_data: Path, tmp_path: Path) -> None:
    graph, tokenize = fused
    evaluation = tokenize(read_texts(real_data / "stsb_validation.jsonl")[:200])
    calibration = tokenize(read_texts(real_data / "sst2_calibration.jsonl")[:256])
    smooth, split = search_smoothing(graph, calibration)
    assert len(smooth) >= 12  # the readers of each norm
    assert 3 <= len(split) <= 6
    plain = Recipe(variant="onnxruntime-int8", method=Method.DYNAMIC, target="amx", attention=True)
    rewritten_recipe = Recipe(
        variant="onnxruntime-int8", method=Method.DYNAMIC, target="amx", attention=True, smooth=smooth, split=split
    )
    means = {}
    for name, recipe in (("plain", plain), ("rewritten", rewritten_recipe)):
        quantized = tmp_path / f"{name}-int8.onnx"
        rewritten = rewrite(graph, tmp_path / f"{name}.onnx", recipe, external_data=False)
        quantize_dynamic(rewritten, quantized, recipe, external_data=False)
        means[name] = cosines(graph, quantized, evaluation.rows, evaluation.signature).mean()
    assert means["plain"] < 0.996
    assert means["rewritten"] > 0.998
