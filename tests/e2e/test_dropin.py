"""Fine-tuned models of the drop-in answer like transformers' own in transformers' pipelines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
import hasten.transformers
from hasten.metrics import squad
from support.fake_bench import fake_benchmark

SAMPLE_ROWS = 30


def read_rows(file: Path, count: int = SAMPLE_ROWS) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:count]]


@pytest.fixture(scope="module")
def sample_file(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that writes the first rows of a data file, which verify the build."""

    def write_sample(name: str) -> Path:
        file = tmp_path_factory.mktemp("few") / name
        file.write_text("".join(json.dumps(row) + "\n" for row in read_rows(real_data / name)), encoding="utf-8")
        return file

    return write_sample


def load_both(kind: str, folder: Path, data: Path) -> tuple[Any, Any]:
    import transformers

    with fake_benchmark():
        ours = getattr(hasten.transformers, kind).from_pretrained(folder, data=data)
    return ours, getattr(transformers, kind).from_pretrained(folder).eval()


def test_text_classification_equals_transformers(
    real_models: Callable[[str], Path], real_data: Path, sample_file: Callable[[str], Path]
) -> None:
    import transformers

    folder = real_models("sst2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    models = load_both("AutoModelForSequenceClassification", folder, sample_file("sst2_validation.jsonl"))
    texts = [row["text"] for row in read_rows(real_data / "sst2_validation.jsonl", 200)]
    ours, theirs = (
        transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)(texts, batch_size=8)
        for model in models
    )
    assert [answer["label"] for answer in ours] == [answer["label"] for answer in theirs]
    assert np.allclose([answer["score"] for answer in ours], [answer["score"] for answer in theirs], atol=1e-4)


def test_token_classification_equals_transformers(
    real_models: Callable[[str], Path], real_data: Path, sample_file: Callable[[str], Path]
) -> None:
    import transformers

    folder = real_models("wnut17")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    models = load_both("AutoModelForTokenClassification", folder, sample_file("wnut17_test.jsonl"))
    texts = [" ".join(row["tokens"]) for row in read_rows(real_data / "wnut17_test.jsonl", 200)]
    ours, theirs = (
        transformers.pipeline("token-classification", model=model, tokenizer=tokenizer, aggregation_strategy="simple")(
            texts, batch_size=8
        )
        for model in models
    )
    fields = ("entity_group", "start", "end", "word")
    our_spans, their_spans = (
        [[[entity[field] for field in fields] for entity in text] for text in answers] for answers in (ours, theirs)
    )
    assert our_spans == their_spans
    assert sum(map(len, our_spans)) > 50
    scores = [[entity["score"] for text in answers for entity in text] for answers in (ours, theirs)]
    assert np.allclose(*scores, atol=1e-4)


def test_question_answering_equals_transformers(
    real_models: Callable[[str], Path], sample_file: Callable[[str], Path]
) -> None:
    """transformers has no such pipeline any more: compare the logits, and score the answers of hasten.pipeline."""
    import torch
    import transformers

    folder = real_models("qa")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    data = sample_file("xquad_en.jsonl")
    ours, theirs = load_both("AutoModelForQuestionAnswering", folder, data)
    rows = read_rows(data)
    for start in range(0, 24, 8):
        pairs = [[row["question"], row["context"]] for row in rows[start : start + 8]]
        inputs = tokenizer(pairs, padding=True, truncation="only_second", max_length=384, return_tensors="pt")
        with torch.inference_mode():
            expected = theirs(**inputs)
        outputs, mask = ours(**inputs), inputs["attention_mask"].bool()
        for name in ("start_logits", "end_logits"):
            assert torch.allclose(outputs[name][mask], expected[name][mask], atol=1e-3)
    # The same options give the same bundle, which is cached by now.
    with hasten.pipeline("question-answering", folder, data=data) as ask:
        answers = ask([{"question": row["question"], "context": row["context"]} for row in rows])
    gold = [row["answers"]["text"] for row in rows]
    assert (
        np.mean([squad.best(squad.f1, answer["answer"], texts) for answer, texts in zip(answers, gold, strict=True)])
        > 0.5
    )
