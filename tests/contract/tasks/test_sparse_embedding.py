"""A bundle of a sparse encoder answers like sentence-transformers' SparseEncoder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.cli import main
from hasten.core.errors import InputError, PlanError, UnsupportedError
from support.models import sentence_layouts, tiny_encoders

LONG = "the cat sat on the mat and a dog ran across the green field " * 12
TEXTS = ["rain", "The Cat sat on the MAT", "a dog ran across the green field after the red ball", LONG]
PROMPTS = {"query": "what is ", "document": ""}
LAYOUTS: dict[str, dict[str, Any]] = {
    "splade": {"prompts": PROMPTS},
    "opensearch": {"pooling": {"activation_function": "log1p_relu"}},
    "five terms, cosine": {
        "pooling": {"pooling_strategy": "sum"},
        "max_active_dims": 5,
        "similarity_fn_name": "cosine",
    },
    "roberta": {"architecture": "roberta"},
}


@dataclass
class SparseModel:
    path: Path
    bundle: hasten.Bundle
    predictor: hasten.Predictor
    original: Any

    def dense(self, texts: list[str], **options: Any) -> Any:
        """Return our answers as sentence-transformers returns them: a column per term."""
        answers = self.predictor(texts, **options)
        weights = np.zeros((len(texts), self.original.get_embedding_dimension()), np.float32)
        for row, answer in zip(weights, answers, strict=True):
            assert (answer["values"] > 0).all()
            assert (np.diff(answer["indices"]) > 0).all()
            row[answer["indices"]] = answer["values"]
        return weights

    def assert_same(self, texts: list[str], theirs: Any, **options: Any) -> None:
        np.testing.assert_allclose(self.dense(texts, **options), theirs.to_dense().numpy(), rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def sparse_models(quick_build: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SparseModel]:
    """Return a model per layout, built once; the tiny vocabularies are pooled in several blocks too."""

    @cache
    def get(layout: str) -> SparseModel:
        from sentence_transformers import SparseEncoder

        path = sentence_layouts.save_sparse(tmp_path_factory.mktemp("models"), **LAYOUTS[layout])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hasten.builder.sources.export_wrapper._BLOCK_TERMS", 40)
            bundle = quick_build(path, variants=["onnxruntime-fp32"])
        original = SparseEncoder(str(path), device="cpu", local_files_only=True)
        return SparseModel(path, bundle, hasten.load(bundle.path, threads=1), original)

    return get


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_equal_sentence_transformers(sparse_models: Any, layout: str) -> None:
    model = sparse_models(layout)
    assert model.bundle.manifest.task.name == "sparse-embedding"
    model.assert_same(TEXTS, model.original.encode(TEXTS))


@pytest.mark.parametrize("count", [1, 7, 10_000])
def test_largest_weights_are_kept(sparse_models: Any, count: int) -> None:
    model = sparse_models("splade")
    model.assert_same(TEXTS, model.original.encode(TEXTS, max_active_dims=count), max_active_dims=count)
    assert max(len(answer["values"]) for answer in model.predictor(TEXTS, max_active_dims=count)) <= count


def test_named_prompt_equals_encode_query(sparse_models: Any) -> None:
    model = sparse_models("splade")
    model.assert_same(TEXTS, model.original.encode_query(TEXTS), prompt_name="query")
    model.assert_same(TEXTS, model.original.encode_document(TEXTS), prompt_name="document")


@pytest.mark.parametrize("layout", ["splade", "five terms, cosine"])
def test_pair_is_answered_with_the_models_similarity(sparse_models: Any, layout: str) -> None:
    model = sparse_models(layout)
    first, second = (model.original.encode([text], convert_to_sparse_tensor=False) for text in TEXTS[1:3])
    expected = float(model.original.similarity(first, second)[0, 0])
    pair = {"text": TEXTS[1], "text_pair": TEXTS[2]}
    assert model.predictor(pair) == pytest.approx(expected, rel=1e-4)
    text, similarity = model.predictor([TEXTS[0], pair])
    assert set(text) == {"indices", "values"}
    assert similarity == pytest.approx(expected, rel=1e-4)


def test_terms_are_printed_with_their_tokens(sparse_models: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = sparse_models("splade")
    assert main(["run", str(model.bundle.path), "rain", "--threads", "1"]) == 0
    printed = capsys.readouterr().out
    answer = model.predictor("rain")
    strongest = int(answer["indices"][answer["values"].argmax()])
    assert model.predictor.tokenizer.token(strongest) in printed
    assert main(["run", str(model.bundle.path), "rain", "--json", "--threads", "1"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["indices"] == answer["indices"].tolist()


def test_int8_variant_is_judged_by_the_lowest_measure(sparse_models: Any, quick_build: Any) -> None:
    names = ["onnxruntime-fp32", "onnxruntime-int8"]
    bundle = quick_build(sparse_models("splade").path, variants=names, min_agreement=0.5)
    agreement = next(row.verdict.agreement for row in bundle.report.candidates if row.variant == names[1])
    assert agreement.measure in ("mean cosine", "shared terms", "rank correlation")
    assert agreement.value <= min(agreement.cosine_mean, agreement.rank_correlation) < 1


@pytest.mark.parametrize("options", [{"max_active_dims": 0}, {"max_active_dims": "2"}, {"prompt_name": "passage"}])
def test_invalid_option_is_an_input_error(sparse_models: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        sparse_models("splade").predictor("rain", **options)


def test_masked_language_model_without_a_layout_needs_the_task(
    sparse_models: Any, quick_build: Any, load_tiny: Any, tmp_path: Path
) -> None:
    """Published SPLADE models often have no modules; sentence-transformers takes the maximum then."""
    model = sparse_models("splade")
    source = shutil.copytree(
        model.path, tmp_path / "model", ignore=shutil.ignore_patterns("modules.json", "1_*", "*sentence*")
    )
    assert load_tiny(source).task.name == "fill-mask"
    bundle = quick_build(source, variants=["onnxruntime-fp32"], task="sparse-embedding")
    ours, theirs = hasten.load(bundle.path, threads=1)("rain"), model.predictor("rain")
    np.testing.assert_allclose(ours["values"], theirs["values"], atol=1e-5)


def test_unsupported_layout_is_rejected(sparse_models: Any, load_tiny: Any, tmp_path: Path) -> None:
    source = shutil.copytree(sparse_models("splade").path, tmp_path / "model")
    config = source / "1_SpladePooling" / "config.json"
    config.write_text('{"pooling_strategy": "mean"}')
    with pytest.raises(UnsupportedError, match="pools its logits by 'mean'"):
        load_tiny(source)
    modules = source / "modules.json"
    modules.write_text(modules.read_text().replace("SpladePooling", "SparseAutoEncoder"))
    with pytest.raises(UnsupportedError, match="Transformer → SparseAutoEncoder, which is not supported"):
        load_tiny(source)


def test_model_without_a_vocabulary_head_is_rejected(load_tiny: Any, tmp_path: Path) -> None:
    tiny_encoders.save("bert", "Model", tmp_path)
    with pytest.raises(PlanError, match="no head for sparse-embedding"):
        load_tiny(tmp_path, task="sparse-embedding")
