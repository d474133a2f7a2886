"""Selection among a model's files, and properties of adapter files, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.builder.sources.directory import list_files
from hasten.builder.sources.in_memory import get_model_name
from hasten.builder.sources.locate import pick_graph
from hasten.builder.sources.peft import _architecture, count_labels
from hasten.core.errors import PlanError
from hasten.core.plan import Plan

CONFIG_FILES = ("config.json", "tokenizer.json")


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
        # The weights of a dense layer do not count as the model's.
        (["2_Dense/model.safetensors", "onnx/model.onnx"], "onnx/model.onnx"),
    ],
)
def test_default_graph_is_picked_without_weights(files: list[str], expected: str | None) -> None:
    assert pick_graph([*CONFIG_FILES, *files], Plan("acme/model")) == expected


@pytest.mark.parametrize("file_name", ["onnx/model_fp16.onnx", "./onnx/model_fp16.onnx"])
def test_graph_named_in_plan_is_picked(file_name: str) -> None:
    files = [*CONFIG_FILES, "model.safetensors", "model.onnx", "onnx/model_fp16.onnx"]
    assert pick_graph(files, Plan("acme/model", file_name=file_name)) == "onnx/model_fp16.onnx"


def test_ambiguous_graphs_are_listed_in_the_error() -> None:
    files = [*CONFIG_FILES, "decoder.onnx", "encoder.onnx"]
    with pytest.raises(PlanError, match=r"acme/model holds 2 ONNX graphs.*decoder\.onnx, encoder\.onnx"):
        pick_graph(files, Plan("acme/model"))
    with pytest.raises(PlanError, match=r"did you mean 'encoder\.onnx'.*decoder\.onnx, encoder\.onnx"):
        pick_graph(files, Plan("acme/model", file_name="encodr.onnx"))


def test_list_files_matches_hub_listing(tmp_path: Path) -> None:
    for name in ("b.json", "onnx/model.onnx", "a/deep/er.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert list_files(tmp_path) == ["b.json", "onnx/model.onnx"]


@pytest.mark.parametrize(
    ("base", "task_type", "task", "expected"),
    [
        ("BertForMaskedLM", "SEQ_CLS", None, "BertForSequenceClassification"),
        ("BertModel", "TOKEN_CLS", None, "BertForTokenClassification"),
        ("BertForMaskedLM", "FEATURE_EXTRACTION", None, "BertModel"),
        ("GPT2LMHeadModel", "SEQ_CLS", None, "GPT2ForSequenceClassification"),
        ("BertForMaskedLM", None, None, "BertForMaskedLM"),
        ("BertForMaskedLM", None, "text-classification", "BertForSequenceClassification"),
        ("BertForMaskedLM", "SEQ_CLS", "token-classification", "BertForTokenClassification"),
        ("BertModel", None, "sentence-similarity", "BertModel"),
        ("LlamaForCausalLM", "CAUSAL_LM", "text-generation", "LlamaForCausalLM"),
        ("BertForSequenceClassification", "SEQ_CLS", None, "BertForSequenceClassification"),
    ],
)
def test_adapter_architecture_has_the_needed_head(
    base: str, task_type: str | None, task: str | None, expected: str
) -> None:
    assert _architecture(base, task_type, Plan("acme/adapter", task=task)) == expected


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
def test_labels_are_counted_in_the_adapter_head(shapes: dict[str, tuple[int, ...]], expected: int | None) -> None:
    assert count_labels({f"base_model.model.{name}": shape for name, shape in shapes.items()}) == expected


def test_name_of_path_or_hub_id_is_itself() -> None:
    assert get_model_name("acme/model") == "acme/model"
    assert get_model_name(Path("/models/acme")) == "/models/acme"
    assert get_model_name(7) == "int"
