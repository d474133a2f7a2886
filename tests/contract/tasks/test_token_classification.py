"""A bundle tags texts like transformers' pipeline: every strategy, every field."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

import hasten
from hasten.core.errors import InputError
from support.strategies import batches, two_hundred

ARCHITECTURES = ("bert", "roberta", "distilbert", "electra")
STRATEGIES = ("none", "simple", "first", "average", "max")
TEXTS = [
    "the cat sat on the mat and looked at the rain",
    "a dog ran across the green field after the red ball",
    "what a wonderful film, I would watch it again tomorrow",
    "prices rose by three percent in the second quarter",
    "Please send the invoice to the office before Friday",
    "is this the right answer to the question?",
    "x",
    "?",
    "...",
    "rain, rain; rain! (rain) [rain] {rain}",
    "old-fashioned, second-quarter e-books",
    "don't can't won't it's the cats' mat",
    "she said \"what a film\" and 'ran'",
    "U.S.A. and the U.K., at 3.14 p.m.",
    "42 1,000.50 +7 -3 50% #1 @home $5 €9",
    "http://example.com/a?b=c&d=e#f mail@example.org",
    "  spaces   in    front and   between  and behind   ",
    "tabs\tand\nnew lines\r\nand\n\nblank ones",
    "no\u00a0break\u2003em\u2009thin\u3000wide spaces",
    "zero\u200bwidth\u200djoined\ufeffmarks",
    "control\u0007 and \u0000 null",
    "Ein Übergröße-Test für Zürich, 42 €",
    "café naïve façade — cafe\u0301 nai\u0308ve fac\u0327ade",
    "Ελληνικά και русский текст",
    "Ångström İstanbul ıssız straße ﬁne ﬂat",
    "東京は日本の首都です。",
    "서울은 한국의 수도이다",
    "مرحبا بالعالم שלום עולם",
    "हिन्दी में एक वाक्य",
    "ภาษาไทยไม่มีช่องว่าง",
    "the cat 🐈 sat on 🐈🐈 the mat 🙂",
    "🙂",
    "👩‍👩‍👧‍👦 family and 🇩🇪 flag and 👍🏽 tone",
    "math: ∑ x² ≤ ∞, ½ of ①",
    "curly “quotes” and ‘these’ … and – dashes —",
    "UPPER lower MiXeD CamelCaseWord snake_case_word",
    "averyveryverylongwordthatnoneofthevocabularieswillknowasawhole",
    "q" * 120,
    "[CLS] the [MASK] cat [SEP] and [UNK] or[UNK]or [PAD]",
    "<s> the <mask> cat </s> and <unk> or<unk>or <pad>",
    "##the ##cat Ġthe ▁cat",
    "<b>bold</b> &amp; <br/> `code` **stars** ~~gone~~",
    "\\backslash \\n /slash/ |pipe| ^hat^ ~tilde~",
    "a b c d e f g h i j k l m n o p",
    "catdog dogcat thecat matrain",
]
SENTENCES = [
    ["the", "cat", "sat"],
    ["New", "York", ",", "U.S.A.", "don't", "e-books"],
    ["the", "🐈", "Übergröße", "東京", "", "café"],
    ["two words", "in one", "of them"],
]
LONG = "the cat sat on the mat and a dog ran across the green field " * 12


@dataclass
class Tagger:
    predictor: hasten.Predictor
    pipeline: Any

    def assert_same(self, payload: Any, reference_payload: Any = None, **options: Any) -> int:
        """Compare the answers; return the number of compared tokens or entities."""
        with warnings.catch_warnings():
            # The pipeline warns when it falls back to spaces to find words.
            warnings.filterwarnings("ignore", "Tokenizer does not support real words")
            theirs = self.pipeline(payload if reference_payload is None else reference_payload, **options)
        options.pop("is_split_into_words", None)
        ours = self.predictor(payload, **options)
        return compare(ours, theirs)


def compare(ours: Any, theirs: Any) -> int:
    assert isinstance(ours, list)
    assert len(ours) == len(theirs)
    compared = 0
    for our, their in zip(ours, theirs, strict=True):
        if isinstance(their, list):
            compared += compare(our, their)
            continue
        assert list(our) == list(their)
        assert type(our["score"]) is float
        assert our["score"] == pytest.approx(float(their["score"]), abs=1e-4)
        assert {**our, "score": 0} == {**their, "score": 0}
        assert all(type(our[name]) is int for name in ("start", "end", "index") if name in our)
        compared += 1
    return compared


@pytest.fixture(scope="module")
def plain_texts(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[str, ...]) -> Path:
    file = tmp_path_factory.mktemp("data") / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in corpus), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def taggers(tiny_tagger: Any, quick_build: Any, plain_texts: Path) -> Callable[[str], Tagger]:
    """Return predictor and reference of an architecture, built once."""

    @cache
    def get(architecture: str) -> Tagger:
        import transformers

        model = tiny_tagger(architecture)
        bundle = quick_build(model, variants=["onnxruntime-fp32"], data=plain_texts)
        original = transformers.pipeline("token-classification", str(model), device="cpu")
        return Tagger(hasten.load(bundle.path, threads=1), original)

    return get


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tags_like_the_pipeline(taggers: Any, architecture: str, strategy: str) -> None:
    tagger = taggers(architecture)
    assert tagger.assert_same(TEXTS, aggregation_strategy=strategy) > len(TEXTS)
    tagger.assert_same(TEXTS, aggregation_strategy=strategy, ignore_labels=[])
    tagger.assert_same(TEXTS, aggregation_strategy=strategy, ignore_labels=["O", "B-PER", "LOC"])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_split_sentences_are_tagged_like_the_pipeline(taggers: Any, architecture: str, strategy: str) -> None:
    payload = [{"tokens": words} for words in SENTENCES]
    compared = taggers(architecture).assert_same(
        payload, SENTENCES, aggregation_strategy=strategy, ignore_labels=[], is_split_into_words=True
    )
    assert compared > len(SENTENCES)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_answer_has_the_shape_of_the_payload(taggers: Any, architecture: str) -> None:
    tagger = taggers(architecture)
    for text in TEXTS[:5]:
        tagger.assert_same(text)
        tagger.assert_same([text])
        tagger.assert_same({"text": text}, text, aggregation_strategy="SIMPLE")


def test_texts_and_words_may_be_mixed(taggers: Any) -> None:
    predictor = taggers("bert").predictor
    payload = [{"tokens": SENTENCES[1]}, TEXTS[1], {"tokens": SENTENCES[0]}, {"text": TEXTS[0]}]
    mixed = predictor(payload, ignore_labels=[])
    assert compare(mixed, [predictor(item, ignore_labels=[]) for item in payload]) > 20


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_long_text_is_truncated(taggers: Any, architecture: str, caplog: pytest.LogCaptureFixture) -> None:
    tagger = taggers(architecture)
    with caplog.at_level(logging.WARNING, "hasten"):
        assert tagger.assert_same(["a dog", LONG], ignore_labels=[]) > 60
    assert "text 2 was truncated to the model's limit of 64 tokens" in caplog.text


@pytest.mark.parametrize(
    "payload", [[], "", [" \n"], 7, {"tokens": []}, {"tokens": ["a", 1]}, {"text": "a", "tokens": ["a"]}]
)
def test_invalid_text_raises_input_error(taggers: Any, payload: object) -> None:
    with pytest.raises(InputError):
        taggers("bert").predictor(payload)


def test_bundle_is_scored_on_labelled_words(tiny_tagger: Any, quick_build: Any, tmp_path: Path) -> None:
    from hasten.core.progress import SilentProgress
    from hasten.measure.verify_bundle import verify_bundle

    rows = [{"tokens": words, "tags": ["B-PER"] + ["O"] * (len(words) - 1)} for words in SENTENCES]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    bundle = quick_build(tiny_tagger("bert"), variants=["onnxruntime-fp32"], data=file)
    candidates = verify_bundle(bundle, rows, bundle.manifest.gate, (), 1, SilentProgress())
    for candidate in candidates:
        assert candidate.verdict is not None
        assert candidate.verdict.passed
        assert candidate.verdict.metric is not None
        assert candidate.verdict.metric.name == "entity F1"
        assert candidate.verdict.metric == candidate.verdict.reference_metric


@pytest.mark.parametrize("architecture", ["bert", "roberta"])
def test_generated_texts_are_tagged_like_the_pipeline(taggers: Any, architecture: str) -> None:
    tagger = taggers(architecture)
    strategies = cycle(STRATEGIES)
    drawn: list[str] = []

    @two_hundred
    @given(batches)
    def check(batch: list[str]) -> None:
        drawn.extend(batch)
        tagger.assert_same(batch, aggregation_strategy=next(strategies), ignore_labels=[])

    check()
    assert len(set(drawn)) >= 200
