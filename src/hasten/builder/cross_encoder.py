"""What a cross-encoder of sentence-transformers says about its scores and prompts, in each version's own place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hasten.builder.source import ModelDirectory
from hasten.core.errors import UnsupportedError
from hasten.tasks import TaskSpec

# In the words of text-classification's options.
_ACTIVATIONS = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
# What versions 4 to 5.3, and those before them, add to the model's own configuration.
_KEY = "sentence_transformers"
_OLD_KEY = "sbert_ce_default_activation_function"


def is_cross_encoder(model: ModelDirectory) -> bool:
    return bool(_about(model)) or (
        (_KEY in model.config or _OLD_KEY in model.config) and model.architecture.endswith("ForSequenceClassification")
    )


def read_cross_encoder(model: ModelDirectory, tokenizer: Any, spec: TaskSpec) -> TaskSpec:
    """The task with the model's activation and prompts; what a graph of it would leave out is refused."""
    about = _about(model)
    transformer: dict[str, Any] = {}
    if about:
        kinds = [str(entry["type"]).rsplit(".", 1)[-1] for entry in model.json("modules.json")]
        if kinds != ["Transformer"]:
            raise UnsupportedError(f"{model.id} scores with {' → '.join(kinds)}: hasten knows a transformer alone")
        transformer = model.json("sentence_bert_config.json") or {}
        for key in ("max_seq_length", "do_lower_case", "processing_kwargs"):
            if transformer.get(key):
                raise UnsupportedError(
                    f"{model.id} has '{key}' in its sentence_bert_config.json, which hasten does not know"
                )
    # A saved layout says itself whether texts go through the chat template; elsewhere its being there decides.
    is_chat = (
        "message" in transformer.get("modality_config", {})
        if about
        else bool(getattr(tokenizer, "chat_template", None))
    )
    if is_chat:
        raise UnsupportedError(f"{model.id} puts its texts through a chat template, which hasten does not")
    return replace(
        spec,
        activation=_activation(model, about, len(spec.labels)),
        prompts={name: text or "" for name, text in (about.get("prompts") or {}).items()},
        default_prompt=about.get("default_prompt_name"),
    )


def _about(model: ModelDirectory) -> dict[str, Any]:
    """What versions since 5.4 write beside a layout of modules, if it is that of a cross-encoder."""
    about = model.json("config_sentence_transformers.json") if model.json("modules.json") else None
    return about if isinstance(about, dict) and about.get("model_type") == "CrossEncoder" else {}


def _activation(model: ModelDirectory, about: dict[str, Any], labels: int) -> str:
    """What turns logits into scores; where nothing says, sentence-transformers goes by how many there are."""
    within = model.config.get(_KEY) or {}
    given = about.get("activation_fn") or within.get("activation_fn") or model.config.get(_OLD_KEY)
    if given is None:
        return "sigmoid" if labels == 1 else "none"
    package, _, name = str(given).rpartition(".")
    if not package.startswith("torch.nn") or name not in _ACTIVATIONS:
        raise UnsupportedError(f"the scores of {model.id} go through '{given}', which hasten does not know")
    return _ACTIVATIONS[name]
