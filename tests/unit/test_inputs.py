"""Choosing among a model's files, and what an adapter's files tell, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.builder.adapter import _architecture, label_count
from hasten.builder.memory import name_of
from hasten.builder.source import list_files, pick_graph
from hasten.core.errors import PlanError
from hasten.core.plan import Plan

ABOUT = ("config.json", "tokenizer.json")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], None),
        (["model.safetensors"], None),
        (["model.safetensors", "onnx/model.onnx", "model.onnx"], None),
        (["pytorch_model.bin", "model.onnx"], None),
        (["model.onnx"], "model.onnx"),
        (["model.onnx", "model.onnx_data"], "model.onnx"),
        (["model.onnx", "model_quantized.onnx"], "model.onnx"),
        (["onnx/model.onnx", "onnx/model_fp16.onnx"], "onnx/model.onnx"),
        (["model.onnx", "onnx/model.onnx"], "model.onnx"),
        (["model_quantized.onnx"], "model_quantized.onnx"),
        # The weights of a dense layer are not the model's.
        (["2_Dense/model.safetensors", "onnx/model.onnx"], "onnx/model.onnx"),
    ],
)
def test_which_graph_is_the_model(files: list[str], expected: str | None) -> None:
    assert pick_graph([*ABOUT, *files], Plan("acme/model")) == expected


@pytest.mark.parametrize("asked", ["onnx/model_fp16.onnx", "./onnx/model_fp16.onnx"])
def test_a_graph_that_is_asked_for_wins(asked: str) -> None:
    files = [*ABOUT, "model.safetensors", "model.onnx", "onnx/model_fp16.onnx"]
    assert pick_graph(files, Plan("acme/model", file_name=asked)) == "onnx/model_fp16.onnx"


def test_several_graphs_are_listed() -> None:
    files = [*ABOUT, "decoder.onnx", "encoder.onnx"]
    with pytest.raises(PlanError, match=r"acme/model holds 2 ONNX graphs.*decoder\.onnx, encoder\.onnx"):
        pick_graph(files, Plan("acme/model"))
    with pytest.raises(PlanError, match=r"did you mean 'encoder\.onnx'.*decoder\.onnx, encoder\.onnx"):
        pick_graph(files, Plan("acme/model", file_name="encodr.onnx"))


def test_files_are_listed_as_a_hub_does(tmp_path: Path) -> None:
    for name in ("b.json", "onnx/model.onnx", "a/deep/er.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert list_files(tmp_path) == ["b.json", "onnx/model.onnx"]


@pytest.mark.parametrize(
    ("base", "trained_for", "task", "expected"),
    [
        ("BertForMaskedLM", "SEQ_CLS", None, "BertForSequenceClassification"),
        ("BertModel", "TOKEN_CLS", None, "BertForTokenClassification"),
        ("BertForMaskedLM", "FEATURE_EXTRACTION", None, "BertModel"),
        ("GPT2LMHeadModel", "SEQ_CLS", None, "GPT2ForSequenceClassification"),
        ("BertForMaskedLM", None, None, "BertForMaskedLM"),
        ("BertForMaskedLM", None, "text-classification", "BertForSequenceClassification"),
        ("BertForMaskedLM", "SEQ_CLS", "token-classification", "BertForTokenClassification"),
        ("BertModel", None, "sentence-similarity", "BertModel"),
        ("BertForSequenceClassification", "SEQ_CLS", None, "BertForSequenceClassification"),
    ],
)
def test_the_head_an_adapter_needs(base: str, trained_for: str | None, task: str | None, expected: str) -> None:
    assert _architecture(base, trained_for, Plan("acme/adapter", task=task)) == expected


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ({"classifier.weight": (5, 32), "classifier.bias": (5,)}, 5),
        ({"classifier.dense.weight": (32, 32), "classifier.out_proj.weight": (3, 32)}, 3),
        ({"score.weight": (1, 32)}, 1),
        ({"qa_outputs.weight": (2, 32)}, 2),
        ({"bert.encoder.layer.0.attention.self.query.lora_A.weight": (4, 32)}, None),
        ({"classifier.lora_A.weight": (4, 32)}, None),
        ({}, None),
    ],
)
def test_labels_are_counted_in_the_head(shapes: dict[str, tuple[int, ...]], expected: int | None) -> None:
    assert label_count({f"base_model.model.{name}": shape for name, shape in shapes.items()}) == expected


def test_an_address_is_its_own_name() -> None:
    assert name_of("acme/model") == "acme/model"
    assert name_of(Path("/models/acme")) == "/models/acme"
    assert name_of(7) == "int"
