"""`hasten.map` returns the answers of `hasten.load` as typed columns, for every task."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import hasten
from hasten.core.errors import InputError, PlanError
from hasten.families import all_tasks

TEXTS = ["the cat sat on the mat", "rain", "what a wonderful film, I would watch it again tomorrow", "a dog " * 40]


@dataclass(frozen=True)
class Case:
    """A tiny model of a task, rows for it, and the answer that a row of the output stands for."""

    head: str
    rows: list[dict[str, Any]]
    answer: Callable[[dict[str, Any]], Any]
    options: dict[str, Any] = field(default_factory=dict)
    architecture: str = "bert"
    config: dict[str, Any] = field(default_factory=dict)


def of(*names: str) -> Callable[[dict[str, Any]], Any]:
    return lambda row: {name: row[name] for name in names}


LABELS = {"id2label": {0: "O", 1: "B-PER"}, "label2id": {"O": 0, "B-PER": 1}}
ENTAILMENT = {"id2label": {0: "contradiction", 1: "neutral", 2: "entailment"}}
PLAIN = [{"text": text} for text in TEXTS]
CASES = {
    "feature-extraction": Case("Model", PLAIN, lambda row: [row["token_embeddings"]]),
    "fill-mask": Case(
        "ForMaskedLM",
        [{"text": "the [MASK] sat on the mat"}, {"text": "a [MASK] ran across the [MASK] field"}],
        lambda row: row["masks"] if len(row["masks"]) > 1 else row["masks"][0],
    ),
    "multiple-choice": Case(
        "ForMultipleChoice",
        [{"prompt": "the cat", "choices": ["sat", "ran far", "rain"]}, {"prompt": "a", "choices": ["dog", "mat"]}],
        of("answer", "index", "score"),
    ),
    "multi-vector-embedding": Case("Model", PLAIN, lambda row: row["token_embeddings"]),
    "question-answering": Case(
        "ForQuestionAnswering",
        [{"question": "who sat?", "context": text} for text in TEXTS],
        of("answer", "score", "start", "end"),
    ),
    "sentence-similarity": Case("Model", PLAIN, lambda row: row["embedding"]),
    "sparse-embedding": Case("ForMaskedLM", PLAIN, of("indices", "values")),
    "text-classification": Case("ForSequenceClassification", PLAIN, of("label", "score")),
    "text-ranking": Case(
        "ForSequenceClassification",
        [{"query": "rain", "documents": TEXTS[:3]}, {"query": "a cat", "documents": TEXTS[2:]}],
        lambda row: row["ranking"],
        config={"id2label": {0: "score"}},
    ),
    "token-classification": Case(
        "ForTokenClassification",
        PLAIN,
        lambda row: row["entities"],
        {"aggregation_strategy": "simple", "ignore_labels": []},
        config=LABELS,
    ),
    "zero-shot-classification": Case(
        "ForSequenceClassification",
        PLAIN,
        lambda row: {"sequence": row["text"], "labels": row["labels"], "scores": row["scores"]},
        {"candidate_labels": ["rain", "a cat", "film"]},
        config=ENTAILMENT,
    ),
}
GENERATION = {"text-generation", "text2text-generation"}


@pytest.fixture(scope="module")
def bundles(
    tiny_model: Any, quick_build: Any, classifier_bundle: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Return the bundle of a task, built once."""

    @cache
    def get(task: str) -> Path:
        if task == "text-classification":
            return Path(classifier_bundle.path)
        case = CASES[task]
        data = tmp_path_factory.mktemp("rows") / "rows.jsonl"
        rows = [row | case.options if task.startswith("zero") else row for row in case.rows]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        model = tiny_model(case.architecture, case.head, **case.config)
        if task == "multi-vector-embedding":
            model = with_late_interaction(model, tmp_path_factory.mktemp("models") / "late-interaction")
        pooling = "mean" if task == "sentence-similarity" else None
        return Path(quick_build(model, variants=["onnxruntime-fp32"], task=task, pooling=pooling, data=data).path)

    return get


def with_late_interaction(model: Path, folder: Path) -> Path:
    shutil.copytree(model, folder)
    modules = [{"path": "", "type": "Transformer"}, {"path": "1_MultiVectorMask", "type": "MultiVectorMask"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "MultiVectorEncoder"}))
    return folder


