"""Read the activation and prompts of a cross-encoder, as each version of sentence-transformers stores them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hasten.builder.sources import logit_ranker
from hasten.builder.sources.directory import ModelDirectory
from hasten.builder.sources.sentence_layout import SCORES, DenseLayer, SentenceLayout, module_kinds, read_modules
from hasten.core.errors import UnsupportedError
from hasten.tasks import Pooling, TaskSpec

# By PyTorch class, the value of text-classification's option.
_ACTIVATIONS = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
# Keys in the model's config.json: of versions 4 to 5.3, and of earlier versions.
_KEY = "sentence_transformers"
_LEGACY_KEY = "sbert_ce_default_activation_function"


def is_cross_encoder(model: ModelDirectory) -> bool:
    """Return whether sentence-transformers saved the model as a cross-encoder."""
    return bool(_read_settings(model)) or (
        (_KEY in model.config or _LEGACY_KEY in model.config)
        and model.architecture.endswith("ForSequenceClassification")
    )


def read_scoring_layout(model: ModelDirectory) -> SentenceLayout | None:
    """Return the pooling and the layers of a model that scores with modules or logits; None if its transformer does."""
    settings = _read_settings(model)
    modules = module_kinds(model) if settings else []
    kinds = [kind for kind, _ in modules]
    if kinds == ["Transformer", logit_ranker.MODULE]:
        return SentenceLayout((Pooling.LAST_TOKEN,), normalize=False, logit_module=modules[-1][1])
    if not settings and model.architecture.endswith("ForCausalLM"):
        return SentenceLayout((Pooling.LAST_TOKEN,), normalize=False, logit_module="")
    if kinds in ([], ["Transformer"]):
        return None
    layout = read_modules(model) if kinds[:2] == ["Transformer", "Pooling"] else None
    last = layout.dense[-1] if layout is not None and layout.dense else None
    if layout is None or not isinstance(last, DenseLayer) or last.output != SCORES or not layout.pools_prompt:
        raise UnsupportedError(
            f"{model.id} scores with {' → '.join(kinds)}, which is not supported",
            hint="a Transformer that scores, or after it LogitScore, or Pooling and dense layers that compute scores",
        )
    return layout


def score_labels(layout: SentenceLayout) -> tuple[str, ...]:
    """Return names for the scores of a cross-encoder's last layer, which has none."""
    last = layout.dense[-1] if layout.dense else None
    return tuple(f"LABEL_{index}" for index in range(last.outputs if isinstance(last, DenseLayer) else 1))


def read_cross_encoder(model: ModelDirectory, tokenizer: Any, spec: TaskSpec) -> TaskSpec:
    """Return the task with the model's activation and prompts; reject settings that the graph cannot reproduce."""
    settings = _read_settings(model)
    transformer: dict[str, Any] = {}
    chat_settings: dict[str, Any] = {}
    if settings:
        file = "sentence_bert_config.json"
        transformer = model.json(file) or {}
        chat_settings = (transformer.get("processing_kwargs") or {}).pop("chat_template", None) or {}
        for key in ("max_seq_length", "do_lower_case", "processing_kwargs"):
            if transformer.get(key):
                raise UnsupportedError(f"{model.id} has '{key}' in its {file}, which is not supported")
        if not chat_settings.pop("restore_suffix", True):
            raise UnsupportedError(f"{model.id} truncates the end of its chat template, which is not supported")
    # A saved layout states whether it applies the chat template; otherwise the template is applied if it exists.
    stored_chat = "message" in transformer.get("modality_config", {})
    is_chat = stored_chat if settings else bool(getattr(tokenizer, "chat_template", None))
    templates = logit_ranker.read_templates(model, tokenizer, chat_settings) if is_chat else (None, None)
    return replace(
        spec,
        template=templates[0],
        instructed_template=templates[1],
        activation=_activation(model, settings, len(spec.labels)),
        prompts={name: text or "" for name, text in (settings.get("prompts") or {}).items()},
        default_prompt=settings.get("default_prompt_name"),
    )


def _read_settings(model: ModelDirectory) -> dict[str, Any]:
    """Return the settings that versions since 5.4 store with modules.json; empty if not a cross-encoder's."""
    settings = model.json("config_sentence_transformers.json") if model.json("modules.json") else None
    return settings if isinstance(settings, dict) and settings.get("model_type") == "CrossEncoder" else {}


def _activation(model: ModelDirectory, settings: dict[str, Any], labels: int) -> str:
    """Return the activation of the scores; without one, sentence-transformers chooses by the number of labels."""
    nested = model.config.get(_KEY) or {}
    activation = settings.get("activation_fn") or nested.get("activation_fn") or model.config.get(_LEGACY_KEY)
    if activation is None:
        return "sigmoid" if labels == 1 else "none"
    package, _, name = str(activation).rpartition(".")
    if not package.startswith("torch.nn") or name not in _ACTIVATIONS:
        raise UnsupportedError(f"{model.id} has the activation '{activation}', which is not supported")
    return _ACTIVATIONS[name]
