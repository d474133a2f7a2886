"""A bundle scores and ranks as sentence-transformers' CrossEncoder does, whatever version saved the model."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import hasten
from hasten.core.errors import InputError
from hasten.core.progress import Silent
from hasten.core.ranking import average_precision, ndcg, reciprocal_rank
from hasten.measure.reverify import reverify
from hasten.predictor import Predictor

LONG = "the cat sat on the mat and a dog ran across the green field " * 12
QUERY = "is this the right answer to the question?"
DOCUMENTS = [
    "the cat sat on the mat",
    "what a wonderful film, I would watch it again tomorrow",
    "x",
    "  spaces   around\tand\nbetween  ",
    "Ein Übergröße-Test für Zürich, 42 €",
    "cafe\u0301 nai\u0308ve \u0301",
    "東京は日本の首都です。",
    "the cat 🐈 sat on 👩‍👩‍👧‍👦 the mat",
    "control\u0007 and \u0000 null",
    "\u0007",
    LONG,
    "the cat sat on the mat",
]
# Architecture, labels and the activation it is saved with; none: what CrossEncoder takes by itself.
MODELS: dict[str, tuple[str, int, str | None]] = {
    "bert": ("bert", 1, None),
    "roberta": ("roberta", 1, "Identity"),
    "classes": ("bert", 3, None),
}
ACTIVATIONS = ("Identity", "Sigmoid", "Softmax", None)

pytestmark = pytest.mark.filterwarnings("ignore:Implicit dimension choice for softmax")


@dataclass
class Ranker:
    predictor: Predictor
    original: Any

    def assert_same_scores(self, pairs: list[Any], asked: Any = None, **options: Any) -> None:
        ours, theirs = self.predictor(pairs, **options), self.original.predict(asked or pairs, **options)
        assert isinstance(ours, np.ndarray)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)

    def assert_same_ranking(self, query: str, documents: list[str], **options: Any) -> None:
        ours = self.predictor({"query": query, "documents": documents}, **options)
        theirs = self.original.rank(query, documents, **options)
        assert [list(entry) for entry in ours] == [list(entry) for entry in theirs]
        np.testing.assert_allclose(
            [entry["score"] for entry in ours], [entry["score"] for entry in theirs], rtol=0, atol=1e-4
        )
        expected = {entry["corpus_id"]: entry for entry in theirs}
        for entry, their in zip(ours, theirs, strict=True):
            assert type(entry["corpus_id"]) is int
            # Documents that are alike to the tokenizer have equal scores, and then any order is right.
            if entry["corpus_id"] != their["corpus_id"]:
                assert entry["score"] == pytest.approx(expected[entry["corpus_id"]]["score"], abs=1e-4)
            assert entry.get("text") == (documents[entry["corpus_id"]] if "text" in their else None)


@pytest.fixture(scope="module")
def save(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A cross-encoder as sentence-transformers itself writes it."""

    @cache
    def make(architecture: str, labels: int, activation: str | None) -> Path:
        import torch
        from sentence_transformers import CrossEncoder

        names = {place: f"LABEL_{place}" for place in range(labels)}
        about = {"id2label": names, "label2id": {name: place for place, name in names.items()}}
        model = tiny_model(architecture, "ForSequenceClassification", **about)
        function = getattr(torch.nn, activation)() if activation else None
        folder = tmp_path_factory.mktemp("models") / "cross-encoder"
        CrossEncoder(str(model), device="cpu", activation_fn=function).save_pretrained(str(folder))
        return folder

    return make


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [{"text": QUERY, "text_pair": document} for document in DOCUMENTS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def rankers(save: Any, quick_build: Any, rows_file: Path) -> Callable[[str], Ranker]:
    """By the name of a model, each built once, its task found in its files."""

    @cache
    def get(name: str) -> Ranker:
        model = save(*MODELS[name])
        bundle = quick_build(model, variants=["onnxruntime-fp32"], data=rows_file)
        assert bundle.manifest.task.name == "text-ranking"
        return Ranker(hasten.load(bundle.path, threads=1), cross_encoder(model))

    return get


def cross_encoder(model: Path) -> Any:
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(model), device="cpu", local_files_only=True)


