"""A bundle chooses like transformers' AutoModelForMultipleChoice, called as in its documentation."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hasten
from hasten.core.errors import InputError

ARCHITECTURES = ("bert", "roberta", "distilbert", "electra")
LONG = "the cat sat on the mat and a dog ran across the green field " * 12
ITEMS: list[dict[str, Any]] = [
    {"prompt": "the cat sat on", "choices": ["the mat", "a dog", "three percent of the rain"]},
    {"prompt": "is this the right answer?", "choices": ["the question", "before Friday"]},
    {"prompt": "emoji 🐈", "choices": ["👩‍👩‍👧‍👦", "東京は", "cafe\u0301", "control\u0007 \u0000", "[SEP] [MASK]"]},
    {"prompt": "only", "choices": ["one"]},
    {"prompt": "the same", "choices": ["twice", "twice"]},
    {"prompt": LONG, "choices": ["short", LONG]},
    {"prompt": "short", "choices": [LONG, "x", LONG + "again"]},
]
words = st.sampled_from(["the", "cat", "rain", ",", "🐈", "e\u0301", "東京", "\x07", "\n", "don't", "[MASK]", "q" * 30])
odd = st.text(st.characters(codec="utf-8"), max_size=12)
texts = st.lists(words | odd, min_size=1, max_size=40).map(" ".join).filter(lambda text: bool(text.strip()))
questions = st.fixed_dictionaries({"prompt": texts, "choices": st.lists(texts, min_size=1, max_size=5)})


@dataclass
class Chooser:
    predictor: hasten.Predictor
    tokenizer: Any
    model: Any

    def reference(self, item: dict[str, Any]) -> list[float]:
        """Run the example of the documentation: pairs of prompt and choice, all in one batch."""
        import torch

        pairs = [[item["prompt"], choice] for choice in item["choices"]]
        inputs = self.tokenizer(pairs, return_tensors="pt", padding=True, truncation=True)
        with torch.inference_mode():
            logits = self.model(**{name: value.unsqueeze(0) for name, value in inputs.items()}).logits
        scores: list[float] = logits.softmax(dim=1)[0].tolist()
        return scores

    def assert_same(self, items: list[dict[str, Any]]) -> None:
        ranked, best = self.predictor(items, top_k=None), self.predictor(items)
        assert len(ranked) == len(best) == len(items)
        for item, ranking, top in zip(items, ranked, best, strict=True):
            expected = self.reference(item)
            assert sorted(chosen["index"] for chosen in ranking) == list(range(len(expected)))
            for chosen in ranking:
                assert list(chosen) == ["score", "index", "answer"]
                assert chosen["answer"] == item["choices"][chosen["index"]]
                assert chosen["score"] == pytest.approx(expected[chosen["index"]], abs=1e-4)
            assert [chosen["score"] for chosen in ranking] == sorted((c["score"] for c in ranking), reverse=True)
            assert top["score"] == pytest.approx(max(expected), abs=1e-4)
            assert top == ranking[0]


@pytest.fixture(scope="module")
def questions_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "questions.jsonl"
    rows = [item | {"label": index % len(item["choices"])} for index, item in enumerate(ITEMS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def choosers(tiny_model: Any, quick_build: Any, questions_file: Path) -> Callable[[str], Chooser]:
    """Return predictor and reference of an architecture, built once."""

    @cache
    def get(architecture: str) -> Chooser:
        import transformers

        model = tiny_model(architecture, "ForMultipleChoice")
        bundle = quick_build(model, variants=["onnxruntime-fp32"], data=questions_file)
        assert bundle.chosen.metric is not None
        return Chooser(
            hasten.load(bundle.path, threads=1),
            transformers.AutoTokenizer.from_pretrained(model),
            transformers.AutoModelForMultipleChoice.from_pretrained(model).eval(),
        )

    return get


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_choices_equal_those_of_the_model(choosers: Any, architecture: str) -> None:
    choosers(architecture).assert_same(ITEMS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_generated_questions_are_answered_like_the_model(choosers: Any, architecture: str) -> None:
    chooser = choosers(architecture)

    @settings(max_examples=6, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(questions, min_size=10, max_size=10, unique_by=repr))
    def check(drawn: list[dict[str, Any]]) -> None:
        chooser.assert_same(drawn)

    check()


def test_answer_has_the_shape_of_the_payload(choosers: Any) -> None:
    predictor = choosers("bert").predictor
    alone = predictor(ITEMS[0])
    assert predictor([ITEMS[0]]) == [alone]
    assert predictor({"text": ITEMS[0]["prompt"], "choices": tuple(ITEMS[0]["choices"]), "label": 1}) == alone
    assert predictor(ITEMS[0], top_k=1) == [alone]
    assert len(predictor(ITEMS[0], top_k=2)) == 2
    assert len(predictor(ITEMS[0], top_k=99)) == 3
    assert predictor(ITEMS[3]) == {"score": 1.0, "index": 0, "answer": "one"}


def test_first_of_equal_choices_wins(choosers: Any) -> None:
    answer = choosers("bert").predictor({"prompt": "the same", "choices": ["b", "a", "a"]}, top_k=None)
    indices = [chosen["index"] for chosen in answer if chosen["answer"] == "a"]
    assert indices == [1, 2]


def test_long_pair_is_truncated(choosers: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hasten"):
        choosers("bert").predictor(ITEMS)
    assert "2 texts (first: 6) were truncated to the model's limit of 64 tokens" in caplog.text


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ([], "the list is empty"),
        ("a text", "item 1 is str, not a prompt with choices"),
        ([ITEMS[0], ["a", "b"]], "item 2 is list"),
        ({"prompt": "a"}, 'item 1 has no "choices"'),
        ([ITEMS[0], {"choices": ["a"]}], 'item 2 has no "prompt"'),
        ({"prompt": "a", "choices": []}, "item 1 has no choices"),
        ({"prompt": "a", "choices": "bc"}, '"choices" of item 1 is str'),
        ({"prompt": "a", "choices": {"b": "c"}}, '"choices" of item 1 is dict'),
        ({"prompt": "a", "choices": ["b", ""]}, "choice 2 of item 1 is empty"),
        ({"prompt": "a", "choices": ["b", 3]}, "choice 2 of item 1 is int"),
        ({"prompt": " ", "choices": ["b"]}, "prompt 1 is empty"),
        ({"text": None, "choices": ["b"]}, 'item 1 has no "prompt"'),
        ({"text": 7, "choices": ["b"]}, "prompt 1 is int"),
        ({"prompt": "a", "choices": ["\udc00"]}, "lone surrogate"),
        (None, "item 1 is NoneType"),
    ],
)
def test_invalid_question_raises_input_error(choosers: Any, payload: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        choosers("bert").predictor(payload)


@pytest.mark.parametrize("options", [{"top_k": 0}, {"top_k": "two"}, {"topk": 1}])
def test_invalid_option_raises_input_error(choosers: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        choosers("bert").predictor(ITEMS[0], **options)


def test_bundle_is_built_on_the_built_in_sample_and_verified(
    tiny_model: Any, quick_build: Any, questions_file: Path
) -> None:
    from hasten.core.progress import SilentProgress
    from hasten.measure.data import read_rows
    from hasten.measure.verify_bundle import verify_bundle

    variants = ["onnxruntime-fp32", "openvino-fp32"]
    model = tiny_model("bert", "ForMultipleChoice")
    bundle = quick_build(model, variants=variants, data=None, keep="all")
    assert bundle.chosen.agreement.rows >= 100
    candidates = verify_bundle(bundle, read_rows(questions_file), bundle.manifest.gate, (), 1, SilentProgress())
    for candidate in candidates:
        assert candidate.verdict is not None
        assert candidate.verdict.passed
    judged = [candidate.verdict.metric for candidate in candidates[1:] if candidate.verdict is not None]
    assert [metric.name for metric in judged if metric is not None] == ["accuracy", "accuracy"]
    assert np.isclose(judged[0].value * len(ITEMS), round(judged[0].value * len(ITEMS)))


def test_payload_fields_can_be_passed_by_name(choosers: Any) -> None:
    predictor, item = choosers("bert").predictor, ITEMS[0]
    assert predictor(**item) == predictor(item)
    with pytest.raises(InputError, match="NoneType"):
        predictor()
