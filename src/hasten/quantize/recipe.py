"""A recipe: all that is decided about a graph of lower precision, to be read, and to make it again bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from pathlib import Path

import msgspec

from hasten.core.errors import PlanError, missing_package
from hasten.core.registry import did_you_mean
from hasten.core.variant import Variant

FILE = "recipe.toml"


class Method(StrEnum):
    DYNAMIC = "dynamic"  # int8, activations quantized as they come: ONNX Runtime
    STATIC = "static"  # int8, activations quantized by ranges seen in calibration: ONNX Runtime
    BLOCKS = "blocks"  # weights alone, in blocks with a scale each: ONNX Runtime
    NNCF = "nncf"  # int8, by OpenVINO's own quantizer


class Calibrator(StrEnum):
    """How a static range is taken from the values that were seen."""

    MINMAX = "minmax"
    ENTROPY = "entropy"
    PERCENTILE = "percentile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Products go by the names of their nodes in the graph it is applied to."""

    variant: str
    method: Method
    # The instructions it is made for, as `targets.py` knows them.
    target: str
    # Weights in seven bits: where sums of two products saturate, the eighth would be lost in them.
    reduce_range: bool = False
    # Dynamic and static: ONNX Runtime's fused attention is quantized too.
    attention: bool = False
    # GELU by a cheaper formula.
    gelu: bool = False
    # By product: the power of two each channel of its input is divided by, and its weights multiplied with.
    smooth: dict[str, list[int]] = field(default_factory=dict)
    # By product: the channels of its input that are computed beside it in float.
    split: dict[str, list[int]] = field(default_factory=dict)
    # Products that stay in float.
    keep: tuple[str, ...] = ()
    # Static: how ranges were found, and the range of each tensor.
    calibrator: Calibrator | None = None
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    # Blocks: bits of a weight, and how many weights share a scale.
    bits: int = 8
    block_size: int = 32
    # SHA-256 of the token rows it was calibrated on, where those are needed to make it again.
    calibration: str | None = None

    def __post_init__(self) -> None:
        Variant.parse(self.variant)

    def write(self, file: Path) -> None:
        try:
            import tomli_w
        except ImportError as error:
            raise missing_package("tomli_w", "writing a recipe", "build") from error
        fields = msgspec.to_builtins(self)
        # What is not so by default is what tells.
        plain = msgspec.to_builtins(Recipe(variant=self.variant, method=self.method, target=self.target))
        told = {name: value for name, value in fields.items() if name in _ALWAYS or value != plain[name]}
        told |= {name: {key: _listed(value) for key, value in told[name].items()} for name in _LISTS if name in told}
        file.write_text(tomli_w.dumps(told), encoding="utf-8")


_ALWAYS = ("variant", "method", "target")
# Many small numbers, written as a person would: one after the other, "-1×3" for one that comes three times.
_LISTS = ("smooth", "split")
# Of a product; no layer is nearly as wide.
_MOST_CHANNELS = 2**20


def _listed(numbers: Sequence[int]) -> str:
    runs = [(number, len(list(group))) for number, group in groupby(numbers)]
    return " ".join(f"{number}×{count}" if count > 1 else f"{number}" for number, count in runs)


def _numbers(listed: object) -> list[int]:
    if not isinstance(listed, str):
        raise ValueError(f"{listed!r} is not a list of numbers")
    numbers: list[int] = []
    for word in listed.split():
        number, _, count = word.partition("×")
        if len(numbers) + int(count or 1) > _MOST_CHANNELS:
            raise ValueError(f"'{word}' makes more than {_MOST_CHANNELS} channels")
        numbers += [int(number)] * int(count or 1)
    return numbers


def read_recipe(file: Path) -> Recipe:
    try:
        fields = msgspec.toml.decode(file.read_bytes())
        known = [each.name for each in dataclasses.fields(Recipe)]
        # Passed over, a word that is misspelt would make another graph.
        for name in fields:
            if name not in known:
                raise ValueError(f"nobody knows '{name}'{did_you_mean(name, known)}")
        fields |= {
            name: {key: _numbers(value) for key, value in fields[name].items()} for name in _LISTS if name in fields
        }
        return msgspec.convert(fields, Recipe)
    except OSError as error:
        raise PlanError(f"no recipe at {file}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, AttributeError) as error:
        raise PlanError(
            f"{file} is not a recipe: {error}", hint="hasten build writes one beside each variant"
        ) from error
