"""Sparse and multi-vector encoders with trained weights reach their published retrieval quality."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.bundle.read import open_bundle
from hasten.metrics.ranking import ndcg
from hasten.tasks.multi_vector_embedding import max_sim

VARIANT = "onnxruntime-fp32"
# nDCG@10 of 1,190 questions over 240 paragraphs.
PUBLISHED = {"splade": 0.9719, "colbert": 0.9782}
COMPARED = 24

RealModels = Callable[[str], Path]


@pytest.fixture(scope="module")
def questions(real_data: Path) -> tuple[list[str], list[str], list[int]]:
    """Return the questions, the paragraphs, and the paragraph of each question."""
    rows = [json.loads(line) for line in (real_data / "xquad_en.jsonl").read_text(encoding="utf-8").splitlines()]
    paragraphs = list(dict.fromkeys(row["context"] for row in rows))
    answered = [row for row in rows if row["answers"]["text"]]
    return [row["question"] for row in answered], paragraphs, [paragraphs.index(row["context"]) for row in answered]


@pytest.fixture(scope="module")
def build(real_models: RealModels, quick_build: Any) -> Callable[[str], Path]:
    return lambda name: quick_build(real_models(name), variants=[VARIANT], data=None, threads=None).path


def mean_ndcg(scores: Any, answers: list[int]) -> float:
    relevance = np.eye(scores.shape[1])[answers]
    return float(np.mean([ndcg(row, relevant) for row, relevant in zip(scores, relevance, strict=True)]))


def test_splade_retrieves_as_published(build: Any, real_models: RealModels, questions: Any) -> None:
    from sentence_transformers import SparseEncoder

    texts, paragraphs, answers = questions
    bundle = build("splade")
    # Zeros compress well: more rows would be rejected as a bundle that expands to fill the memory.
    assert len(open_bundle(bundle).reference().rows) == 2**24 // (4 * 30522)
    with hasten.load(bundle) as embed:
        size = embed.session.spec.signature.outputs[0].shape[1]

        def dense(answers: list[Any]) -> Any:
            weights = np.zeros((len(answers), size), np.float32)
            for row, answer in zip(weights, answers, strict=True):
                row[answer["indices"]] = answer["values"]
            return weights

        queries, documents = dense(embed(texts)), dense(embed(paragraphs))
    assert mean_ndcg(queries @ documents.T, answers) == pytest.approx(PUBLISHED["splade"], abs=5e-4)
    original = SparseEncoder(str(real_models("splade")), device="cpu", local_files_only=True)
    theirs = original.encode(paragraphs[:COMPARED], convert_to_sparse_tensor=False).numpy()
    np.testing.assert_allclose(documents[:COMPARED], theirs, rtol=0, atol=1e-4)


def test_colbert_retrieves_as_published(build: Any, real_models: RealModels, questions: Any) -> None:
    from sentence_transformers import MultiVectorEncoder

    texts, paragraphs, answers = questions
    with hasten.load(build("colbert")) as embed:
        queries, documents = embed(texts, input_type="query"), embed(paragraphs)
    scores = np.array([max_sim(query, documents, is_mean=False) for query in queries])
    assert mean_ndcg(scores, answers) == pytest.approx(PUBLISHED["colbert"], abs=5e-4)
    original = MultiVectorEncoder(str(real_models("colbert")), device="cpu", local_files_only=True)
    encoded = (original.encode_query(texts[:COMPARED]), original.encode_document(paragraphs[:COMPARED]))
    for ours, theirs in zip((queries, documents), encoded, strict=True):
        for our, their in zip(ours, theirs, strict=False):
            np.testing.assert_allclose(our, their.numpy(), rtol=0, atol=1e-4)
    np.testing.assert_allclose(scores[:COMPARED, :COMPARED], original.similarity(*encoded).numpy(), rtol=1e-4)
