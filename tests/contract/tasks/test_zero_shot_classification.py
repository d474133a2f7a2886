"""A bundle classifies with any labels like transformers' pipeline: every label, every score."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import hasten
from hasten.core.errors import InputError
from hasten.core.progress import SilentProgress
from hasten.measure.data import read_rows
from hasten.measure.verify_bundle import verify_bundle
from hasten.predictor import Predictor

ARCHITECTURES = ("bert", "roberta")
NLI = ("contradiction", "neutral", "entailment")
TEXTS = [
    "the cat sat on the mat and looked at the rain",
    "what a wonderful film, I would watch it again tomorrow",
    "x",
    "  spaces   around\tand\nbetween  ",
    "Ein Übergröße-Test für Zürich, 42 €",
    "cafe\u0301 nai\u0308ve \u0301",
    "東京は日本の首都です。",
    "the cat 🐈 sat on 👩‍👩‍👧‍👦 the mat",
    "control\u0007 and \u0000 null",
    "\u0007",
    "[CLS] the [MASK] cat </s> <unk>",
    "the cat sat on the mat and a dog ran across the green field " * 12,
]
LABELS = ["rain", "a wonderful film", "Zürich 🐈", "the second quarter, prices and percent"]
OPTIONS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "each by itself": {"multi_label": True},
    "another template": {"hypothesis_template": "the question is about {}"},
    "a label at the start": {"hypothesis_template": "{0}, and {0} again", "multi_label": True},
}


@dataclass
class Classifier:
    predictor: Predictor
    pipeline: Any

    def compare(self, texts: list[str], labels: Any, **options: Any) -> None:
        theirs = self.pipeline(texts, candidate_labels=labels, **options)
        ours = self.predictor(texts, candidate_labels=labels, **options)
        assert len(ours) == len(theirs) == len(texts)
        for our, their in zip(ours, theirs, strict=True):
            assert list(our) == list(their) == ["sequence", "labels", "scores"]
            assert our["sequence"] == their["sequence"]
            assert our["scores"] == pytest.approx(their["scores"], abs=1e-4)
            # By name: labels with equal tokens have equal scores, and then any order is correct.
            assert Counter(our["labels"]) == Counter(their["labels"])
            expected = dict(zip(their["labels"], their["scores"], strict=True))
            for label, score in zip(our["labels"], our["scores"], strict=True):
                assert score == pytest.approx(expected[label], abs=1e-4)

    def with_labels(self, *labels: str) -> Classifier:
        """Return the same weights with other names of the outputs."""
        self.pipeline.model.config.id2label = dict(enumerate(labels))
        self.pipeline.model.config.label2id = {label: index for index, label in enumerate(labels)}
        spec = replace(self.predictor.spec, labels=labels)
        return Classifier(Predictor(spec, self.predictor.tokenizer, self.predictor.session), self.pipeline)


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [{"text": text, "candidate_labels": LABELS, "label": index % 4} for index, text in enumerate(TEXTS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def classifiers(tiny_model: Any, quick_build: Any, rows_file: Path) -> Callable[[str], Classifier]:
    """Return predictor and reference of an architecture, built once."""

    @cache
    def get(architecture: str) -> Classifier:
        import transformers

        config_values = {
            "id2label": dict(enumerate(NLI)),
            "label2id": {label: index for index, label in enumerate(NLI)},
        }
        model = tiny_model(architecture, "ForSequenceClassification", **config_values)
        bundle = quick_build(model, variants=["onnxruntime-fp32"], task="zero-shot-classification", data=rows_file)
        original = transformers.pipeline("zero-shot-classification", str(model), device="cpu")
        return Classifier(hasten.load(bundle.path, threads=1), original)

    return get


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_classifies_like_the_pipeline(classifiers: Any, architecture: str, options: str) -> None:
    classifier = classifiers(architecture)
    for labels in (LABELS, LABELS[:1], "rain, the sea ,,a dog", [LABELS[1], *LABELS[:2]]):
        classifier.compare(TEXTS, labels, **OPTIONS[options])


ANY = st.one_of(
    st.text(max_size=40),
    st.text(st.sampled_from("abc the cat.,\t\n\u0000\u0007\u200d\u0301\u0308"), max_size=60),
    st.text(st.sampled_from("東京日本語한국어ไทย हिन्दी مرحبا"), max_size=30),
    st.lists(st.sampled_from(["🐈", "👩‍👩‍👧‍👦", "🇩🇪", "👍🏽", "e\u0301", " ", "the", "cat"]), max_size=12).map("".join),
    st.lists(st.sampled_from(["the", "cat", "sat", "rain", "and", "xyz"]), max_size=200).map(" ".join),
).filter(str.strip)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@settings(max_examples=20, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    texts=st.lists(ANY, min_size=10, max_size=12, unique=True),
    labels=st.lists(ANY.filter(lambda text: len(text.encode()) < 24), min_size=1, max_size=4),
    options=st.sampled_from(list(OPTIONS.values())),
)
def test_any_text_and_label_is_classified_like_the_pipeline(
    classifiers: Any, architecture: str, texts: list[str], labels: list[str], options: dict[str, Any]
) -> None:
    """At least ten texts in each of twenty examples, for each architecture."""
    classifiers(architecture).compare(texts, labels, **options)


@pytest.mark.parametrize(
    "labels",
    [
        ("ENTAILMENT", "neutral", "contradiction"),
        ("contradiction", "Entails", "neutral"),
        ("LABEL_0", "LABEL_1", "LABEL_2"),
        ("not_entailment", "other", "entailment"),
    ],
)
@pytest.mark.parametrize("is_multi", [False, True])
def test_entailment_label_is_found_by_name(classifiers: Any, labels: tuple[str, ...], is_multi: bool) -> None:
    original = classifiers("bert")
    try:
        original.with_labels(*labels).compare(TEXTS[:4], LABELS, multi_label=is_multi)
    finally:
        original.with_labels(*NLI)


def test_answer_has_the_shape_of_the_payload(classifiers: Any) -> None:
    classifier, labels = classifiers("bert"), LABELS[:2]
    expected = classifier.pipeline(TEXTS[0], labels)
    for payload in (TEXTS[0], {"text": TEXTS[0]}, {"sequence": TEXTS[0], "id": 3}):
        answer = classifier.predictor(payload, candidate_labels=labels)
        assert isinstance(answer, dict)
        assert answer["labels"] == expected["labels"]
    (answer,) = classifier.predictor([TEXTS[0]], candidate_labels=labels)
    assert answer["labels"] == expected["labels"]


def test_items_may_have_their_own_labels(classifiers: Any) -> None:
    predictor = classifiers("bert").predictor
    items = [{"text": TEXTS[0], "candidate_labels": LABELS[2:]}, TEXTS[1]]
    answers = predictor(items, candidate_labels=LABELS[:2])
    assert answers[0]["scores"] == pytest.approx(predictor(TEXTS[0], candidate_labels=LABELS[2:])["scores"], abs=1e-5)
    assert sorted(answers[1]["labels"]) == sorted(LABELS[:2])


def test_truncated_text_is_logged(classifiers: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hasten"):
        classifiers("roberta").predictor(["a dog", TEXTS[-1]], candidate_labels=LABELS)
    assert "text 2 was truncated to the model's limit of 64 tokens" in caplog.text


def test_ten_thousand_labels_are_encoded_quickly(classifiers: Any) -> None:
    labels = [f"rain {number}" for number in range(10_000)]
    answer = classifiers("bert").predictor("the cat sat on the mat", candidate_labels=labels)
    assert sorted(answer["labels"]) == sorted(labels)
    assert answer["scores"] == sorted(answer["scores"], reverse=True)
    theirs = classifiers("bert").pipeline("the cat sat on the mat", labels[7000:7003])
    order = [label for label in answer["labels"] if label in labels[7000:7003]]
    assert order == theirs["labels"]


@pytest.mark.parametrize(
    ("payload", "options"),
    [
        ("a", {}),
        ("a", {"candidate_labels": []}),
        ("a", {"candidate_labels": ["b", "\ud800"]}),
        ("a", {"candidate_labels": ["b"], "hypothesis_template": "no place"}),
        ("a", {"candidate_labels": ["b " * 70]}),
        (["a", {"text": "b", "candidate_labels": ["c"]}], {}),
        ({"text": "a", "candidate_labels": [1]}, {}),
        ({"text": "a", "text_pair": "b"}, {"candidate_labels": ["c"]}),
        ("", {"candidate_labels": ["c"]}),
    ],
)
def test_invalid_payload_raises_input_error(classifiers: Any, payload: object, options: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        classifiers("bert").predictor(payload, **options)
    assert "\n" not in str(caught.value)


def test_bundle_is_verified_and_scored_on_labelled_rows(tiny_model: Any, quick_build: Any, rows_file: Path) -> None:
    config_values = {"id2label": {0: "no", 1: "entailment"}, "label2id": {"no": 0, "entailment": 1}}
    model = tiny_model("bert", "ForSequenceClassification", **config_values)
    bundle = quick_build(model, variants=["onnxruntime-fp32"], task="zero-shot-classification", data=None)
    rows = read_rows(rows_file)
    for chosen in (None, rows):
        for candidate in verify_bundle(bundle, chosen, bundle.manifest.gate, (), 1, SilentProgress()):
            assert candidate.verdict is not None
            assert candidate.verdict.passed
            assert candidate.verdict.agreement.flips == 0
    assert candidate.verdict.metric is not None
    assert candidate.verdict.metric.name == "accuracy"
    assert candidate.verdict.metric == candidate.verdict.reference_metric
    with pytest.raises(InputError, match="row 1 has the label 'entailment', which is not one of its candidate labels"):
        verify_bundle(bundle, [{**rows[0], "label": "entailment"}], bundle.manifest.gate, (), 1, SilentProgress())
