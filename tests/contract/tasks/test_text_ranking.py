"""A bundle scores and ranks like sentence-transformers' CrossEncoder, whatever version saved the model."""

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
from hasten.core.progress import SilentProgress
from hasten.measure.verify_bundle import verify_bundle
from hasten.metrics.ranking import average_precision, ndcg, reciprocal_rank
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
# Scores are computed by layers after the transformer, as in cross-encoders of sentence-transformers 5.4 and newer.
MODULES = "modules"
# Scores are the logits of a language model after a chat template, as in Qwen3-Reranker: of one token or of two.
LOGIT, LOG_ODDS = "logit", "log odds"
TEMPLATE = """<s>system
Judge whether the document answers. {% for message in messages if message.role == "system" %}{{ message.content }}
{% endfor %}{% for message in messages if message.role in ("query", "document") -%}
<{{ message.role }}>: {{ message.content }}
{% endfor %}answer:"""
# Architecture, number of labels and saved activation; None means CrossEncoder's default.
MODELS: dict[str, tuple[str, int, str | None]] = {
    "bert": ("bert", 1, None),
    "roberta": ("roberta", 1, "Identity"),
    "classes": ("bert", 3, None),
    "modules": (MODULES, 1, "Identity"),
    "modules with classes": (MODULES, 3, None),
    "decoder": (LOG_ODDS, 1, None),
    "decoder with one token": (LOGIT, 1, "Identity"),
}
ACTIVATIONS = ("Identity", "Sigmoid", "Softmax", None)

pytestmark = pytest.mark.filterwarnings("ignore:Implicit dimension choice for softmax")


@dataclass
class Ranker:
    predictor: Predictor
    original: Any

    def assert_same_scores(self, pairs: list[Any], reference_pairs: Any = None, **options: Any) -> None:
        ours, theirs = self.predictor(pairs, **options), self.original.predict(reference_pairs or pairs, **options)
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
            # Documents with equal tokens have equal scores, and then any order is correct.
            if entry["corpus_id"] != their["corpus_id"]:
                assert entry["score"] == pytest.approx(expected[entry["corpus_id"]]["score"], abs=1e-4)
            assert entry.get("text") == (documents[entry["corpus_id"]] if "text" in their else None)


