"""Read the layout of a sparse encoder of sentence-transformers: the pooling of its logits, prompts, maximum length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hasten.builder.sources.directory import ModelDirectory
from hasten.builder.sources.sentence_layout import SentenceLayout, SparsePooling, add_settings, module_kinds
from hasten.core.errors import UnsupportedError
from hasten.tasks.sparse_embedding import COSINE, DOT

_POOLING = "SpladePooling"
_TRANSFORMERS = ("Transformer", "MLMTransformer")
# How often each activation applies log(1 + x) to positive logits.
_ACTIVATIONS = {"relu": 1, "log1p_relu": 2}
_STRATEGIES = ("max", "sum")


def is_sparse_encoder(model: ModelDirectory) -> bool:
    """Return whether sentence-transformers saved the model as a sparse encoder."""
    config = model.json("config_sentence_transformers.json") if model.json("modules.json") else None
    if isinstance(config, dict) and config.get("model_type") == "SparseEncoder":
        return True
    return config is not None and any(kind == _POOLING for kind, _ in module_kinds(model))


def read_sparse_layout(model: ModelDirectory) -> SentenceLayout:
    """Read the layout from the model's files; like sentence-transformers, take the maximum where there are none."""
    if model.json("modules.json") is None:
        return SentenceLayout((), normalize=False, sparse=SparsePooling(), similarity=DOT)
    modules = module_kinds(model)
    kinds = [kind for kind, _ in modules]
    if len(kinds) != 2 or kinds[0] not in _TRANSFORMERS or kinds[1] != _POOLING:
        raise UnsupportedError(
            f"{model.id} computes sparse embeddings with {' → '.join(kinds)}, which is not supported",
            hint=f"a Transformer with a masked-language-model head, and {_POOLING} after it",
        )
    settings: dict[str, Any] = model.json("config_sentence_transformers.json") or {}
    layout = SentenceLayout((), normalize=False, sparse=_read_pooling(model, modules[1][1]))
    limit = settings.get("max_active_dims")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise UnsupportedError(f"{model.id} has the unsupported max_active_dims {limit!r:.40}")
    return add_settings(replace(layout, similarity=_similarity(model, settings), max_active_dims=limit), model)


def _read_pooling(model: ModelDirectory, folder: str) -> SparsePooling:
    config = model.json(f"{folder}/config.json") or {}
    strategy, activation = config.get("pooling_strategy", "max"), str(config.get("activation_function", "relu"))
    if strategy not in _STRATEGIES or activation not in _ACTIVATIONS:
        raise UnsupportedError(f"{model.id} pools its logits by '{strategy}' of '{activation}', which is not supported")
    return SparsePooling(strategy == "sum", _ACTIVATIONS[activation])


def _similarity(model: ModelDirectory, settings: dict[str, Any]) -> str:
    similarity = settings.get("similarity_fn_name") or DOT
    if similarity not in (DOT, COSINE):
        raise UnsupportedError(f"{model.id} compares embeddings by '{similarity}', which is not supported")
    return str(similarity)
