"""A bundle of a multi-vector encoder answers like sentence-transformers' MultiVectorEncoder."""

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
TEXTS = ["rain", "The Cat sat on the MAT, did it?", "a dog ran across the green field after the red ball.", LONG]
FIXED = {"strategy": "fixed", "length": 12}
LAYOUTS: dict[str, dict[str, Any]] = {
    "colbert": {"expansion": FIXED, "prompts": {"query": "what is ", "document": "is "}},
    "attended expansion": {"expansion": {**FIXED, "strategy": "min", "attend": True, "token": "a"}},
    "mean, not normalized": {"similarity_fn_name": "meanmaxsim", "normalize": False},
}


def as_pylate(source: Path, folder: Path) -> Path:
    """Return a copy in the form of PyLate 3, which stores most settings at the top and lists no mask."""
    model = shutil.copytree(source, folder)
    modules = json.loads((model / "modules.json").read_text())[:2]
    modules[1]["type"] = "pylate.models.Dense.Dense"
    (model / "modules.json").write_text(json.dumps(modules))
    (model / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 31}))
    dense = model / modules[1]["path"] / "config.json"
    dense.write_text(
        json.dumps({key: value for key, value in json.loads(dense.read_text()).items() if "module" not in key})
    )
    settings = {"query_prefix": "[unused1] ", "document_prefix": "dog ", "query_length": 10, "document_length": 20}
    settings |= {"model_type": "ColBERT", "attend_to_expansion_tokens": False, "similarity_fn_name": "MaxSim"}
    (model / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return model


def as_stanford(source: Path, folder: Path) -> Path:
    """Return a copy in the form of Stanford's ColBERT: the projection is beside the weights of the transformer."""
    from safetensors.numpy import load_file, save_file

    model = shutil.copytree(source, folder, ignore=shutil.ignore_patterns("[1-9]_*", "modules.json", "*sentence*"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
    weights = {f"bert.{name}": value for name, value in load_file(model / "model.safetensors").items()}
    weights |= load_file(source / "1_Dense" / "model.safetensors")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    metadata = {"query_token_id": "cat", "doc_token_id": "dog", "doc_maxlen": 24, "query_maxlen": 9}
    (model / "artifact.metadata").write_text(json.dumps(metadata))
    return model


@dataclass
class MultiVectorModel:
    path: Path
    bundle: hasten.Bundle
    predictor: hasten.Predictor
    original: Any

    def assert_same(self, **options: Any) -> None:
        encode = self.original.encode_query if options["input_type"] == "query" else self.original.encode_document
        theirs = encode(TEXTS, convert_to_numpy=True)
        for our, their in zip(self.predictor(TEXTS, **options), theirs, strict=True):
            assert our.shape == their.shape
            np.testing.assert_allclose(our, their, rtol=0, atol=1e-4)

    def scores(self, query: str, documents: list[str]) -> Any:
        return self.original.similarity(self.original.encode_query([query]), self.original.encode_document(documents))[
            0
        ].numpy()


@pytest.fixture(scope="module")
def multi_vector_models(
    quick_build: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], MultiVectorModel]:
    """Return a model per layout, built once."""

    @cache
    def get(layout: str) -> MultiVectorModel:
        from sentence_transformers import MultiVectorEncoder

        folder = tmp_path_factory.mktemp("models")
        path = sentence_layouts.save_multi_vector(folder, **LAYOUTS.get(layout, {}))
        convert = {"pylate": as_pylate, "stanford": as_stanford}.get(layout)
        path = path if convert is None else convert(path, folder / layout)
        bundle = quick_build(path, variants=["onnxruntime-fp32"])
        assert bundle.manifest.task.name == "multi-vector-embedding"
        original = MultiVectorEncoder(str(path), device="cpu", local_files_only=True)
        return MultiVectorModel(path, bundle, hasten.load(bundle.path, threads=1), original)

    return get


@pytest.mark.parametrize("side", ["query", "document"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "pylate", "stanford"])
def test_vectors_equal_sentence_transformers(multi_vector_models: Any, layout: str, side: str) -> None:
    multi_vector_models(layout).assert_same(input_type=side)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_are_ranked_by_max_sim(multi_vector_models: Any, layout: str) -> None:
    model = multi_vector_models(layout)
    expected = model.scores(TEXTS[1], TEXTS)
    ranking = model.predictor({"query": TEXTS[1], "documents": TEXTS}, top_k=3, return_documents=True)
    assert [entry["corpus_id"] for entry in ranking] == np.argsort(-expected)[:3].tolist()
    for entry in ranking:
        assert entry["score"] == pytest.approx(float(expected[entry["corpus_id"]]), rel=1e-4)
        assert entry["text"] == TEXTS[entry["corpus_id"]]


def test_pair_is_answered_with_its_score(multi_vector_models: Any) -> None:
    model = multi_vector_models("colbert")
    pairs = [{"text": TEXTS[1], "text_pair": text} for text in TEXTS]
    expected = model.scores(TEXTS[1], TEXTS)
    np.testing.assert_allclose(model.predictor(pairs), expected, rtol=1e-4)
    mixed = model.predictor([TEXTS[0], pairs[2], {"query": TEXTS[1], "documents": TEXTS[:1]}])
    np.testing.assert_array_equal(mixed[0], model.predictor(TEXTS[0]))
    assert (mixed[1], mixed[2][0]["score"]) == pytest.approx((expected[2], expected[0]), rel=1e-4)


def test_expansion_is_not_attended_to(multi_vector_models: Any) -> None:
    """Without the mask over the tokens that fill a query, its other tokens would have other vectors."""
    predictor = multi_vector_models("colbert").predictor
    encoded = predictor.task.encode(
        ["rain"], predictor.tokenizer, predictor.task.options(predictor.spec, {"input_type": "query"})
    )
    marks = encoded.batch.values["expansion_mask"]
    assert encoded.batch.lengths.tolist() == [12]
    assert 0 < marks.sum() < 12
    vectors = predictor.outputs(encoded)["token_embeddings"]
    encoded.batch.values["expansion_mask"][:] = 0
    assert np.abs(predictor.outputs(encoded)["token_embeddings"] - vectors)[marks == 0].max() > 1e-3


def test_reduced_precision_is_judged_by_max_sim(multi_vector_models: Any, quick_build: Any, tmp_path: Path) -> None:
    rows = [
        {"query": TEXTS[index], "documents": TEXTS, "relevance": [int(other == index) for other in range(4)]}
        for index in range(4)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = ["onnxruntime-fp32", "onnxruntime-int8"]
    bundle = quick_build(multi_vector_models("colbert").path, variants=names, data=data, min_agreement=0.3)
    verdict = next(row.verdict for row in bundle.report.candidates if row.variant == names[1])
    assert verdict.metric.name == "nDCG@10"
    assert verdict.agreement.measure == "mean cosine" or verdict.agreement.measure.startswith("MaxSim")
    assert verdict.agreement.value <= min(verdict.agreement.cosine_mean, verdict.agreement.rank_correlation)


def test_sizes_of_vectors_are_printed(multi_vector_models: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = multi_vector_models("colbert")
    assert main(["run", str(model.bundle.path), "rain", "-O", "input_type=query", "--threads", "1"]) == 0
    assert "12 tokens × 24 numbers" in capsys.readouterr().out


@pytest.mark.parametrize("options", [{"input_type": "passage"}, {"top_k": 0}, {"prompt_name": "passage"}])
def test_invalid_option_is_an_input_error(multi_vector_models: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        multi_vector_models("colbert").predictor("rain", **options)


@pytest.mark.parametrize(
    "payload", [[], "", 7, {"query": "a"}, {"text": None}, [["a"]], {"query": "a", "documents": []}]
)
def test_invalid_item_is_an_input_error(multi_vector_models: Any, payload: object) -> None:
    with pytest.raises(InputError):
        multi_vector_models("colbert").predictor(payload)


def test_unsupported_layout_is_rejected(multi_vector_models: Any, load_tiny: Any, tmp_path: Path) -> None:
    source = shutil.copytree(multi_vector_models("colbert").path, tmp_path / "model")
    modules = source / "modules.json"
    supported = modules.read_text()
    modules.write_text(supported.replace("modules.normalize.Normalize", "modules.HierarchicalTokenPooling"))
    with pytest.raises(UnsupportedError, match="HierarchicalTokenPooling, which is not supported"):
        load_tiny(source)
    modules.write_text(supported)
    settings = source / "sentence_bert_config.json"
    settings.write_text(json.dumps({"document_length": "long"}))
    with pytest.raises(UnsupportedError, match="unsupported document_length 'long'"):
        load_tiny(source)
    settings.write_text(json.dumps({"query_expansion": {"strategy": "repeat", "length": 8}}))
    with pytest.raises(UnsupportedError, match="expands queries in an unsupported way"):
        load_tiny(source)
    tiny_encoders.save("bert", "Model", tmp_path / "plain")
    with pytest.raises(PlanError, match="its projection is unknown"):
        load_tiny(tmp_path / "plain", task="multi-vector-embedding")
