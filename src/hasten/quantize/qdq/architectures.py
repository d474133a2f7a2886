"""What an architecture needs beyond what is detected in any: one table."""

from __future__ import annotations

from dataclasses import dataclass

# Classes that compute positions, not features: their products have as many digits as there are positions.
LEFT_ALONE = ("*RotaryEmbedding",)


@dataclass(frozen=True, slots=True)
class Needs:
    """`sums`: classes whose forward adds to the residual stream where no norm stands right behind."""

    sums: tuple[str, ...] = ()


# By the last part of the name of the module that the classes are in.
NEEDS = {
    # The norm is at the start of the layer that follows.
    "modeling_modernbert": Needs(sums=("ModernBertEncoderLayer",)),
}
