"""A bundle returns the token vectors of transformers' pipeline, as arrays."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hasten
from hasten.core.errors import InputError

ARCHITECTURES = ("bert", "roberta", "distilbert", "electra")
LONG = "the cat sat on the mat and a dog ran across the green field " * 12
TEXTS = [
    "rain",
    "The Cat sat on the MAT, again!",
    "emoji 🐈 and 👩‍👩‍👧‍👦 family",
    "control\u0007 and \u0000 null\ttab\nline",
    "cafe\u0301 nai\u0308ve Übergröße",
    "東京は日本の首都です。서울 हिन्दी",
    "[CLS] [MASK] [SEP] <s> <mask> </s>",
    LONG,
]
words = st.sampled_from(["the", "cat", "rain", ",", "🐈", "e\u0301", "東京", "\x07", "\n", "don't", "[MASK]", "q" * 30])
odd = st.text(st.characters(codec="utf-8"), max_size=12)
texts = st.lists(words | odd, min_size=1, max_size=50).map(" ".join).filter(lambda text: bool(text.strip()))


@dataclass
class Extractor:
    predictor: hasten.Predictor
    pipeline: Any

    def assert_same(self, payload: list[str]) -> int:
        """Compare the answers; return the number of compared vectors."""
        ours, theirs = self.predictor(payload), self.pipeline(payload, truncation=True)
        assert isinstance(ours, list)
        assert len(ours) == len(theirs)
        for our, their in zip(ours, theirs, strict=True):
            assert our.dtype == np.float32
            assert our.shape == np.shape(their)
            np.testing.assert_allclose(our, their, atol=1e-4)
        return sum(our.shape[1] for our in ours)


@pytest.fixture(scope="module")
def extractors(tiny_model: Any, quick_build: Any) -> Callable[[str], Extractor]:
    """Return an extractor per architecture, built once; the task of a model without a head is detected."""

    @cache
    def get(architecture: str) -> Extractor:
        import transformers

        model = tiny_model(architecture, "Model")
        bundle = quick_build(model, variants=["onnxruntime-fp32"])
        assert bundle.manifest.task.name == "feature-extraction"
        pipeline = transformers.pipeline("feature-extraction", str(model), device="cpu")
        return Extractor(hasten.load(bundle.path, threads=1), pipeline)

    return get


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_extracts_like_the_pipeline(extractors: Any, architecture: str) -> None:
    extractor = extractors(architecture)
    assert extractor.assert_same(TEXTS) > 3 * len(TEXTS)
    extractor.assert_same(TEXTS[:1])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_vectors_of_generated_texts_equal_the_pipelines(extractors: Any, architecture: str) -> None:
    extractor = extractors(architecture)
    compared = 0

    @settings(max_examples=6, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(texts, min_size=10, max_size=10, unique=True))
    def check(drawn: list[str]) -> None:
        nonlocal compared
        compared += extractor.assert_same(drawn)

    check()
    assert compared > 60 * 3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_answer_has_the_shape_of_the_payload(extractors: Any, architecture: str) -> None:
    extractor = extractors(architecture)
    alone = extractor.predictor("the cat")
    np.testing.assert_allclose(alone, extractor.pipeline("the cat"), atol=1e-4)
    np.testing.assert_array_equal(alone, np.asarray(extractor.predictor(["the cat"]))[0])
    np.testing.assert_array_equal(alone, extractor.predictor({"text": "the cat", "label": 3}))


def test_pair_is_one_row(extractors: Any) -> None:
    import torch

    extractor = extractors("bert")
    tokenizer, model = extractor.pipeline.tokenizer, extractor.pipeline.model
    with torch.inference_mode():
        theirs = model(**tokenizer("the cat", "a dog", return_tensors="pt")).last_hidden_state.numpy()
    np.testing.assert_allclose(extractor.predictor({"text": "the cat", "text_pair": "a dog"}), theirs, atol=1e-4)


def test_long_text_is_truncated_or_rejected(extractors: Any, caplog: pytest.LogCaptureFixture) -> None:
    predictor = extractors("bert").predictor
    with caplog.at_level(logging.WARNING, "hasten"):
        assert predictor([LONG])[0].shape == (1, 64, 32)
    assert "text 1 was truncated to the model's limit of 64 tokens" in caplog.text
    with pytest.raises(InputError, match="text 2 is longer than the model's limit of 64 tokens"):
        predictor(["short", LONG], truncation=False)
    assert predictor("short", truncation=False).ndim == 3


@pytest.mark.parametrize("payload", [[], "", [" \n"], 7, None, {"txt": "a"}, ["a", None], [["a", "b"]], "\ud800"])
def test_invalid_text_raises_input_error(extractors: Any, payload: object) -> None:
    with pytest.raises(InputError):
        extractors("bert").predictor(payload)


@pytest.mark.parametrize("options", [{"truncation": "maybe"}, {"return_tensors": True}, {"tokenize_kwargs": {}}])
def test_invalid_option_raises_input_error(extractors: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        extractors("bert").predictor("a text", **options)


def test_model_with_a_head_returns_token_vectors(tiny_model: Any, quick_build: Any) -> None:
    """The head is dropped, as AutoModel does."""
    model = tiny_model("bert", "ForMaskedLM")
    bundle = quick_build(model, variants=["onnxruntime-fp32", "openvino-fp32"], task="feature-extraction", keep="all")
    first, second = (
        hasten.load(bundle.path, name, threads=1)("a dog") for name in ("onnxruntime-fp32", "openvino-fp32")
    )
    assert first.shape[2] == 32
    np.testing.assert_allclose(first, second, atol=1e-4)


def test_size_of_reference_outputs_is_bounded(tiny_model: Any, quick_build: Any, monkeypatch: Any) -> None:
    """The vectors of all tokens of the built-in sample are large; the first rows are enough."""
    from hasten.core.progress import SilentProgress
    from hasten.measure.verify_bundle import verify_bundle

    monkeypatch.setattr("hasten.builder.encoder_build._MAX_REFERENCE_BYTES", 2**18)
    bundle = quick_build(tiny_model("bert", "Model"), variants=["onnxruntime-fp32"], data=None)
    reference = bundle.reference()
    assert 16 <= len(reference.rows) < 100
    assert sum(value.nbytes for value in reference.outputs.values()) < 2**19
    assert all(
        candidate.verdict is not None and candidate.verdict.passed
        for candidate in verify_bundle(bundle, None, bundle.manifest.gate, (), 1, SilentProgress())
    )
