"""Variants of a model: backend × precision × device × modifiers, and their names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from hasten.core.errors import PlanError

CPU = "cpu"
CUDA = "cuda"

_NAME = re.compile(
    r"(?P<backend>[a-z0-9][a-z0-9_-]*)-(?P<precision>[a-z0-9]+)(?P<modifiers>(?:\+[a-z0-9]+)*)(?:@(?P<device>[a-z0-9:]+))?"
)


class Precision(StrEnum):
    """The number format that a variant computes its matmuls in."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def is_reduced(self) -> bool:
        """Return whether the precision is lower than fp32."""
        return self is not Precision.FP32


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a model."""

    backend: str
    precision: Precision
    device: str = CPU
    # How it was quantized, where there is more than one way: `onnxruntime-int8+smooth+split`.
    modifiers: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the name, as in `onnxruntime-int8+smooth`; the device is left out for CPUs."""
        device = "" if self.device == CPU else f"@{self.device}"
        return "+".join((f"{self.backend}-{self.precision}", *self.modifiers)) + device

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, name: str) -> Variant:
        """Parse a name such as `onnxruntime-int8`, `onnxruntime-int8+smooth+split` or `fused-fp8@cuda`."""
        match = _NAME.fullmatch(name)
        known = [precision.value for precision in Precision]
        if not match or match["precision"] not in known:
            raise PlanError(
                f"'{name}' is not the name of a variant",
                hint=f"write BACKEND-PRECISION, as in onnxruntime-fp32; precisions: {', '.join(known)}",
            )
        modifiers = tuple(match["modifiers"].split("+")[1:])
        return cls(match["backend"], Precision(match["precision"]), match["device"] or CPU, modifiers)


@dataclass(frozen=True, slots=True)
class VariantChoice:
    """A filter for variants; None accepts any value."""

    backend: str | None = None
    precision: str | None = None
    device: str | None = None

    def __str__(self) -> str:
        fields = (("backend", self.backend), ("precision", self.precision), ("device", self.device))
        return ", ".join(f"{name} {value}" for name, value in fields if value is not None) or "anything"

    def fits(self, variant: Variant) -> bool:
        """Return whether the variant passes the filter."""
        fields = ((self.backend, variant.backend), (self.precision, variant.precision), (self.device, variant.device))
        return all(wanted in (None, actual) for wanted, actual in fields)


ANY_VARIANT = VariantChoice()
# The precision of a choice that searches for the fastest variant that passes the accuracy gate.
BEST = "best"


@dataclass(frozen=True, slots=True)
class Support:
    """The result of a probe: supported, or not supported with a reason and a hint."""

    ok: bool
    reason: str = ""
    hint: str = ""

    @classmethod
    def yes(cls) -> Support:
        """Return support."""
        return cls(True)

    @classmethod
    def no(cls, reason: str, hint: str = "") -> Support:
        """Return the lack of support, with its reason."""
        return cls(False, reason, hint)
