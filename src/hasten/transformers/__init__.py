"""Drop-in Auto classes of transformers that run bundles: only the import of a program changes.

    from hasten.transformers import AutoModelForQuestionAnswering

    model = AutoModelForQuestionAnswering.from_pretrained("deepset/minilm-uncased-squad2")

The first call builds and verifies the model and stores it in the cache (`HASTEN_CACHE`), where later calls find it.
PyTorch and transformers are imported with the first model.
"""

from __future__ import annotations

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