@pytest.fixture(scope="module")
def save(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Save a cross-encoder with sentence-transformers."""

    @cache
    def make(architecture: str, labels: int, activation: str | None) -> Path:
        import torch
        from sentence_transformers import CrossEncoder

        function = getattr(torch.nn, activation)() if activation else None
        folder = tmp_path_factory.mktemp("models") / "cross-encoder"
        if architecture == MODULES:
            modules = scoring_modules(tiny_model("bert", "Model"), labels)
            CrossEncoder(modules=modules, device="cpu", activation_fn=function).save_pretrained(str(folder))
            return folder
        if architecture in (LOGIT, LOG_ODDS):
            tokenizer = tiny_model("qwen3", "ForCausalLM")
            model = language_model(tokenizer, folder.with_name("language-model"), "Qwen3", TEMPLATE)
            modules = logit_modules(model, architecture)
            CrossEncoder(modules=modules, device="cpu", activation_fn=function).save_pretrained(str(folder))
            return folder
        names = {index: f"LABEL_{index}" for index in range(labels)}
        config_values = {"id2label": names, "label2id": {name: index for index, name in names.items()}}
        model = tiny_model(architecture, "ForSequenceClassification", **config_values)
        CrossEncoder(str(model), device="cpu", activation_fn=function).save_pretrained(str(folder))
        return folder

    return make


def logit_modules(model: Path, kind: str) -> list[Any]:
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    return [Transformer(str(model), transformer_task="text-generation"), LogitScore(7, 9 if kind == LOG_ODDS else None)]


def scoring_modules(model: Path, labels: int) -> list[Any]:
    import torch
    from sentence_transformers.base.modules import Dense, Transformer
    from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling

    torch.manual_seed(11)
    norm = LayerNorm(16)
    with torch.no_grad():
        norm.norm.weight += torch.randn(16)
    return [
        Transformer(str(model)),
        Pooling(32, pooling_mode="cls"),
        Dense(32, 16, activation_function=torch.nn.GELU()),
        norm,
        Dense(16, labels, activation_function=torch.nn.Identity(), module_output_name="scores"),
    ]


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [{"text": QUERY, "text_pair": document} for document in DOCUMENTS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def rankers(save: Any, quick_build: Any, rows_file: Path) -> Callable[[str], Ranker]:
    """Return a ranker per model, built once; the task is detected."""

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
    score = rankers(name).predictor({"text": QUERY, "text_pair": DOCUMENTS[0]})
    np.testing.assert_allclose(score, rankers(name).original.predict((QUERY, DOCUMENTS[0])), atol=1e-5)


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


@pytest.mark.parametrize("name", [name for name in MODELS if name != "decoder with one token"])
@settings(max_examples=20, deadline=None, derandomize=True, phases=[Phase.generate])
@given(query=ANY, documents=st.lists(ANY, min_size=10, max_size=14, unique=True))
def test_any_query_and_document_is_scored_like_the_cross_encoder(
    rankers: Any, name: str, query: str, documents: list[str]
) -> None:
    """At least ten documents in each of twenty examples, for each model."""
    ranker = rankers(name)
    ranker.assert_same_scores([(query, document) for document in documents])
    if MODELS[name][1] == 1:
        ranker.assert_same_ranking(query, documents, return_documents=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", ["bert", "classes"])
def test_every_saved_activation_is_applied(
    rankers: Any, save: Any, load_tiny: Any, name: str, activation: str | None
) -> None:
    """The weights are the same, so one session serves all of them."""
    model = save(*MODELS[name][:2], activation)
    predictor = rankers(name).predictor
    spec = load_tiny(model).task
    assert spec.activation in ("none", "sigmoid", "softmax")
    ranker = Ranker(Predictor(spec, predictor.tokenizer, predictor.session), cross_encoder(model))
    ranker.assert_same_scores([[QUERY, document] for document in DOCUMENTS])


@pytest.mark.parametrize("function", ["none", "sigmoid", "softmax"])
@pytest.mark.parametrize("name", MODELS)
def test_function_to_apply_overrides_the_activation(rankers: Any, name: str, function: str) -> None:
    import torch

    functions = {"none": torch.nn.Identity(), "sigmoid": torch.nn.Sigmoid(), "softmax": torch.nn.Softmax(dim=1)}
    pairs = [[QUERY, document] for document in DOCUMENTS]
    theirs = rankers(name).original.predict(pairs, activation_fn=functions[function])
    np.testing.assert_allclose(rankers(name).predictor(pairs, function_to_apply=function), theirs, rtol=0, atol=1e-4)


def as_saved_before(model: Path, folder: Path, **config: object) -> Path:
    """Write the files of a version without modules.json, which extended the model's configuration instead."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("modules.json", "*sentence*"))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


@pytest.mark.parametrize("path", ["torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"])
@pytest.mark.parametrize("version", [3, 5])
def test_models_of_older_versions_are_read(
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


def test_plain_classifier_ranks_only_on_request(save: Any, load_tiny: Any, tmp_path: Path) -> None:
    model = as_saved_before(save("bert", 1, None), tmp_path / "model")
    assert load_tiny(model).task.name == "text-classification"
    assert load_tiny(model, task="text-ranking").task.activation == "sigmoid"


@pytest.mark.parametrize("name", ["bert", "decoder"])
def test_prompts_equal_those_of_the_cross_encoder(
    rankers: Any, save: Any, load_tiny: Any, tmp_path: Path, name: str
) -> None:
    prompts = {"prompts": {"query": "find the ", "none": ""}, "default_prompt_name": "query"}
    model = with_config(save(*MODELS[name]), tmp_path / "model", **prompts)
    predictor = rankers(name).predictor
    ranker = Ranker(Predictor(load_tiny(model).task, predictor.tokenizer, predictor.session), cross_encoder(model))
    pairs = [[QUERY, document] for document in DOCUMENTS]
    for options in ({}, {"prompt_name": "none"}, {"prompt": "prices of "}):
        ranker.assert_same_scores(pairs, **options)
    assert not np.allclose(ranker.predictor(pairs), ranker.predictor(pairs, prompt_name="none"), atol=1e-3)


def language_model(tokenizer: Path, folder: Path, architecture: str, template: str, **config_values: object) -> Path:
    """Save a language model that knows the tokens "yes" and "no", with a chat template."""
    import transformers

    vocabulary = transformers.AutoTokenizer.from_pretrained(tokenizer)
    vocabulary.add_tokens(["yes", "no"])
    vocabulary.chat_template, vocabulary.model_max_length = template, 200
    vocabulary.save_pretrained(folder)
    sizes = {"vocab_size": 310, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 200, "pad_token_id": 0}
    config = getattr(transformers, f"{architecture}Config")(**sizes, **heads, initializer_range=0.5, **config_values)
    transformers.set_seed(5)
    getattr(transformers, f"{architecture}ForCausalLM")(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("architecture", "template", "config_values"),
    [
        ("Qwen3", TEMPLATE, {}),
        ("Qwen3", TEMPLATE.replace("message.content", "message.content | trim"), {"tie_word_embeddings": True}),
        ("Gemma2", TEMPLATE, {"final_logit_softcapping": 3.0}),
    ],
)
def test_language_model_ranks_on_request(
    quick_build: Any,
    tiny_model: Any,
    tmp_path: Path,
    rows_file: Path,
    architecture: str,
    template: str,
    config_values: dict[str, object],
) -> None:
    tokenizer = tiny_model("qwen3", "ForCausalLM")
    model = language_model(tokenizer, tmp_path / "model", architecture, template, **config_values)
    bundle = quick_build(model, task="text-ranking", variants=["onnxruntime-fp32"], data=rows_file)
    with hasten.load(bundle.path, threads=1) as predictor:
        ranker = Ranker(predictor, cross_encoder(model))
        ranker.assert_same_scores([(QUERY, document) for document in DOCUMENTS])
        ranker.assert_same_ranking(QUERY, DOCUMENTS, prompt=" which one is about cats? ")
        scores = predictor([(QUERY, document) for document in DOCUMENTS], function_to_apply="none")
        assert np.ptp(scores) > 0.1


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[-1].content }}", "leaves out the query"),
        ("{{ messages | map(attribute='content') | join(' ') | upper }}", "leaves out the query"),
        ("{% for m in messages %}{{ m.content | replace('<', '(') }} {% endfor %}", "changes the texts of a pair"),
        ("{{ raise_exception('no pairs') }}", "fails on a pair: no pairs"),
    ],
)
def test_unsupported_chat_template_is_rejected(
    tiny_model: Any, load_tiny: Any, tmp_path: Path, template: str, reason: str
) -> None:
    model = language_model(tiny_model("qwen3", "ForCausalLM"), tmp_path / "model", "Qwen3", template)
    with pytest.raises(hasten.UnsupportedError, match=reason):
        load_tiny(model, task="text-ranking")


