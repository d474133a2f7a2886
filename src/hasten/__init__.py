"""Make Hugging Face transformers fast, verify that their answers stay the same, and serve them.

    bundle = hasten.build("sentence-transformers/all-MiniLM-L6-v2")
    embed = hasten.load(bundle.path)
    embed(["a text", "another"])

    hasten.map(bundle.path, batches)  # Arrow batches with their answers; for files: `hasten map`

    answer = hasten.pipeline("question-answering", "deepset/minilm-uncased-squad2")  # later runs need no PyTorch
    answer(question="What is it?", context="It is a transformer.")

    hasten.accelerate(model)  # replace the forward pass of a transformers model on a GPU

Names are imported when first used: `import hasten` loads no library.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from hasten.core.version import __version__

if TYPE_CHECKING:
    from hasten.acceleration import accelerate, restore
    from hasten.api import build, load, map, pipeline  # noqa: A004
    from hasten.bundle import Bundle
    from hasten.core.errors import (
        AccuracyError,
        BundleError,
        HastenError,
        InputError,
        PlanError,
        StageError,
        UnsupportedError,
    )
    from hasten.generation.generator import Generator
    from hasten.predictor import Predictor
    from hasten.sentence_encoder import SentenceEncoder

# Since 1.29, ONNX Runtime sends telemetry about models and machine with a stored user id, unless this is set before it
# is loaded. Models and data are private; a value that the user set is kept.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

_MODULES = {
    "accelerate": "hasten.acceleration",
    "restore": "hasten.acceleration",
    "build": "hasten.api",
    "load": "hasten.api",
    "map": "hasten.api",
    "pipeline": "hasten.api",
    "Bundle": "hasten.bundle",
    "Generator": "hasten.generation.generator",
    "Predictor": "hasten.predictor",
    "SentenceEncoder": "hasten.sentence_encoder",
    **dict.fromkeys(
        (
            "AccuracyError",
            "BundleError",
            "HastenError",
            "InputError",
            "PlanError",
            "StageError",
            "UnsupportedError",
        ),
        "hasten.core.errors",
    ),
}

__all__ = [
    "AccuracyError",
    "Bundle",
    "BundleError",
    "Generator",
    "HastenError",
    "InputError",
    "PlanError",
    "Predictor",
    "SentenceEncoder",
    "StageError",
    "UnsupportedError",
    "__version__",
    "accelerate",
    "build",
    "load",
    "map",
    "pipeline",
    "restore",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'hasten' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
