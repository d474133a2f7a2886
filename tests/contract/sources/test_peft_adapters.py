"""A build from a PEFT adapter finds its base, loads the right head, merges both, and answers like PEFT."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.builder.sources.detect import detect_task
from hasten.builder.sources.locate import find_model
from hasten.core.errors import HastenError, PlanError, StageError, UnsupportedError
from hasten.core.plan import Plan

ORT_FP32 = "onnxruntime-fp32"
LABELS = 5


@dataclass
class Adapter:
    path: Path
    # PEFT's model, which is the reference.
    model: Any
    tokenizer: Any

    def outputs(self, texts: Sequence[str]) -> np.ndarray:
        import torch

        with torch.inference_mode():
            return self.model(**self.tokenizer(list(texts), padding=True, return_tensors="pt"))[0].numpy()


def configs() -> dict[str, Any]:
    import peft

    targets = {"target_modules": ["query", "value"]}
    feed_forward = ["output.dense"]
    return {
        "lora": peft.LoraConfig(r=4, **targets),
        "dora": peft.LoraConfig(r=4, use_dora=True, **targets),
        "ia3": peft.IA3Config(target_modules=["key", "value", *feed_forward], feedforward_modules=feed_forward),
    }


@pytest.fixture
def make_adapter(tmp_path: Path) -> Callable[..., Adapter]:
    """An adapter with its own head, as PEFT saves it; every trained tensor has random values."""

    def make(
        base: Path,
        kind: str = "lora",
        *,
        head: str = "AutoModelForSequenceClassification",
        task_type: str | None = "SEQ_CLS",
        **config_changes: Any,
    ) -> Adapter:
        import peft
        import torch
        import transformers

        from hasten.builder.sources.quiet import quiet_libraries

        torch.manual_seed(11)
        config = configs()[kind]
        config.task_type = task_type
        with quiet_libraries():
            model = getattr(transformers, head).from_pretrained(base, ignore_mismatched_sizes=True, **config_changes)
            adapted = peft.get_peft_model(model, config).eval()
            for name, value in adapted.named_parameters():
                if value.requires_grad:
                    torch.nn.init.normal_(value, 1.0 if "ia3" in name or "magnitude" in name else 0.0, 0.3)
            adapted.save_pretrained(tmp_path / "adapter")
        return Adapter(tmp_path / "adapter", adapted, transformers.AutoTokenizer.from_pretrained(base))

    return make


def bundle_outputs(bundle: Any, texts: Sequence[str]) -> np.ndarray:
    with hasten.load(bundle.path, threads=1) as predictor:
        encoded = predictor.encode(list(texts))
        return next(iter(predictor.outputs(encoded).values()))


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
@pytest.mark.parametrize("architecture", ["bert", "roberta"])
def test_adapter_answers_like_peft(
    tiny_classifier: Any,
    make_adapter: Callable[..., Adapter],
    load_tiny: Any,
    corpus: tuple[str, ...],
    architecture: str,
    kind: str,
) -> None:
    """The adapter's head has five labels, and the base's three."""
    adapter = make_adapter(tiny_classifier(architecture), kind, num_labels=LABELS)
    loaded = load_tiny(adapter.path)
    assert_same_module(loaded, adapter, corpus)
    assert loaded.task.labels == tuple(f"LABEL_{index}" for index in range(LABELS))
    plain = load_tiny(tiny_classifier(architecture))
    assert not has_same_weights(loaded.module.model, plain.module.model)


def has_same_weights(ours: Any, theirs: Any) -> bool:
    import torch

    theirs = theirs.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in ours.state_dict().items() if "encoder" in name)


def test_adapter_is_built_into_a_bundle(
    tiny_classifier: Any, make_adapter: Callable[..., Adapter], quick_build: Any, corpus: tuple[str, ...]
) -> None:
    adapter = make_adapter(tiny_classifier("bert"), num_labels=LABELS)
    bundle = quick_build(adapter.path, variants=[ORT_FP32])
    np.testing.assert_allclose(bundle_outputs(bundle, corpus), adapter.outputs(corpus), atol=1e-4)
    assert bundle.manifest.model.id == str(adapter.path)
    load = next(stage for stage in bundle.report.stages if stage.name == "load")
    assert f"merged into {tiny_classifier('bert')}" in load.notes


def test_adapter_head_replaces_the_head_of_the_base(
    tiny_model: Any, make_adapter: Callable[..., Adapter], quick_build: Any, corpus: tuple[str, ...]
) -> None:
    """Most adapters are trained on a masked language model; an adapter's configuration names its labels."""
    base = tiny_model("roberta", "ForMaskedLM")
    adapter = make_adapter(base, num_labels=2)
    config = json.loads((base / "config.json").read_text())
    names = {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}
    (adapter.path / "config.json").write_text(json.dumps(config | names))
    bundle = quick_build(adapter.path, variants=[ORT_FP32])
    assert bundle.manifest.model.architecture == "RobertaForSequenceClassification"
    assert bundle.manifest.task.labels == ("no", "yes")
    np.testing.assert_allclose(bundle_outputs(bundle, corpus), adapter.outputs(corpus), atol=1e-4)


