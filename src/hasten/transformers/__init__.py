"""transformers' Auto classes, answered from bundles: one import changes, the rest of a program stays.

    from hasten.transformers import AutoModelForQuestionAnswering

    model = AutoModelForQuestionAnswering.from_pretrained("deepset/minilm-uncased-squad2")

The first time, the model is built, proven and kept in the cache (`HASTEN_CACHE`); after that it opens at once. Names
are imported when first used, and PyTorch with the first model.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hasten.transformers.auto import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        AutoModelForMultipleChoice,
        AutoModelForQuestionAnswering,
        AutoModelForSeq2SeqLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

__all__ = [
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForMultipleChoice",
    "AutoModelForQuestionAnswering",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'hasten.transformers' has no attribute '{name}': it has {', '.join(__all__)}")
    return getattr(import_module("hasten.transformers.auto"), name)


def __dir__() -> list[str]:
    return __all__
