"""Real fine-tuned models behind transformers' pipelines: what ours answer is what theirs answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
import hasten.transformers
from hasten.core import squad
from untimed import untimed

FEW = 30


def rows_of(file: Path, count: int = FEW) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:count]]


@pytest.fixture(scope="module")
def few(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The first rows of a data file: what a build is judged on here."""

    def cut(name: str) -> Path:
        file = tmp_path_factory.mktemp("few") / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows_of(real_data / name)), encoding="utf-8")
        return file

    return cut


def both(kind: str, folder: Path, data: Path) -> tuple[Any, Any]:
    import transformers

    with untimed():
        ours = getattr(hasten.transformers, kind).from_pretrained(folder, data=data)
    return ours, getattr(transformers, kind).from_pretrained(folder).eval()


def test_classification(real_models: Callable[[str], Path], real_data: Path, few: Callable[[str], Path]) -> None:
    import transformers

    folder = real_models("sst2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    models = both("AutoModelForSequenceClassification", folder, few("sst2_validation.jsonl"))
    texts = [row["text"] for row in rows_of(real_data / "sst2_validation.jsonl", 200)]
    ours, theirs = (
        transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)(texts, batch_size=8)
        for model in models
    )
    assert [one["label"] for one in ours] == [one["label"] for one in theirs]
    assert np.allclose([one["score"] for one in ours], [one["score"] for one in theirs], atol=1e-4)


def test_entities(real_models: Callable[[str], Path], real_data: Path, few: Callable[[str], Path]) -> None:
    import transformers

    folder = real_models("wnut17")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    models = both("AutoModelForTokenClassification", folder, few("wnut17_test.jsonl"))
    texts = [" ".join(row["tokens"]) for row in rows_of(real_data / "wnut17_test.jsonl", 200)]
    ours, theirs = (
        transformers.pipeline("token-classification", model=model, tokenizer=tokenizer, aggregation_strategy="simple")(
            texts, batch_size=8
        )
        for model in models
    )
    found = [[(one["entity_group"], one["start"], one["end"], one["word"]) for one in text] for text in ours]
    assert found == [[(one["entity_group"], one["start"], one["end"], one["word"]) for one in text] for text in theirs]
    assert sum(map(len, found)) > 50
    scores = [[one["score"] for text in answers for one in text] for answers in (ours, theirs)]
    assert np.allclose(*scores, atol=1e-4)


def test_question_answering(real_models: Callable[[str], Path], few: Callable[[str], Path]) -> None:
    """There is no pipeline for it any more: the logits, and the answers of the twin that has one."""
    import torch
    import transformers

    folder = real_models("qa")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    data = few("xquad_en.jsonl")
    ours, theirs = both("AutoModelForQuestionAnswering", folder, data)
    rows = rows_of(data)
    for start in range(0, 24, 8):
        pairs = [[row["question"], row["context"]] for row in rows[start : start + 8]]
        inputs = tokenizer(pairs, padding=True, truncation="only_second", max_length=384, return_tensors="pt")
        with torch.inference_mode():
            expected = theirs(**inputs)
        found, mask = ours(**inputs), inputs["attention_mask"].bool()
        for name in ("start_logits", "end_logits"):
            assert torch.allclose(found[name][mask], expected[name][mask], atol=1e-3)
    # Of the same options, so of the same bundle, which is there by now.
    with hasten.pipeline("question-answering", folder, data=data) as ask:
        answers = ask([{"question": row["question"], "context": row["context"]} for row in rows])
    right = [row["answers"]["text"] for row in rows]
    assert (
        np.mean([squad.best(squad.f1, one["answer"], texts) for one, texts in zip(answers, right, strict=True)]) > 0.5
    )