def test_token_classification_adapter(
    tiny_model: Any, make_adapter: Callable[..., Adapter], load_tiny: Any, corpus: tuple[str, ...]
) -> None:
    base = tiny_model("bert", "ForMaskedLM")
    adapter = make_adapter(base, head="AutoModelForTokenClassification", task_type="TOKEN_CLS", num_labels=4)
    loaded = load_tiny(adapter.path)
    assert (loaded.task.name, len(loaded.task.labels)) == ("token-classification", 4)
    assert_same_module(loaded, adapter, corpus)


def test_task_option_is_used_when_adapter_names_none(
    tiny_model: Any, make_adapter: Callable[..., Adapter], load_tiny: Any, corpus: tuple[str, ...]
) -> None:
    """PEFT then saves the head only because it is listed in modules_to_save."""
    base = tiny_model("roberta", "ForMaskedLM")
    adapter = make_adapter(base, task_type="SEQ_CLS", num_labels=3)
    change_config(adapter.path, task_type=None)
    loaded = load_tiny(adapter.path, task="text-classification")
    assert loaded.task.name == "text-classification"
    assert_same_module(loaded, adapter, corpus)


def test_embedding_adapter_uses_the_layout_of_its_base(
    tiny_embedder: Any, make_adapter: Callable[..., Adapter], quick_build: Any, corpus: tuple[str, ...]
) -> None:
    """Pooling, prompts and maximum length come from the base, weights from the adapter."""
    base = tiny_embedder(modules=())
    adapter = make_adapter(base, head="AutoModel", task_type="FEATURE_EXTRACTION")
    bundle = quick_build(adapter.path, variants=[ORT_FP32])
    assert bundle.manifest.task.name == "sentence-similarity"
    for text in corpus[:3]:
        np.testing.assert_allclose(
            bundle_outputs(bundle, [text])[0], adapter.outputs([text])[0].mean(axis=0), atol=1e-5
        )


def assert_same_module(loaded: Any, adapter: Adapter, texts: Sequence[str]) -> None:
    import torch

    with torch.inference_mode():
        feeds = adapter.tokenizer(list(texts), padding=True, return_tensors="pt")
        (ours,) = loaded.module(**{name: feeds[name] for name in loaded.module.inputs})
    np.testing.assert_allclose(ours.numpy(), adapter.outputs(texts), atol=1e-4)


def change_config(adapter: Path, **changes: object) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | changes))


def test_base_is_found_relative_to_the_adapter(
    tiny_classifier: Any, make_adapter: Callable[..., Adapter], load_tiny: Any, corpus: tuple[str, ...]
) -> None:
    adapter = make_adapter(tiny_classifier("bert"), num_labels=LABELS)
    shutil.copytree(tiny_classifier("bert"), adapter.path.parent / "base")
    change_config(adapter.path, base_model_name_or_path="../base")
    assert_same_module(load_tiny(adapter.path), adapter, corpus)


