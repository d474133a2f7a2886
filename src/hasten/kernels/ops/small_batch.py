"""Define the tiles and the arguments for 8-bit weights that the small-batch kernels share.

8-bit weights come with their scale and the quantization of their activations, which are scaled and clamped but not
rounded: a small batch is limited by reading weights, so the multiplication itself stays in half precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hasten.kernels.ops.quantize import ActivationQuant, quant_options


@dataclass(frozen=True, slots=True)
class Tile:
    """The output tile of a program, its warps, and for a split-K kernel the depth of a slice."""

    rows: int
    columns: int
    warps: int
    depth: int = 1


def weight_options(scale: Any | None, quant: ActivationQuant | None) -> dict[str, Any]:
    """Return a kernel's arguments for the format of its weight; both are None unless it is 8-bit."""
    has_channel_scales = scale is not None and scale.numel() > 1
    return {"scale": scale, "has_channel_scales": has_channel_scales, **quant_options(quant)}
