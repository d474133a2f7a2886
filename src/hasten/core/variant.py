"""One way to run a model: backend × precision × device × how it was quantized, and the name it goes by."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from hasten.core.errors import PlanError

CPU = "cpu"
CUDA = "cuda"

_NAME = re.compile(
    r"(?P<backend>[a-z0-9][a-z0-9_-]*)-(?P<precision>[a-z0-9]+)(?P<ways>(?:\+[a-z0-9]+)*)(?:@(?P<device>[a-z0-9:]+))?"
)


class Precision(StrEnum):
    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def is_reduced(self) -> bool:
        return self is not Precision.FP32


@dataclass(frozen=True, slots=True)
class Variant:
    backend: str
    precision: Precision
    device: str = CPU
    # How it came to its precision, where there is more than one way: `onnxruntime-int8+smooth+split`.
    ways: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        device = "" if self.device == CPU else f"@{self.device}"
        return "+".join((f"{self.backend}-{self.precision}", *self.ways)) + device

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, name: str) -> Variant:
        """`onnxruntime-int8`, `onnxruntime-int8+smooth+split`, `fused-fp8@cuda`."""
        match = _NAME.fullmatch(name)
        known = [precision.value for precision in Precision]
        if not match or match["precision"] not in known:
            raise PlanError(
                f"'{name}' is not the name of a variant",
                hint=f"write BACKEND-PRECISION, as in onnxruntime-fp32; precisions: {', '.join(known)}",
            )
        ways = tuple(match["ways"].split("+")[1:])
        return cls(match["backend"], Precision(match["precision"]), match["device"] or CPU, ways)


@dataclass(frozen=True, slots=True)
class VariantChoice:
    """Some of what a variant is, where the rest does not matter."""

    backend: str | None = None
    precision: str | None = None
    device: str | None = None

    def __str__(self) -> str:
        asked = (("backend", self.backend), ("precision", self.precision), ("device", self.device))
        return ", ".join(f"{name} {value}" for name, value in asked if value is not None) or "anything"

    def fits(self, variant: Variant) -> bool:
        asked = ((self.backend, variant.backend), (self.precision, variant.precision), (self.device, variant.device))
        return all(value in (None, own) for value, own in asked)


ANYTHING = VariantChoice()


@dataclass(frozen=True, slots=True)
class Support:
    """Whether something runs here and, if not, why."""

    ok: bool
    reason: str = ""
    hint: str = ""

    @classmethod
    def yes(cls) -> Support:
        return cls(True)

    @classmethod
    def no(cls, reason: str, hint: str = "") -> Support:
        return cls(False, reason, hint)