def test_scaled_logits_are_rejected(tiny_model: Any, load_tiny: Any, tmp_path: Path) -> None:
    tokenizer = tiny_model("qwen3", "ForCausalLM")
    model = language_model(tokenizer, tmp_path / "model", "Granite", TEMPLATE, logits_scaling=4.0)
    with pytest.raises(hasten.UnsupportedError, match="GraniteForCausalLM changes its logits"):
        load_tiny(model, task="text-ranking")


def test_language_model_without_the_tokens_of_an_answer_is_rejected(
    tiny_model: Any, load_tiny: Any, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model("qwen3", "ForCausalLM"), tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with pytest.raises(hasten.UnsupportedError, match="'yes' and 'no'"):
        load_tiny(model, task="text-ranking")


def test_tokens_of_the_score_must_exist(save: Any, load_tiny: Any, tmp_path: Path) -> None:
    model = with_config(save(LOG_ODDS, 1, None), tmp_path / "model", "1_LogitScore/config.json", true_token_id=10**6)
    with pytest.raises(hasten.UnsupportedError, match=r"scores with the tokens \[1000000, 9\]"):
        load_tiny(model)


def with_config(model: Path, folder: Path, file: str = "config_sentence_transformers.json", **changes: object) -> Path:
    shutil.copytree(model, folder)
    config_values = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(config_values | changes))
    return folder


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config_sentence_transformers.json", {"activation_fn": "torch.nn.modules.activation.Tanh"}, "Tanh"),
        ("config_sentence_transformers.json", {"activation_fn": "mine.Sigmoid"}, "mine.Sigmoid"),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {"max_length": 9}}}, "processing_kwargs"),
        ("sentence_bert_config.json", {"modality_config": {"message": {}}}, "chat template"),
    ],
)
def test_unsupported_settings_are_rejected(
    save: Any, load_tiny: Any, tmp_path: Path, file: str, changes: dict[str, object], message: str
) -> None:
    model = with_config(save("bert", 1, None), tmp_path / "model", file, **changes)
    with pytest.raises(hasten.UnsupportedError, match=message):
        load_tiny(model)


