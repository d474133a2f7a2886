"""hasten: make a Hugging Face transformer fast, prove that it still answers the same, and serve it.

    bundle = hasten.build("sentence-transformers/all-MiniLM-L6-v2")
    embed = hasten.load(bundle.path)
    embed(["a text", "another"])

    hasten.accelerate(model)  # a transformers model on a GPU, which stays one

Names are imported when first used: `import hasten` loads no library.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from hasten.core.version import __version__

if TYPE_CHECKING:
    from hasten.acceleration import accelerate, restore
    from hasten.api import build, load
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

# Since 1.29 ONNX Runtime reports on models and machine to its maker, and keeps a number it knows the user by, unless
# this is set before it loads. Models and data are nobody else's business; a value that is there already stays.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

_HOMES = {
    "accelerate": "hasten.acceleration",
    "restore": "hasten.acceleration",
    "build": "hasten.api",
    "load": "hasten.api",
    "Bundle": "hasten.bundle",
    "Generator": "hasten.generation.generator",
    "Predictor": "hasten.predictor",
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
    "StageError",
    "UnsupportedError",
    "__version__",
    "accelerate",
    "build",
    "load",
    "restore",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'hasten' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