@pytest.mark.parametrize("name", MODELS)
def test_scores_like_the_cross_encoder(rankers: Any, name: str) -> None:
    pairs = [[QUERY, document] for document in DOCUMENTS] + [[LONG, "short"], [LONG, LONG]]
    rankers(name).assert_same_scores(pairs)
    rankers(name).assert_same_scores([{"text": a, "text_pair": b, "id": 7} for a, b in pairs], pairs)
    one = rankers(name).predictor({"text": QUERY, "text_pair": DOCUMENTS[0]})
    np.testing.assert_allclose(one, rankers(name).original.predict((QUERY, DOCUMENTS[0])), atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_k": 99, "return_documents": True}])
@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_ranks_like_the_cross_encoder(rankers: Any, name: str, options: dict[str, Any]) -> None:
    rankers(name).assert_same_ranking(QUERY, DOCUMENTS, **options)
    rankers(name).assert_same_ranking("rain", DOCUMENTS[:1], **options)


ANY = st.one_of(
    st.text(max_size=40),
    st.text(st.sampled_from("abc the cat.,\t\n\u0000\u0007\u200d\u0301\u0308"), max_size=60),
    st.text(st.sampled_from("東京日本語한국어ไทย हिन्दी مرحبا"), max_size=30),
    st.lists(st.sampled_from(["🐈", "👩‍👩‍👧‍👦", "🇩🇪", "👍🏽", "e\u0301", " ", "the", "cat"]), max_size=12).map("".join),
    st.lists(st.sampled_from(["the", "cat", "sat", "rain", "and", "xyz"]), max_size=200).map(" ".join),
).filter(str.strip)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=20, deadline=None, derandomize=True, phases=[Phase.generate])
@given(query=ANY, documents=st.lists(ANY, min_size=10, max_size=14, unique=True))
def test_any_query_and_document_is_scored_like_the_cross_encoder(
    rankers: Any, name: str, query: str, documents: list[str]
) -> None:
    """Ten documents and more in each of twenty examples, for each model."""
    ranker = rankers(name)
    ranker.assert_same_scores([(query, document) for document in documents])
    if name != "classes":
        ranker.assert_same_ranking(query, documents, return_documents=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", ["bert", "classes"])
def test_every_activation_a_model_is_saved_with(
    rankers: Any, save: Any, load_tiny: Any, name: str, activation: str | None
) -> None:
    """The weights are the same, so the built session answers for all of them."""
    model = save(*MODELS[name][:2], activation)
    predictor = rankers(name).predictor
    spec = load_tiny(model).task
    assert spec.activation in ("none", "sigmoid", "softmax")
    ranker = Ranker(Predictor(spec, predictor.tokenizer, predictor.session), cross_encoder(model))
    ranker.assert_same_scores([[QUERY, document] for document in DOCUMENTS])


@pytest.mark.parametrize("function", ["none", "sigmoid", "softmax"])
@pytest.mark.parametrize("name", MODELS)
def test_another_function_may_be_asked_for(rankers: Any, name: str, function: str) -> None:
    import torch

    functions = {"none": torch.nn.Identity(), "sigmoid": torch.nn.Sigmoid(), "softmax": torch.nn.Softmax(dim=1)}
    pairs = [[QUERY, document] for document in DOCUMENTS]
    theirs = rankers(name).original.predict(pairs, activation_fn=functions[function])
    np.testing.assert_allclose(rankers(name).predictor(pairs, function_to_apply=function), theirs, rtol=0, atol=1e-4)


def as_saved_before(model: Path, folder: Path, **config: object) -> Path:
    """The files of a version that had no layout of modules, with what it added to the model's configuration."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("modules.json", "*sentence*"))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


@pytest.mark.parametrize("path", ["torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"])
@pytest.mark.parametrize("version", [3, 5])
def test_models_of_older_versions(
    rankers: Any, save: Any, load_tiny: Any, tmp_path: Path, version: int, path: str
) -> None:
    added = {
        3: {"sbert_ce_default_activation_function": path},
        5: {"sentence_transformers": {"version": "5.1.2", "activation_fn": path}},
    }
    model = as_saved_before(save("bert", 1, None), tmp_path / "model", **added[version])
    loaded = load_tiny(model)
    assert loaded.task.name == "text-ranking"
    predictor = rankers("bert").predictor
    ranker = Ranker(Predictor(loaded.task, predictor.tokenizer, predictor.session), cross_encoder(model))
    ranker.assert_same_scores([[QUERY, document] for document in DOCUMENTS])


def test_a_classifier_that_says_nothing_of_ranking_must_be_asked_to(save: Any, load_tiny: Any, tmp_path: Path) -> None:
    model = as_saved_before(save("bert", 1, None), tmp_path / "model")
    assert load_tiny(model).task.name == "text-classification"
    assert load_tiny(model, task="text-ranking").task.activation == "sigmoid"


def test_prompts(rankers: Any, save: Any, load_tiny: Any, tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "find the ", "none": ""}, "default_prompt_name": "query"}
    model = with_about(save("bert", 1, None), tmp_path / "model", **prompts)
    predictor = rankers("bert").predictor
    ranker = Ranker(Predictor(load_tiny(model).task, predictor.tokenizer, predictor.session), cross_encoder(model))
    pairs = [[QUERY, document] for document in DOCUMENTS]
    for options in ({}, {"prompt_name": "none"}, {"prompt": "prices of "}):
        ranker.assert_same_scores(pairs, **options)
    assert not np.allclose(ranker.predictor(pairs), ranker.predictor(pairs, prompt_name="none"), atol=1e-3)


def with_about(model: Path, folder: Path, file: str = "config_sentence_transformers.json", **changes: object) -> Path:
    shutil.copytree(model, folder)
    about = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(about | changes))
    return folder


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        ("config_sentence_transformers.json", {"activation_fn": "torch.nn.modules.activation.Tanh"}, "Tanh"),
        ("config_sentence_transformers.json", {"activation_fn": "mine.Sigmoid"}, "mine.Sigmoid"),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {"max_length": 9}}}, "processing_kwargs"),
        ("sentence_bert_config.json", {"modality_config": {"message": {}}}, "chat template"),
    ],
)
def test_what_would_be_left_out_is_refused(
    save: Any, load_tiny: Any, tmp_path: Path, file: str, changes: dict[str, object], said: str
) -> None:
    model = with_about(save("bert", 1, None), tmp_path / "model", file, **changes)
    with pytest.raises(hasten.UnsupportedError, match=said):
        load_tiny(model)


def test_modules_behind_the_transformer_are_refused(save: Any, load_tiny: Any, tmp_path: Path) -> None:
    model = shutil.copytree(save("bert", 1, None), tmp_path / "model")
    modules = json.loads((model / "modules.json").read_text())
    modules.append({"idx": 1, "name": "1", "path": "1_Dense", "type": "sentence_transformers.base.modules.dense.Dense"})
    (model / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(hasten.UnsupportedError, match="Transformer → Dense"):
        load_tiny(model)


def test_a_cross_encoder_of_another_kind_is_refused(save: Any, load_tiny: Any, tmp_path: Path) -> None:
    model = with_about(save("bert", 1, None), tmp_path / "model", "config.json", architectures=["Qwen3ForCausalLM"])
    with pytest.raises(hasten.PlanError, match=r"Qwen3ForCausalLM, which has no head for text-ranking$"):
        load_tiny(model)


def test_a_chat_template_is_refused(save: Any, load_tiny: Any, tmp_path: Path) -> None:
    model = as_saved_before(save("bert", 1, None), tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(hasten.UnsupportedError, match="chat template"):
        load_tiny(model, task="text-ranking")


def test_a_cut_text_is_said(rankers: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hasten"):
        rankers("bert").predictor({"query": QUERY, "documents": [LONG, "a dog", LONG]})
    assert "text 1 was cut to the model's limit of 64 tokens" in caplog.text


@pytest.mark.parametrize(
    "payload",
    [
        [],
        "a",
        ["a", "b"],
        {"query": "a"},
        {"query": "a", "documents": []},
        {"query": "a", "documents": ["b", 3]},
        {"query": "a", "documents": ["b", "\ud800"]},
        [["a"]],
        {"text": "a"},
    ],
)
def test_what_cannot_be_answered_is_an_input_error(rankers: Any, payload: object) -> None:
    with pytest.raises(InputError) as caught:
        rankers("bert").predictor(payload)
    assert "\n" not in str(caught.value)


def test_classes_make_no_ranking(rankers: Any) -> None:
    with pytest.raises(InputError, match="3 scores"):
        rankers("classes").predictor({"query": QUERY, "documents": DOCUMENTS})


@pytest.mark.parametrize("seed", range(20))
def test_measures_are_those_of_the_evaluator(seed: int) -> None:
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

    random = np.random.default_rng(seed)
    scores, relevance = random.normal(size=5 + seed), (random.random(5 + seed) < 0.3).astype(float)
    relevance[seed % 5] = 1.0
    expected = CrossEncoderRerankingEvaluator([], write_csv=False).compute_metrics(relevance, scores)
    ours = reciprocal_rank(scores, relevance), ndcg(scores, relevance), average_precision(scores, relevance)
    assert ours == pytest.approx(expected)


def test_a_built_bundle_is_judged_by_the_sample_and_like_the_evaluator(save: Any, quick_build: Any) -> None:
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

    model = save("bert", 1, None)
    bundle = quick_build(model, variants=["onnxruntime-fp32"], data=None)
    # Not the documents that are alike to the tokenizer: the evaluator orders those as they come.
    documents = [DOCUMENTS[place] for place in (0, 1, 2, 3, 4, 6, 7, 8)]
    queries = (QUERY, "rain", "the sea and old books")
    places = [{place, 7 - place} for place in range(len(queries))]
    rows = [
        {"query": query, "documents": documents, "relevance": [int(place in right) for place in range(8)]}
        for query, right in zip(queries, places, strict=True)
    ]
    samples = [
        {
            "query": query,
            "positive": [documents[place] for place in sorted(right)],
            "negative": [text for place, text in enumerate(documents) if place not in right],
        }
        for query, right in zip(queries, places, strict=True)
    ]
    expected = CrossEncoderRerankingEvaluator(samples, write_csv=False)(cross_encoder(model))
    for chosen in (None, rows):
        for candidate in reverify(bundle, chosen, bundle.manifest.gate, (), 1, Silent()):
            assert candidate.verdict is not None
            assert candidate.verdict.passed
            assert candidate.verdict.agreement.value > 0.9999
            assert candidate.verdict.agreement.flips == 0
    metric = candidate.verdict.metric
    assert metric is not None
    assert (metric.name, metric.value) == ("nDCG@10", pytest.approx(expected["ndcg@10"]))
    assert metric.also == {"MRR@10": pytest.approx(expected["mrr@10"]), "MAP": pytest.approx(expected["map"])}
