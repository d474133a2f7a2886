"""A bundle answers like transformers' pipeline and sentence-transformers' encode."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

import hasten
from hasten.core.errors import InputError
from support.strategies import batches, two_hundred

LONG = "the cat sat on the mat and a dog ran across the green field " * 12


def assert_same(ours: object, theirs: object, tolerance: float) -> None:
    """Assert equal structure and labels, and scores within the tolerance."""
    if isinstance(theirs, list):
        assert isinstance(ours, list)
        assert len(ours) == len(theirs)
        for our, their in zip(ours, theirs, strict=True):
            assert_same(our, their, tolerance)
    elif isinstance(theirs, dict):
        assert isinstance(ours, dict)
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert_same(ours[key], value, tolerance)
    elif isinstance(theirs, float):
        assert isinstance(ours, float)
        assert ours == pytest.approx(theirs, abs=tolerance)
    else:
        assert ours == theirs


# ---- text-classification

CLASSIFIERS: dict[str, dict[str, Any]] = {
    "bert": {"architecture": "bert"},
    "distilbert": {"architecture": "distilbert"},
    "roberta": {"architecture": "roberta"},
    "electra": {"architecture": "electra"},
    "multi-label": {"problem": "multi_label_classification"},
    "regression": {"problem": "regression", "labels": ("rating",)},
    "one label": {"labels": ("spam",)},
}
PAYLOADS: list[Any] = [
    "the cat sat on the mat",
    ["the cat sat on the mat"],
    ["rain", "what a wonderful film, I would watch it again tomorrow", "a dog", "Ein Übergröße-Test, 42 €"],
    {"text": "the plot is dull"},
    {"text": "is this the right answer?", "text_pair": "prices rose by three percent"},
    [{"text": "old books", "text_pair": "the sea"}, {"text": "the acting", "text_pair": "a wonderful film, again"}],
    [{"text": "a dog ran"}, {"text": "a dog ran", "text_pair": "after the red ball"}],
]
TOO_LONG: dict[str, Any] = {
    "text": LONG,
    "long first": {"text": LONG, "text_pair": "short"},
    "long second": {"text": "short", "text_pair": LONG},
    "long both": {"text": LONG, "text_pair": LONG},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "all labels": {"top_k": None},
    "top 1": {"top_k": 1},
    "top 2": {"top_k": 2},
    "more than there are": {"top_k": 99},
    "raw": {"function_to_apply": "none", "top_k": None},
    "sigmoid": {"function_to_apply": "sigmoid", "top_k": None},
    "softmax": {"function_to_apply": "softmax"},
}


@dataclass
class Classifier:
    predictor: hasten.Predictor
    pipeline: Any


@pytest.fixture(scope="module")
def classifiers(tiny_classifier: Any, quick_build: Any) -> Callable[[str], Classifier]:
    """Return a classifier per model, built once."""

    @cache
    def get(name: str) -> Classifier:
        import transformers

        model = tiny_classifier(**CLASSIFIERS[name])
        bundle = quick_build(model, variants=["onnxruntime-fp32"])
        original = transformers.pipeline("text-classification", str(model), device="cpu")
        return Classifier(hasten.load(bundle.path, threads=1), original)

    return get


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifies_like_the_pipeline(classifiers: Any, name: str, options: str) -> None:
    classifier, options_of_case = classifiers(name), OPTIONS[options]
    for payload in PAYLOADS:
        assert_same(
            classifier.predictor(payload, **options_of_case), classifier.pipeline(payload, **options_of_case), 1e-4
        )


@pytest.mark.parametrize("payload", TOO_LONG.values(), ids=list(TOO_LONG))
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_long_text_is_truncated_at_the_models_limit(
    classifiers: Any, name: str, payload: object, caplog: pytest.LogCaptureFixture
) -> None:
    """The tokenizers have no limit, and RoBERTa's position table is two longer than its texts."""
    classifier = classifiers(name)
    assert classifier.predictor.tokenizer.spec.max_length == 64
    with caplog.at_level(logging.WARNING, "hasten"):
        ours = classifier.predictor([payload])
    assert_same(ours, classifier.pipeline([payload], truncation=True, max_length=64), 1e-4)
    assert "truncated to the model's limit of 64 tokens" in caplog.text


