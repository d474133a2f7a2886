"""Test what a build rejects early: contradictory plans, and models that are damaged or missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hasten
from hasten.core.errors import HastenError, PlanError, StageError, UnsupportedError
from support.models import tiny_encoders

ORT_FP32 = "onnxruntime-fp32"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"variants": ["onnxruntime-fp16"]}, UnsupportedError, "fp16"),
        ({"variants": ["openvino-fp32@abacus"]}, UnsupportedError, "abacus"),
        ({"variants": ["onnxruntim-fp32"]}, PlanError, "did you mean 'onnxruntime'"),
        ({"variants": ["onnxruntime-int9"]}, PlanError, "not the name of a variant"),
        ({"variants": ["torch-fp32"]}, PlanError, "comparison"),
        ({"task": "text-clasification"}, PlanError, "did you mean 'text-classification'"),
        ({"batch_size": (4, 2, 1)}, PlanError, "out of order"),
        ({"seq_len": ()}, PlanError, "one number or three"),
        ({"min_agreement": 2.0}, PlanError, "between 0 and 1"),
        ({"threads": 0}, PlanError, "threads"),
        ({"revision": "main"}, PlanError, "revision"),
        ({"keep": "some"}, PlanError, "keep"),
    ],
)
def test_invalid_plan_is_rejected_at_once(
    tiny_classifier: Any, no_leftovers: Path, options: dict[str, Any], error: type[HastenError], message: str
) -> None:
    with pytest.raises(error, match=message):
        hasten.build(tiny_classifier("bert"), no_leftovers, **options)


def edit_config(model: Path, **changes: object) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))


def remove_head(model: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    remaining = {name: value for name, value in weights.items() if not name.startswith("classifier")}
    save_file(remaining, model / "model.safetensors", metadata={"format": "pt"})


DAMAGE: dict[str, tuple[Callable[[Path], object], type[HastenError], str]] = {
    "no config": (lambda model: (model / "config.json").unlink(), PlanError, "no config.json"),
    "broken config": (lambda model: (model / "config.json").write_text("{"), PlanError, "not valid JSON"),
    "config is a list": (lambda model: (model / "config.json").write_text("[]"), PlanError, "config.json"),
    "no weights": (lambda model: (model / "model.safetensors").unlink(), PlanError, "no weights"),
    "broken weights": (lambda model: (model / "model.safetensors").write_bytes(b"{}" * 9), StageError, "does not load"),
    # transformers fills in random numbers and only warns; a bundle of them would pass every later check.
    "weights without the head": (remove_head, StageError, "classifier"),
    # transformers 5 makes one with an empty vocabulary, to which every word is unknown.
    "no tokenizer": (
        lambda model: [file.unlink() for file in model.glob("tokenizer*")], HastenError, "tokenizer"
    ),
    "unknown architecture": (
        lambda model: edit_config(model, architectures=["BertForSomethingElse"]), PlanError, "cannot determine the task"
    ),
    "unknown model type": (lambda model: edit_config(model, model_type="abacus"), StageError, "does not load"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_model_is_rejected(
    tiny_classifier: Any, quick_build: Any, no_leftovers: Path, tmp_path: Path, damage: str
) -> None:
    change, error, message = DAMAGE[damage]
    model = shutil.copytree(tiny_classifier("bert"), tmp_path / "model")
    change(model)
    with pytest.raises(error, match=message):
        quick_build(model, no_leftovers, variants=[ORT_FP32])


def test_pickled_weights_need_permission(
    tiny_classifier: Any, quick_build: Any, no_leftovers: Path, tmp_path: Path, corpus: tuple[str, ...]
) -> None:
    import torch
    from safetensors.torch import load_file

    model = shutil.copytree(tiny_classifier("bert"), tmp_path / "model")
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    with pytest.raises(UnsupportedError, match="pickled"):
        quick_build(model, no_leftovers, variants=[ORT_FP32])
    pickled = quick_build(model, variants=[ORT_FP32], allow_pickle=True)
    safe = quick_build(tiny_classifier("bert"), variants=[ORT_FP32])
    assert hasten.load(pickled.path)(list(corpus)) == hasten.load(safe.path)(list(corpus))


@pytest.mark.parametrize(
    ("model", "error", "exit_code"),
    [
        ("missing/model", StageError, 4),
        ("missing-model", StageError, 4),
        ("./no/such/directory", PlanError, 2),
        ("/no/such/directory", PlanError, 2),
        ("not a model name", PlanError, 2),
        ("https://example.com/model", PlanError, 2),
    ],
)
def test_missing_model_is_rejected(no_leftovers: Path, model: str, error: type[HastenError], exit_code: int) -> None:
    with pytest.raises(error, match="no model") as caught:
        hasten.build(model, no_leftovers)
    assert caught.value.exit_code == exit_code


def test_bundle_is_rejected_as_a_model(
    tiny_classifier: Any, quick_build: Any, no_leftovers: Path, tmp_path: Path
) -> None:
    bundle = quick_build(tiny_classifier("bert"), tmp_path / "bundle", variants=[ORT_FP32])
    with pytest.raises(PlanError, match="already a bundle"):
        hasten.build(bundle.path, no_leftovers)
    with pytest.raises(PlanError, match="is a file"):
        hasten.build(bundle.path / "graph" / "model.onnx", no_leftovers)


def test_task_must_fit_the_model(tiny_classifier: Any, tiny_embedder: Any, no_leftovers: Path) -> None:
    with pytest.raises(PlanError, match="no head for text-classification; it fits sentence-similarity"):
        hasten.build(tiny_embedder(), no_leftovers, task="text-classification")
    with pytest.raises(PlanError, match="pooling"):
        hasten.build(tiny_classifier("bert"), no_leftovers, task="sentence-similarity")


def test_unknown_pooling_is_rejected(tiny_embedder: Any, no_leftovers: Path) -> None:
    with pytest.raises(PlanError, match="weightedmean"):
        hasten.build(tiny_embedder(), no_leftovers, pooling="average")


def test_pooling_is_rejected_for_a_classifier(tiny_classifier: Any, quick_build: Any, no_leftovers: Path) -> None:
    """An option that is ignored is worse than one that is rejected."""
    with pytest.raises(PlanError, match="pooling"):
        quick_build(tiny_classifier("bert"), no_leftovers, pooling="mean", variants=[ORT_FP32])


def test_unknown_module_is_rejected(tiny_embedder: Any, no_leftovers: Path) -> None:
    with pytest.raises(UnsupportedError, match="LSTM"):
        hasten.build(tiny_embedder(modules=("LSTM",)), no_leftovers)


def test_invalid_target_is_rejected_before_the_work(tiny_classifier: Any, tmp_path: Path) -> None:
    from hasten.builder.preflight import preview
    from hasten.core.plan import Plan

    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file", tmp_path / "file" / "bundle"):
        with pytest.raises(PlanError, match="is a file"):
            preview(Plan(model=str(tiny_classifier("bert"))), target)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("LayoutLM", "reads the boxes of words on a page, and only texts are supported"),
        ("CLIP", "CLIPModel reads images besides texts, and only texts are supported"),
        ("Longformer", "a longformer divides texts into windows"),
        ("Funnel", "a funnel shortens texts by pooling them"),
    ],
)
def test_model_that_one_graph_of_texts_cannot_hold_is_rejected(
    kind: str, message: str, no_leftovers: Path, tmp_path: Path
) -> None:
    import transformers

    model = tmp_path / "model"
    tiny_encoders.save("bert", "Model", model)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    text = {**sizes, "vocab_size": 200, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    fields = {
        "LayoutLM": text,
        "CLIP": {"text_config": text, "vision_config": {**sizes, "image_size": 32, "patch_size": 16}},
        "Longformer": {**text, "attention_window": 8},
        "Funnel": {"vocab_size": 200, "block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64},
    }[kind]
    config = getattr(transformers, f"{kind}Config")(**fields)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(model)
    with pytest.raises(UnsupportedError, match=message):
        hasten.build(model, no_leftovers, task="feature-extraction", threads=1)
