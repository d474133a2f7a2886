"""Make int8 recipes for the CPU that runs the tests, and skip tests whose int8 sums would saturate on it."""

from __future__ import annotations

from typing import Any

import pytest

from hasten.core.system.cpu_targets import target_of
from hasten.core.system.hardware import this_machine
from hasten.quantize.recipe import Method, Recipe

TARGET = target_of(this_machine())
needs_exact_int8_sums = pytest.mark.skipif(
    TARGET.saturates, reason="sums of 8-bit products saturate on this CPU; needs VNNI, AMX or Arm"
)


def recipe_here(variant: str, method: Method = Method.DYNAMIC, **fields: Any) -> Recipe:
    """Return a recipe for this CPU, with 7-bit weights if its sums saturate."""
    reduce_range = TARGET.saturates and method is not Method.BLOCKS
    return Recipe(variant=variant, method=method, **({"target": TARGET.name, "reduce_range": reduce_range} | fields))