def test_short_text_is_not_reported_as_truncated(classifiers: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hasten"):
        classifiers("bert").predictor("the cat")
    assert not caplog.records


def test_smaller_of_two_limits_counts(tiny_classifier: Any, load_tiny: Any, tmp_path: Path) -> None:
    import transformers

    model = shutil.copytree(tiny_classifier("bert"), tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(model, model_max_length=24).save_pretrained(model)
    assert load_tiny(model).signature.max_length == 24


@pytest.mark.parametrize("payload", [[], "", [" \n"], 7, None, {"txt": "a"}, ["a", None], [["a", "b"]], "\ud800"])
def test_invalid_text_raises_input_error(classifiers: Any, payload: object) -> None:
    with pytest.raises(InputError):
        classifiers("bert").predictor(payload)


@pytest.mark.parametrize("options", [{"top_k": 0}, {"top_k": "two"}, {"function_to_apply": "tanh"}, {"topk": 1}])
def test_invalid_option_raises_input_error(classifiers: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        classifiers("bert").predictor("a text", **options)


def test_extreme_scores_raise_no_warning(classifiers: Any) -> None:
    """Warnings are errors here: a logit of -200 overflows a naive sigmoid."""
    predictor = classifiers("one label").predictor
    encoded = predictor.encode(["a", "b"])
    options = predictor.task.options(predictor.spec, {"function_to_apply": "sigmoid"})
    outputs = {"logits": np.array([[-200.0], [200.0]], np.float32)}
    scores = [answer["score"] for answer in predictor.task.decode(outputs, encoded, options)]
    assert scores == pytest.approx([0.0, 1.0])


def test_predictor_is_thread_safe(classifiers: Any, corpus: tuple[str, ...]) -> None:
    predictor = classifiers("bert").predictor

    def ask(_: int) -> list[object]:
        return [predictor(text) for text in corpus]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(ask, range(8)))
    assert all(answers == results[0] for answers in results)
    assert_same(results[0], ask(0), 1e-6)


def test_generated_texts_are_classified_like_the_pipeline(classifiers: Any) -> None:
    classifier = classifiers("bert")
    drawn: list[str] = []

    @two_hundred
    @given(batches)
    def check(batch: list[str]) -> None:
        drawn.extend(batch)
        options_of_case = {"top_k": None, "function_to_apply": "softmax"}
        ours, theirs = (
            classifier.predictor(batch, **options_of_case),
            classifier.pipeline(batch, truncation=True, max_length=64, **options_of_case),
        )
        for our, their in zip(ours, theirs, strict=True):
            assert [entry["label"] for entry in our] == [entry["label"] for entry in their]
        assert_same(ours, theirs, 1e-4)

    check()
    assert len(set(drawn)) >= 200


# ---- sentence-similarity

TEXTS = ["rain", "The Cat sat on the MAT", "a dog ran across the green field after the red ball", LONG]
QUERY = {"query": "find: ", "document": ""}
LAYOUTS: dict[str, dict[str, Any]] = {
    **{name: {"pooling": name} for name in ("mean", "cls", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens")},
    "several": {"pooling": ["lasttoken", "mean"]},
    "older flags": {
        "pooling": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True, "pooling_mode_max_tokens": False}
    },
    "any length": {"modules": ()},
    "any length, max": {"modules": (), "pooling": "max"},
    "dense": {"modules": ("Dense", "Normalize")},
    "two dense": {
        "modules": ("Dense", "Dense"),
        "dense": {"out_features": 32, "bias": False, "activation_function": "torch.nn.modules.activation.GELU"},
    },
    "linear": {"modules": ("Dense",), "dense": {"activation_function": "torch.nn.modules.linear.Identity"}},
    "prompts": {"prompts": QUERY},
    "default prompt": {"prompts": QUERY, "default_prompt_name": "query"},
    "default prompt that is empty": {"prompts": QUERY, "default_prompt_name": "document"},
    "lowercased": {"cased": True, "do_lower_case": True},
    "cased": {"cased": True},
    "no limit of its own": {"max_seq_length": None},
    "a limit beyond the tokenizer's": {"max_seq_length": 48, "tokenizer_max_length": 16},
}
# Beyond pooling, dense layers and a final normalisation: must be rejected or correct, never approximated.
# Instructor's pooling: the tokens of the prompt are left out.
WITHOUT_PROMPT = {
    f"{name} without the prompt": {
        "pooling": {"pooling_mode": name, "include_prompt": False},
        "prompts": QUERY,
        "default_prompt_name": "query",
    }
    for name in ("mean", "cls", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens")
}
BEYOND: dict[str, dict[str, Any]] = {
    "normalized before a dense layer": {"modules": ("Normalize", "Dense")},
    "a residual around a dense layer": {"modules": ("Dense",), "dense": {"out_features": 32, "use_residual": True}},
}


@dataclass
class Embedder:
    predictor: hasten.Predictor
    original: Any

    def assert_same(self, texts: str | list[str], **options: Any) -> None:
        ours, theirs = self.predictor(texts, **options), self.original.encode(texts, **options)
        assert isinstance(ours, np.ndarray)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        # Absolute for unit vectors; sums over tokens are larger, and so is their rounding error.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * max(1.0, np.abs(theirs).max()))


def sentence_transformer(model: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(model), device="cpu", local_files_only=True)


@pytest.fixture(scope="module")
def embedders(tiny_embedder: Any, quick_build: Any) -> Callable[[str], Embedder]:
    """Return an embedder per layout, built once."""

    @cache
    def get(layout: str) -> Embedder:
        model = tiny_embedder(**(LAYOUTS | WITHOUT_PROMPT | BEYOND)[layout])
        bundle = quick_build(model, variants=["onnxruntime-fp32"])
        return Embedder(hasten.load(bundle.path, threads=1), sentence_transformer(model))

    return get


@pytest.mark.parametrize("layout", LAYOUTS)
def test_embeds_like_sentence_transformers(embedders: Any, layout: str) -> None:
    embedders(layout).assert_same(TEXTS)


@pytest.mark.parametrize("layout", WITHOUT_PROMPT)
def test_prompt_is_left_out_of_the_pooling(embedders: Any, layout: str) -> None:
    embedder = embedders(layout)
    for options in ({}, {"prompt_name": "document"}, {"prompt": "translate: "}, {"prompt": "a red ball 🐈"}):
        embedder.assert_same(TEXTS, **options)
    without, included = embedder.predictor("rain", prompt="the cat "), embedder.predictor("the cat rain", prompt="")
    # The prompt does not contain the last token.
    assert (np.abs(without - included).max() > 1e-3) == (not layout.startswith("lasttoken"))


@pytest.mark.parametrize("layout", BEYOND)
def test_unsupported_layout_is_rejected_or_correct(embedders: Any, layout: str) -> None:
    try:
        embedder = embedders(layout)
    except hasten.UnsupportedError:
        return
    embedder.assert_same(TEXTS)


def test_text_returns_a_vector_and_a_list_a_matrix(embedders: Any) -> None:
    embedder = embedders("mean")
    embedder.assert_same("rain")
    embedder.assert_same(["rain"])


@pytest.mark.parametrize("name", ["query", "document"])
def test_named_prompt_equals_sentence_transformers(embedders: Any, name: str) -> None:
    embedders("prompts").assert_same(TEXTS, prompt_name=name)


def test_custom_prompt_equals_sentence_transformers(embedders: Any) -> None:
    embedders("prompts").assert_same(TEXTS, prompt="translate: ")


def test_prompt_changes_the_answer(embedders: Any) -> None:
    predictor = embedders("prompts").predictor
    assert not np.allclose(predictor("rain"), predictor("rain", prompt_name="query"), atol=1e-3)


def test_unknown_prompt_is_an_input_error(embedders: Any) -> None:
    with pytest.raises(InputError, match="query"):
        embedders("prompts").predictor("rain", prompt_name="qery")


@pytest.mark.parametrize("layout", ["mean", "any length"])
def test_pair_is_answered_with_its_cosine(embedders: Any, layout: str) -> None:
    from sentence_transformers.util import cos_sim

    embedder = embedders(layout)
    pairs = [{"text": "the cat", "text_pair": "a dog"}, {"text": "rain", "text_pair": "rain"}]
    theirs = [float(cos_sim(*embedder.original.encode([pair["text"], pair["text_pair"]]))) for pair in pairs]
    assert embedder.predictor(pairs[0]) == pytest.approx(theirs[0], abs=1e-5)
    np.testing.assert_allclose(embedder.predictor(pairs), theirs, atol=1e-5)


def test_lowercasing_follows_the_layout(embedders: Any) -> None:
    lower, cased = embedders("lowercased").predictor, embedders("cased").predictor
    np.testing.assert_array_equal(lower("THE CAT"), lower("the cat"))
    assert not np.allclose(cased("THE CAT"), cased("the cat"), atol=1e-3)


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_pooling_option_applies_without_a_layout(
    tiny_embedder: Any, quick_build: Any, tmp_path: Path, pooling: str
) -> None:
    model = shutil.copytree(
        tiny_embedder(), tmp_path / "model", ignore=shutil.ignore_patterns("modules.json", "1_*", "2_*", "*sentence*")
    )
    bundle = quick_build(model, variants=["onnxruntime-fp32"], pooling=pooling)
    theirs = sentence_transformer(tiny_embedder(pooling=pooling, modules=(), max_seq_length=64))
    np.testing.assert_allclose(hasten.load(bundle.path, threads=1)(TEXTS), theirs.encode(TEXTS), atol=3e-5)


def test_generated_texts_are_embedded_like_the_reference(embedders: Any) -> None:
    embedder = embedders("mean")
    drawn: list[str] = []

    @two_hundred
    @given(batches)
    def check(batch: list[str]) -> None:
        drawn.extend(batch)
        embedder.assert_same(batch)

    check()
    assert len(set(drawn)) >= 200