def as_fp32(value: Any) -> Any:
    """Round all numbers as the columns do, and turn arrays into lists."""
    if isinstance(value, dict):
        return {key: as_fp32(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_fp32(entry) for entry in value]
    if isinstance(value, np.ndarray):
        return value.astype(np.float32).tolist()
    return float(np.float32(value)) if isinstance(value, float | np.floating) else value


def mapped(bundle: Path, rows: list[dict[str, Any]], **options: Any) -> pa.Table:
    return pa.Table.from_batches(list(hasten.map(bundle, [pa.RecordBatch.from_pylist(rows)], threads=1, **options)))


def test_every_task_has_a_case() -> None:
    assert set(all_tasks()) == set(CASES) | GENERATION


@pytest.mark.parametrize("task", CASES)
def test_columns_equal_the_answers_of_load(bundles: Callable[[str], Path], task: str) -> None:
    case, bundle = CASES[task], bundles(task)
    table = mapped(bundle, case.rows, **case.options)
    with hasten.load(bundle, threads=1) as predictor:
        expected = predictor(case.rows, **case.options)
    assert table.select(list(case.rows[0])).to_pylist() == case.rows
    assert [as_fp32(case.answer(row)) for row in table.to_pylist()] == as_fp32(list(expected))


def test_generated_text_equals_the_answers_of_load(generator_bundle: Any) -> None:
    prompts = ["the cat sat", "a dog", "rain on the green field"]
    table = mapped(
        generator_bundle.path, [{"body": prompt} for prompt in prompts], columns={"text": "body"}, max_tokens=5
    )
    with hasten.load(generator_bundle.path, threads=1) as generator:
        expected = [answer[0]["generated_text"] for answer in generator(prompts, max_tokens=5)]
    assert table["generated_text"].to_pylist() == expected


def test_batches_keep_their_borders_and_order(classifier_bundle: Any) -> None:
    batches = [pa.table({"n": [0, 1], "text": TEXTS[:2]}), pa.table({"n": [2], "text": TEXTS[2:3]})]
    results = list(hasten.map(classifier_bundle.path, batches, threads=1, where="n != 1", drop=["text"]))
    assert [result.column("n").to_pylist() for result in results] == [[0], [2]]
    assert results[0].schema.names == ["n", "label", "score"]


def test_row_without_an_answer_is_named(classifier_bundle: Any) -> None:
    batches = [pa.table({"text": ["rain"]}), pa.table({"text": pa.array([None, "a"], pa.string())})]
    with pytest.raises(InputError, match="row 1: text is null"):
        list(hasten.map(classifier_bundle.path, batches, threads=1))


def decoded(table: pa.Table) -> np.ndarray[Any, Any]:
    """Return stored vectors as the metadata of their column says."""
    metadata = {key.decode(): value.decode() for key, value in table.schema.field("embedding").metadata.items()}
    stored = np.array(table["embedding"].to_pylist())
    if metadata["hasten.vectors"] == "binary":
        return np.unpackbits(stored.astype(np.uint8), axis=1)[:, : int(metadata["hasten.dimensions"])]
    return stored * float(metadata.get("hasten.scale", 1))


def test_stored_vectors_are_near_the_computed_ones(bundles: Callable[[str], Path]) -> None:
    bundle = bundles("sentence-similarity")
    with hasten.load(bundle, threads=1) as predictor:
        vectors = predictor(TEXTS)
    for kind, tolerance in (("float32", 0), ("float16", 1e-3), ("int8", np.abs(vectors).max() / 127)):
        table = mapped(bundle, PLAIN, vectors=kind, dimensions=12)
        assert table.schema.field("embedding").type.list_size == 12
        assert np.abs(decoded(table) - vectors[:, :12]).max() <= tolerance, kind
    table = mapped(bundle, PLAIN, vectors="binary", dimensions=12)
    assert table.schema.field("embedding").type == pa.list_(pa.uint8(), 2)
    assert (decoded(table) == (vectors[:, :12] > 0)).all()


def test_vector_options_are_rejected_where_there_are_no_vectors(classifier_bundle: Any) -> None:
    with pytest.raises(PlanError, match="text-classification answers with none"):
        mapped(classifier_bundle.path, PLAIN, vectors="int8")


def test_pairs_are_answered_with_their_similarity(bundles: Callable[[str], Path]) -> None:
    bundle = bundles("sentence-similarity")
    rows = [{"text": "rain", "text_pair": text} for text in TEXTS]
    with hasten.load(bundle, threads=1) as predictor:
        expected = predictor(rows)
    assert mapped(bundle, rows)["similarity"].to_pylist() == as_fp32(list(expected))
