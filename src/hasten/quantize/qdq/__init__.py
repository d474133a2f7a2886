"""Quantize transformers models by rewriting their source: trainable modules that export with QDQ nodes.

with qdq.patched(), qdq.calibration("percentile", 99.99) as calibrate:
    model = AutoModelForSequenceClassification.from_pretrained(...)
    calibrate(model, batches)
"""

from __future__ import annotations

from hasten.core.errors import missing_package

try:
    from hasten.quantize.qdq.calibrate import calibration, grid_search
    from hasten.quantize.qdq.export import export
    from hasten.quantize.qdq.patch import patched
    from hasten.quantize.qdq.sensitivity import groups, relax, sensitivity
    from hasten.quantize.qdq.toggle import disable, enable, quantizers
except ModuleNotFoundError as error:
    if error.name not in ("torch", "transformers"):
        raise
    raise missing_package(error.name, "quantizing models", "build") from error

__all__ = [
    "calibration",
    "disable",
    "enable",
    "export",
    "grid_search",
    "groups",
    "patched",
    "quantizers",
    "relax",
    "sensitivity",
]
