"""Export models with an adapter per language (X-MOD) for their default language, which is the one that tasks use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def default_language_only(model: Any) -> Iterator[None]:
    """Give every row to the adapter of the default language, within the context.

    transformers selects the rows of each language by value. The graph would hold the adapters of all languages and
    NonZero, whose output size depends on values: TensorRT's parser rejects it.
    """
    language = getattr(model.config, "default_language", None)
    layers = [layer for layer in model.modules() if language in getattr(layer, "adapter_modules", ())]
    for layer in layers:
        layer.lang_adapter = partial(_adapt, layer, layer.adapter_modules[language])
    try:
        yield
    finally:
        for layer in layers:
            del layer.lang_adapter


def _adapt(layer: Any, adapter: Any, _lang_ids: Tensor, hidden: Tensor) -> Tensor:
    """Compute what XmodOutput.lang_adapter computes, without the selection."""
    residual = hidden
    if layer.adapter_layer_norm is not None:
        hidden = layer.adapter_layer_norm(hidden)
    elif layer.adapter_reuse_layer_norm:
        hidden = layer.LayerNorm(hidden)
    if layer.ln_before_adapter:
        residual = hidden
    adapted: Tensor = adapter(hidden)
    return adapted + residual