def test_tokenizer_of_the_adapter_takes_precedence(
    tiny_classifier: Any, make_adapter: Callable[..., Adapter], load_tiny: Any
) -> None:
    adapter = make_adapter(tiny_classifier("bert"))
    assert load_tiny(adapter.path).signature.max_length == 64
    adapter.tokenizer.model_max_length = 24
    adapter.tokenizer.save_pretrained(adapter.path)
    assert load_tiny(adapter.path).signature.max_length == 24


def test_pickled_adapter_needs_allow_pickle(
    tiny_classifier: Any, make_adapter: Callable[..., Adapter], load_tiny: Any, corpus: tuple[str, ...]
) -> None:
    import torch
    from safetensors.torch import load_file

    adapter = make_adapter(tiny_classifier("bert"), num_labels=LABELS)
    torch.save(load_file(adapter.path / "adapter_model.safetensors"), adapter.path / "adapter_model.bin")
    (adapter.path / "adapter_model.safetensors").unlink()
    with pytest.raises(UnsupportedError, match=r"pickled weights \(adapter_model.bin\)"):
        load_tiny(adapter.path)
    assert_same_module(load_tiny(adapter.path, allow_pickle=True), adapter, corpus)


def drop_tensors(adapter: Path, part: str) -> None:
    from safetensors.torch import load_file, save_file

    file = adapter / "adapter_model.safetensors"
    remaining = {name: value for name, value in load_file(file).items() if part not in name}
    save_file(remaining, file, metadata={"format": "pt"})


DAMAGE: dict[str, tuple[Callable[[Path], object], type[HastenError], str]] = {
    "base not named": (lambda path: change_config(path, base_model_name_or_path=None), PlanError, "does not name"),
    "base does not exist": (
        lambda path: change_config(path, base_model_name_or_path="./gone"), PlanError, "adapter of ./gone: no model"
    ),
    "base is an adapter": (lambda path: change_config(path, base_model_name_or_path="."), HastenError, "adapter"),
    "no head": (lambda path: drop_tensors(path, "classifier"), StageError, "no weights for .*classifier"),
    "part of the head missing": (
        lambda path: drop_tensors(path, "classifier.dense.bias"), StageError, "no weights for .*dense.bias"
    ),
    "no head in base or adapter": (
        lambda path: (drop_tensors(path, "classifier"), change_config(path, task_type=None, modules_to_save=None)),
        StageError, "no weights for 4 tensors of RobertaForSequenceClassification, such as 'classifier"
    ),
    "layer missing": (lambda path: drop_tensors(path, "layer.1.attention.self.query.lora_A"), StageError, "lora_A"),
    "no weights": (lambda path: (path / "adapter_model.safetensors").unlink(), PlanError, "no weights"),
    "prompt learning": (
        lambda path: change_config(path, peft_type="PREFIX_TUNING", num_virtual_tokens=4),
        UnsupportedError, "PREFIX_TUNING"
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_adapter_is_rejected(
    tiny_model: Any, make_adapter: Callable[..., Adapter], load_tiny: Any, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    change, error, message = DAMAGE[damage]
    adapter = make_adapter(tiny_model("roberta", "ForMaskedLM"), num_labels=2)
    monkeypatch.chdir(adapter.path.parent)
    change(adapter.path)
    task = "text-classification" if damage == "no head in base or adapter" else None
    with pytest.raises(error, match=message):
        load_tiny(adapter.path, task=task)


@pytest.mark.parametrize("task", [None, "text-generation"])
def test_causal_lm_adapter_is_for_text_generation(
    tiny_model: Any, make_adapter: Callable[..., Adapter], task: str | None
) -> None:
    adapter = make_adapter(tiny_model("roberta", "ForMaskedLM"), num_labels=2)
    change_config(adapter.path, task_type="CAUSAL_LM")
    plan = Plan(str(adapter.path), task=task)
    assert detect_task(find_model(plan), plan) == "text-generation"


def test_error_names_the_package_when_peft_is_missing(
    tiny_classifier: Any, make_adapter: Callable[..., Adapter], load_tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make_adapter(tiny_classifier("bert"))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'hasten\[peft\]'"):
        load_tiny(adapter.path)
