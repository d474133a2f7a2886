"""A build from a model object gives the same answers, names its source, and leaves the object unchanged."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.core.errors import PlanError, UnsupportedError

ORT_FP32 = "onnxruntime-fp32"


@pytest.fixture
def loaded(tiny_classifier: Any) -> tuple[Any, Any]:
    """A classifier and its tokenizer, as in a notebook."""
    import transformers

    folder = tiny_classifier("bert")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The build's temporary directory; torch, which leaves a folder there, is already imported."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def module_logits(model: Any, tokenizer: Any, texts: Sequence[str]) -> np.ndarray:
    """Return the logits of a copy of the object, in fp32 and without dropout."""
    import torch

    model = copy.deepcopy(model).float().eval()
    with torch.inference_mode():
        return model(**tokenizer(list(texts), padding=True, return_tensors="pt")).logits.numpy()


def bundle_logits(bundle: Any, texts: Sequence[Any]) -> np.ndarray:
    with hasten.load(bundle.path, threads=1) as predictor:
        answers = predictor(list(texts), top_k=None, function_to_apply="none")
        return np.array(
            [[{row["label"]: row["score"] for row in rows}[name] for name in predictor.spec.labels] for rows in answers]
        )


def state(model: Any) -> dict[str, Any]:
    """Return everything about the object that a caller could observe."""
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "identity": {name: id(value) for name, value in model.named_parameters()},
        "trains": {name: module.training for name, module in model.named_modules()},
        "kinds": {name: type(module) for name, module in model.named_modules()},
        "hooks": {name: list(module._forward_hooks) for name, module in model.named_modules()},
        "gradients": {name: (value.requires_grad, value.grad is not None) for name, value in model.named_parameters()},
        "config": (id(model.config), copy.deepcopy(vars(model.config))),
    }


def assert_untouched(model: Any, before: dict[str, Any]) -> None:
    import torch

    after = state(model)
    weights, expected = after.pop("weights"), before.pop("weights")
    assert after == before
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name]), name


def test_model_in_training_is_built_and_left_unchanged(
    loaded: tuple[Any, Any], quick_build: Any, temporary: Path, corpus: tuple[str, ...]
) -> None:
    """The model is in fp16 and in train mode, with gradients, frozen parts and hooks."""
    import torch

    model, tokenizer = loaded
    model.half().train()
    model.bert.pooler.eval()
    model.bert.embeddings.requires_grad_(False)
    model.classifier.weight.grad = torch.ones_like(model.classifier.weight)
    model.bert.encoder.register_forward_hook(lambda *_: None)
    before = state(model)
    bundle = quick_build(model, tokenizer=tokenizer, variants=[ORT_FP32])
    assert_untouched(model, before)
    assert list(temporary.iterdir()) == []
    np.testing.assert_allclose(bundle_logits(bundle, corpus), module_logits(model, tokenizer, corpus), atol=1e-4)
    assert bundle.manifest.model.id == "BertForSequenceClassification(bert-labels-3)"
    assert bundle.manifest.model.architecture == "BertForSequenceClassification"
    assert bundle.manifest.task.labels == ("bad", "fair", "good")
    assert bundle.report.plan.model == bundle.manifest.model.id


@pytest.mark.parametrize("adapter", ["lora", "dora"])
def test_peft_model_is_merged_in_a_copy(
    loaded: tuple[Any, Any], quick_build: Any, temporary: Path, corpus: tuple[str, ...], adapter: str
) -> None:
    import peft
    import torch

    model, tokenizer = loaded
    plain = module_logits(model, tokenizer, corpus)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, use_dora=adapter == "dora", target_modules=["query", "value"])
    torch.manual_seed(3)
    adapted = peft.get_peft_model(model, config)
    for name, value in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.3)
    before = state(adapted)
    bundle = quick_build(adapted, tokenizer=tokenizer, variants=[ORT_FP32])
    assert_untouched(adapted, before)
    assert list(temporary.iterdir()) == []
    theirs = module_logits(adapted, tokenizer, corpus)
    assert np.abs(theirs - plain).max() > 0.1
    np.testing.assert_allclose(bundle_logits(bundle, corpus), theirs, atol=1e-4)
    assert bundle.manifest.model.id == "PeftModelForSequenceClassification(bert-labels-3)"


def test_sentence_transformer_object_is_built(tiny_embedder: Any, quick_build: Any, corpus: tuple[str, ...]) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(tiny_embedder(modules=("Dense", "Normalize"))), device="cpu", local_files_only=True)
    before = copy.deepcopy(vars(model[0].auto_model.config))
    bundle = quick_build(model, variants=[ORT_FP32])
    assert vars(model[0].auto_model.config) == before
    assert bundle.manifest.model.id == "SentenceTransformer(embedder)"
    with hasten.load(bundle.path, threads=1) as embed:
        np.testing.assert_allclose(embed(list(corpus)), model.encode(list(corpus)), atol=1e-5)


def test_cross_encoder_object_is_built(tiny_classifier: Any, quick_build: Any, corpus: tuple[str, ...]) -> None:
    import torch
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(tiny_classifier("bert", labels=("spam",))), device="cpu", local_files_only=True)
    bundle = quick_build(model, variants=[ORT_FP32], task="text-classification")
    pairs = [(corpus[0], text) for text in corpus]
    theirs = model.predict(pairs, activation_fn=torch.nn.Identity())
    ours = bundle_logits(bundle, [{"text": first, "text_pair": second} for first, second in pairs])
    np.testing.assert_allclose(ours[:, 0], theirs, atol=1e-4)


def test_cross_encoder_object_is_detected_as_text_ranking(
    tiny_classifier: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(tiny_classifier("bert", labels=("spam",))), device="cpu", local_files_only=True)
    monkeypatch.setattr("hasten.builder.encoder_build.EncoderBuild.run", lambda build: build.resolved.preview)
    assert hasten.build(model).task == "text-ranking"


def test_default_output_path_is_named_after_the_object(
    loaded: tuple[Any, Any], hasten_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = loaded
    monkeypatch.setattr("hasten.builder.encoder_build.EncoderBuild.run", lambda build: build.resolved.target)
    path = hasten.build(model, tokenizer=tokenizer)
    assert path == hasten_cache / "bundles" / "BertForSequenceClassification-bert-labels-3"


def test_unsupported_objects_are_rejected(
    loaded: tuple[Any, Any], tiny_classifier: Any, tiny_embedder: Any, no_leftovers: Path
) -> None:
    import peft
    import torch
    from sentence_transformers import SentenceTransformer

    model, tokenizer = loaded
    with pytest.raises(PlanError, match=r"has no tokenizer \(hasten.build\(model, tokenizer"):
        hasten.build(model, no_leftovers)
    with pytest.raises(PlanError, match="Linear is not a supported model class"):
        hasten.build(torch.nn.Linear(2, 2), no_leftovers, tokenizer=tokenizer)
    with pytest.raises(PlanError, match="int is not a supported model class"):
        hasten.build(7, no_leftovers)
    with pytest.raises(PlanError, match="tokenizer is for models in memory"):
        hasten.build(tiny_classifier("bert"), no_leftovers, tokenizer=tokenizer)
    embedder = SentenceTransformer(str(tiny_embedder()), device="cpu", local_files_only=True)
    with pytest.raises(PlanError, match="includes its tokenizer"):
        hasten.build(embedder, no_leftovers, tokenizer=tokenizer)
    tuned = peft.get_peft_model(
        copy.deepcopy(model), peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)
    )
    with pytest.raises(UnsupportedError, match="PROMPT_TUNING adapter cannot be merged into weights"):
        hasten.build(tuned, no_leftovers, tokenizer=tokenizer)
    model.add_adapter(peft.LoraConfig(target_modules=["query"]))
    with pytest.raises(UnsupportedError, match="holds adapters"):
        hasten.build(model, no_leftovers, tokenizer=tokenizer)
