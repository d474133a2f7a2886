"""Recipes: every decision about a quantized graph, readable, and sufficient to reproduce it bit for bit."""

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
    """The quantization methods for graphs; the first three are ONNX Runtime's, the others OpenVINO's."""

    DYNAMIC = "dynamic"  # int8, activations quantized at run time
    STATIC = "static"  # int8, activations quantized by calibrated ranges
    BLOCKS = "blocks"  # block-wise weight-only quantization
    NNCF = "nncf"  # int8, by OpenVINO's own quantizer
    WEIGHTS = "weights"  # int8 weights for OpenVINO, which quantizes activations at run time


class Calibrator(StrEnum):
    """The ways to derive a static range from calibration values."""

    MINMAX = "minmax"
    ENTROPY = "entropy"
    PERCENTILE = "percentile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The decisions about one quantized graph; nodes are identified by their names in its source."""

    variant: str
    method: Method
    # The CPU target (`core/system/cpu_targets.py`).
    target: str
    # 7-bit weights: on CPUs whose int8 instructions saturate, 8-bit weights would overflow the sum of two products.
    reduce_range: bool = False
    # Dynamic and static: whether ONNX Runtime's fused attention is quantized too.
    attention: bool = False
    # Whether GELU is replaced by its tanh approximation.
    gelu: bool = False
    # By matmul: the exponent of two by which each input channel is divided and its weights are multiplied.
    smooth: dict[str, list[int]] = field(default_factory=dict)
    # By matmul: the input channels that are computed in float, in a side branch.
    split: dict[str, list[int]] = field(default_factory=dict)
    # Nodes that stay in float.
    keep: tuple[str, ...] = ()
    # Static: the calibrator, and the range of each tensor.
    calibrator: Calibrator | None = None
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    # Blocks: the bits of a weight, and the number of weights that share a scale.
    bits: int = 8
    block_size: int = 32
    # NNCF: the SHA-256 of the calibration rows, which are needed to reproduce the graph.
    calibration: str | None = None

    def __post_init__(self) -> None:
        Variant.parse(self.variant)

    @property
    def has_rewrites(self) -> bool:
        """Return whether the graph is rewritten before it is quantized."""
        return bool(self.split or self.smooth or self.gelu)

    def write(self, file: Path) -> None:
        """Write the recipe as TOML, without fields that have their default values."""
        try:
            import tomli_w
        except ImportError as error:
            raise missing_package("tomli_w", "writing a recipe", "build") from error
        fields = msgspec.to_builtins(self)
        defaults = msgspec.to_builtins(Recipe(variant=self.variant, method=self.method, target=self.target))
        table = {name: value for name, value in fields.items() if name in _REQUIRED or value != defaults[name]}
        table |= {name: {key: _encode(value) for key, value in table[name].items()} for name in _LISTS if name in table}
        file.write_text(tomli_w.dumps(table), encoding="utf-8")


_REQUIRED = ("variant", "method", "target")
# Lists of many small numbers are run-length encoded: "0 -1×3" is 0, -1, -1, -1.
_LISTS = ("smooth", "split")
# No layer is nearly as wide.
_MAX_CHANNELS = 2**20


def _encode(numbers: Sequence[int]) -> str:
    runs = [(number, len(list(group))) for number, group in groupby(numbers)]
    return " ".join(f"{number}×{count}" if count > 1 else f"{number}" for number, count in runs)


def _decode(encoded: object) -> list[int]:
    if not isinstance(encoded, str):
        raise ValueError(f"{encoded!r} is not a list of numbers")
    numbers: list[int] = []
    for word in encoded.split():
        number, _, count = word.partition("×")
        if len(numbers) + int(count or 1) > _MAX_CHANNELS:
            raise ValueError(f"'{word}' makes more than {_MAX_CHANNELS} channels")
        numbers += [int(number)] * int(count or 1)
    return numbers


def read_recipe(file: Path) -> Recipe:
    """Read a recipe from a TOML file; raise PlanError if it is not one."""
    try:
        fields = msgspec.toml.decode(file.read_bytes())
        known = [each.name for each in dataclasses.fields(Recipe)]
        # Ignoring a misspelt field would silently make another graph.
        for name in fields:
            if name not in known:
                raise ValueError(f"unknown field '{name}'{did_you_mean(name, known)}")
        fields |= {
            name: {key: _decode(value) for key, value in fields[name].items()} for name in _LISTS if name in fields
        }
        return msgspec.convert(fields, Recipe)
    except OSError as error:
        raise PlanError(f"cannot read the recipe {file}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, AttributeError) as error:
        raise PlanError(
            f"{file} is not a recipe: {error}", hint="hasten build writes one beside each variant"
        ) from error
