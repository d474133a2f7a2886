"""The encoders by the layers they compute: post-norm (BERT) and pre-norm with rotary positions (ModernBERT)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hasten.kernels.encoder import Encoder, Geometry
from hasten.kernels.encoder_base import PackedEncoder
from hasten.kernels.pre_norm_encoder import PreNormEncoder, PreNormGeometry

AnyGeometry = Geometry | PreNormGeometry
_ENCODERS: dict[type, type[PackedEncoder]] = {Geometry: Encoder, PreNormGeometry: PreNormEncoder}


def encoder_class(geometry: AnyGeometry) -> type[PackedEncoder]:
    """Return the class of encoders with such a geometry."""
    return _ENCODERS[type(geometry)]


def read_geometry(raw: Mapping[str, Any]) -> AnyGeometry:
    """Convert the geometry of a bundle, whose fields tell its kind; raise msgspec's ValidationError."""
    if "window" in raw:
        return msgspec.convert(raw, PreNormGeometry)
    return msgspec.convert(raw, Geometry)
