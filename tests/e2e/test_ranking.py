"""Zero-shot classification and ranking with trained weights on real texts.

Both use the fine-tuned sentiment model: its answers mean nothing here, but its scores are those of a trained model.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten

LABELS = ["a film", "the acting", "politics"]
SINGLE_VARIANT: dict[str, Any] = {"variants": ["onnxruntime-fp32"], "threads": None}

RealModels = Callable[[str], Path]


@pytest.fixture(scope="module")
def scorer(real_models: RealModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-encoder whose single output is the difference of the classifier's two logits."""
    import torch
    import transformers
    from sentence_transformers import CrossEncoder

    folder = tmp_path_factory.mktemp("scorer")
    source = real_models("sst2")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(source)
    (head,) = [module for module in model.modules() if isinstance(module, torch.nn.Linear) and module.out_features == 2]
    with torch.no_grad():
        head.weight = torch.nn.Parameter(head.weight[1:] - head.weight[:1])
        head.bias = torch.nn.Parameter(head.bias[1:] - head.bias[:1])
    head.out_features = 1
    model.config.num_labels = model.num_labels = 1
    model.save_pretrained(folder / "plain")
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(folder / "plain")
    CrossEncoder(str(folder / "plain"), device="cpu").save_pretrained(str(folder / "saved"))
    return folder / "saved"


@pytest.fixture(scope="module")
def questions(real_data: Path) -> list[dict[str, Any]]:
    """Questions with paragraphs, one of which holds the answer; some exceed the model's limit."""
    rows = [json.loads(line) for line in (real_data / "xquad_en.jsonl").read_text(encoding="utf-8").splitlines()]
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    questions = []
    for index, row in enumerate(rows[::60][:3]):
        others = [context for context in contexts[index::40] if context != row["context"]][:4]
        documents = [*others[:2], row["context"], *others[2:], " ".join(others)]
        relevance = [int(document == row["context"]) for document in documents]
        questions.append({"query": row["question"], "documents": documents, "relevance": relevance})
    return questions


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_zero_shot_answers_equal_the_pipeline(
    real_models: RealModels, real_data: Path, quick_build: Any, tmp_path: Path
) -> None:
    import transformers

    texts = [json.loads(line)["text"] for line in (real_data / "sst2_validation.jsonl").read_text().splitlines()[:30]]
    texts.append(" ".join(texts))  # far beyond the model's limit
    model, bundle, file = real_models("sst2"), tmp_path / "bundle", tmp_path / "rows.jsonl"
    write_rows(file, [{"text": text, "candidate_labels": LABELS} for text in texts])
    quick_build(model, bundle, task="zero-shot-classification", data=file, **SINGLE_VARIANT)
    pipeline = transformers.pipeline("zero-shot-classification", str(model), device="cpu")
    with hasten.load(bundle) as classify:
        for is_multi in (False, True):
            ours = classify(texts, candidate_labels=LABELS, multi_label=is_multi)
            theirs = pipeline(texts, LABELS, multi_label=is_multi)
            for mine, other in zip(ours, theirs, strict=True):
                assert mine["sequence"] == other["sequence"]
                assert mine["labels"] == other["labels"]
                assert mine["scores"] == pytest.approx(other["scores"], abs=1e-4)
    command = [sys.executable, "-m", "hasten", "run", str(bundle), texts[0], "-O", "candidate_labels=a film,politics"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "a film 0." in shown
    assert "politics 0." in shown


def test_rankings_equal_the_cross_encoder(
    scorer: Path, questions: list[dict[str, Any]], quick_build: Any, tmp_path: Path
) -> None:
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

    bundle, file = tmp_path / "bundle", tmp_path / "rows.jsonl"
    write_rows(file, questions)
    built = quick_build(scorer, bundle, data=file, **SINGLE_VARIANT)
    assert built.manifest.task.name == "text-ranking"
    reference = CrossEncoder(str(scorer), device="cpu")
    with hasten.load(bundle) as rank:
        for row in questions:
            ours = rank(row, return_documents=True)
            theirs = reference.rank(row["query"], row["documents"], return_documents=True)
            assert [entry["text"] for entry in ours] == [entry["text"] for entry in theirs]
            assert [entry["corpus_id"] for entry in ours] == [entry["corpus_id"] for entry in theirs]
            np.testing.assert_allclose(
                [entry["score"] for entry in ours], [entry["score"] for entry in theirs], rtol=0, atol=1e-4
            )
    samples = [
        {
            "query": row["query"],
            "positive": [
                text for text, is_relevant in zip(row["documents"], row["relevance"], strict=True) if is_relevant
            ],
            "negative": [
                text for text, is_relevant in zip(row["documents"], row["relevance"], strict=True) if not is_relevant
            ],
        }
        for row in questions
    ]
    expected = CrossEncoderRerankingEvaluator(samples, write_csv=False)(reference)
    (verdict,) = [candidate.verdict for candidate in built.report.candidates if candidate.verdict]
    assert verdict.metric.value == pytest.approx(expected["ndcg@10"])
    assert verdict.metric.other_metrics == {
        "MRR@10": pytest.approx(expected["mrr@10"]),
        "MAP": pytest.approx(expected["map"]),
    }
    command = [sys.executable, "-m", "hasten", "run", str(bundle), "--input", str(file), "-O", "top_k=1", "--quiet"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == len(questions)
    assert all(len(json.loads(line)) == 1 for line in lines)


def test_pair_classification_equals_the_cross_encoder(
    real_models: RealModels, real_data: Path, quick_build: Any, tmp_path: Path
) -> None:
    from sentence_transformers import CrossEncoder

    rows = [json.loads(line) for line in (real_data / "stsb_validation.jsonl").read_text().splitlines()[:150]]
    pairs = [[row["text"], row["text_pair"]] for row in rows]
    write_rows(tmp_path / "rows.jsonl", [{"text": text, "text_pair": other} for text, other in pairs])
    quick_build(
        real_models("sst2"), tmp_path / "b", task="text-ranking", data=tmp_path / "rows.jsonl", **SINGLE_VARIANT
    )
    with hasten.load(tmp_path / "b") as score:
        theirs = CrossEncoder(str(real_models("sst2")), device="cpu").predict(pairs)
        assert theirs.shape == (150, 2)
        np.testing.assert_allclose(score(pairs), theirs, rtol=0, atol=1e-4)
        assert score(pairs, function_to_apply="softmax").sum(axis=1) == pytest.approx(np.ones(150))
