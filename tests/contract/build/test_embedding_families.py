"""Embedders of today's architectures answer like sentence-transformers, in ragged batches and alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from support.models import sentence_layouts, tiny_encoders

VARIANTS = ["onnxruntime-fp32", "openvino-fp32"]
# From one token to the model's limit, and beyond it.
TEXTS = ["x", "rain", *tiny_encoders.CORPUS, " ".join(tiny_encoders.CORPUS)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: sentence_layouts.save(name, tmp_path_factory.mktemp("models")))


@pytest.mark.parametrize("name", sentence_layouts.EMBEDDERS)
def test_embedder_answers_like_sentence_transformers(saved: Any, quick_build: Any, name: str) -> None:
    from sentence_transformers import SentenceTransformer

    model = saved(name)
    original = SentenceTransformer(str(model), device="cpu", local_files_only=True)
    prompts = [{"prompt_name": prompt} for prompt in sentence_layouts.EMBEDDERS[name][2]]
    bundle = quick_build(model, variants=VARIANTS, keep="all")
    for variant in VARIANTS:
        with hasten.load(bundle.path, variant, threads=1) as predictor:
            for options in ({}, *prompts):
                expected = original.encode(TEXTS, **options)
                np.testing.assert_allclose(predictor(TEXTS, **options), expected, atol=1e-5)
                alone = np.stack([predictor(text, **options) for text in TEXTS])
                np.testing.assert_allclose(alone, expected, atol=1e-5)
    assert np.abs(expected[1] - expected[2]).max() > 0.01
