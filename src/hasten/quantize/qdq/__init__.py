"""Quantizing models of transformers by rewriting their source: trainable modules that export with QDQ nodes.

    with qdq.patched(), qdq.calibration("percentile", 99.99) as calibrate:
        model = AutoModelForSequenceClassification.from_pretrained(...)
        calibrate(model, batches)
"""

from __future__ import annotations

from hasten.quantize.qdq.patch import patched
from hasten.quantize.qdq.switch import disable, enable, quantizers

__all__ = ["disable", "enable", "patched", "quantizers"]