def test_modules_after_the_transformer_are_rejected(save: Any, load_tiny: Any, tmp_path: Path) -> None:
    model = shutil.copytree(save("bert", 1, None), tmp_path / "model")
    modules = json.loads((model / "modules.json").read_text())
    modules.append({"idx": 1, "name": "1", "path": "1_Dense", "type": "sentence_transformers.base.modules.dense.Dense"})
    (model / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(hasten.UnsupportedError, match="Transformer → Dense"):
        load_tiny(model)


def test_unsupported_cross_encoder_is_rejected(save: Any, load_tiny: Any, tmp_path: Path) -> None:
    model = with_config(save("bert", 1, None), tmp_path / "model", "config.json", architectures=["Qwen3ForCausalLM"])
    with pytest.raises(hasten.PlanError, match=r"Qwen3ForCausalLM, which has no head for text-ranking$"):
        load_tiny(model)


def test_classifier_scores_texts_in_its_chat_template(
    save: Any, quick_build: Any, rows_file: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(save("roberta", 1, None), tmp_path / "source")
    (source / "chat_template.jinja").write_text(TEMPLATE)
    model = tmp_path / "model"
    cross_encoder(as_saved_before(source, tmp_path / "plain")).save_pretrained(str(model))
    assert "message" in json.loads((model / "sentence_bert_config.json").read_text())["modality_config"]
    bundle = quick_build(model, variants=["onnxruntime-fp32"], data=rows_file)
    with hasten.load(bundle.path, threads=1) as predictor:
        ranker = Ranker(predictor, cross_encoder(model))
        ranker.assert_same_scores([(QUERY[:9], document[:20]) for document in DOCUMENTS])


def test_chat_template_is_rejected(save: Any, load_tiny: Any, tmp_path: Path) -> None:
    model = as_saved_before(save("bert", 1, None), tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(hasten.UnsupportedError, match="chat template"):
        load_tiny(model, task="text-ranking")


def test_truncated_text_is_logged(rankers: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hasten"):
        rankers("bert").predictor({"query": QUERY, "documents": [LONG, "a dog", LONG]})
    assert "text 1 was truncated to the model's limit of 64 tokens" in caplog.text


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
def test_invalid_payload_raises_input_error(rankers: Any, payload: object) -> None:
    with pytest.raises(InputError) as caught:
        rankers("bert").predictor(payload)
    assert "\n" not in str(caught.value)


def test_ranking_is_rejected_for_classes(rankers: Any) -> None:
    with pytest.raises(InputError, match="3 scores"):
        rankers("classes").predictor({"query": QUERY, "documents": DOCUMENTS})


@pytest.mark.parametrize("seed", range(20))
def test_metrics_equal_those_of_the_evaluator(seed: int) -> None:
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

    random = np.random.default_rng(seed)
    scores, relevance = random.normal(size=5 + seed), (random.random(5 + seed) < 0.3).astype(float)
    relevance[seed % 5] = 1.0
    expected = CrossEncoderRerankingEvaluator([], write_csv=False).compute_metrics(relevance, scores)
    ours = reciprocal_rank(scores, relevance), ndcg(scores, relevance), average_precision(scores, relevance)
    assert ours == pytest.approx(expected)


def test_bundle_is_verified_and_scored_like_the_evaluator(save: Any, quick_build: Any) -> None:
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

    model = save("bert", 1, None)
    bundle = quick_build(model, variants=["onnxruntime-fp32"], data=None)
    # Without documents of equal tokens, which the evaluator leaves in their input order.
    documents = [DOCUMENTS[index] for index in (0, 1, 2, 3, 4, 6, 7, 8)]
    queries = (QUERY, "rain", "the sea and old books")
    relevant_indices = [{index, 7 - index} for index in range(len(queries))]
    rows = [
        {"query": query, "documents": documents, "relevance": [int(index in relevant) for index in range(8)]}
        for query, relevant in zip(queries, relevant_indices, strict=True)
    ]
    samples = [
        {
            "query": query,
            "positive": [documents[index] for index in sorted(relevant)],
            "negative": [text for index, text in enumerate(documents) if index not in relevant],
        }
        for query, relevant in zip(queries, relevant_indices, strict=True)
    ]
    expected = CrossEncoderRerankingEvaluator(samples, write_csv=False)(cross_encoder(model))
    for chosen in (None, rows):
        for candidate in verify_bundle(bundle, chosen, bundle.manifest.gate, (), 1, SilentProgress()):
            assert candidate.verdict is not None
            assert candidate.verdict.passed
            assert candidate.verdict.agreement.value > 0.9999
            assert candidate.verdict.agreement.flips == 0
    metric = candidate.verdict.metric
    assert metric is not None
    assert (metric.name, metric.value) == ("nDCG@10", pytest.approx(expected["ndcg@10"]))
    assert metric.other_metrics == {"MRR@10": pytest.approx(expected["mrr@10"]), "MAP": pytest.approx(expected["map"])}
