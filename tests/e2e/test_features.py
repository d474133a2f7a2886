"""Token vectors of MiniLM equal those of transformers' feature-extraction pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.measure.data import sample_texts

VARIANTS = ["onnxruntime-fp32", "openvino-fp32"]


@pytest.fixture(scope="module")
def bundle(minilm: str, quick_build: Any) -> Path:
    """A model in sentence-transformers' layout, built for token vectors instead of embeddings."""
    return quick_build(minilm, task="feature-extraction", variants=VARIANTS, keep="all", threads=None).path


@pytest.fixture(scope="module")
def pipeline(minilm: str) -> Any:
    import transformers

    return transformers.pipeline("feature-extraction", minilm, device="cpu")


def test_token_vectors_equal_the_pipeline(bundle: Path, pipeline: Any) -> None:
    texts = sample_texts()[:100]
    theirs = pipeline(texts, truncation=True, return_tensors=True)
    for variant in VARIANTS:
        with hasten.load(bundle, variant) as predictor:
            ours = predictor(texts)
        assert len(ours) == len(theirs) == len(texts)
        for our, their in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(our, their.numpy(), atol=1e-4, strict=True)


def test_single_text_gives_one_array(bundle: Path, pipeline: Any) -> None:
    with hasten.load(bundle) as predictor:
        ours = predictor("How do I reset my password?")
    assert ours.shape == (1, 9, 384)
    np.testing.assert_allclose(ours, pipeline("How do I reset my password?"), atol=1e-4)
