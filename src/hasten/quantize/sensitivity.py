"""How much each quantized operator costs by itself: one at a time in int8, all others in float."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hasten.core.progress import Progress, Silent, step
from hasten.graph import read_graph
from hasten.quantize.dynamic import quantize_dynamic
from hasten.quantize.products import find_products, find_tables
from hasten.quantize.recipe import Recipe
from hasten.quantize.rewrite import rewrite
from hasten.quantize.split import kept


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """An operator, by its name in the graph that the recipe is for, and the error it makes alone."""

    name: str
    error: float


def sensitivity(
    graph: Path,
    recipe: Recipe,
    evaluate: Callable[[Path], float],
    *,
    external_data: bool,
    until: float = math.inf,
    progress: Progress | None = None,
) -> list[Sensitivity]:
    """The worst first; of those that were measured until then, a time of `time.monotonic`.

    `evaluate` says how wrong the answers of a graph are, the larger the worse.
    """
    with tempfile.TemporaryDirectory(prefix="hasten-") as work:
        rewritten, quantized = (Path(work) / name / "model.onnx" for name in ("rewritten", "quantized"))
        for file in (rewritten, quantized):
            file.parent.mkdir()
        rewrite(graph, rewritten, recipe, external_data=external_data)
        names = quantizable(read_graph(rewritten, with_weights=False), recipe)
        found = []
        with step(progress or Silent(), "sensitivity", len(names)) as told:
            for name in names:
                if time.monotonic() >= until:
                    break
                others = tuple(other for other in names if other != name)
                alone = replace(recipe, keep=(*recipe.keep, *others))
                quantize_dynamic(rewritten, quantized, alone, external_data=external_data)
                found.append(Sensitivity(name, evaluate(quantized)))
                told.advance(note=name)
    return sorted(found, key=lambda each: -each.error)


def quantizable(model: Any, recipe: Recipe) -> list[str]:
    """What dynamic quantization takes of a graph: products, and the tables that tokens are looked up in."""
    products = [product for product in find_products(model) if recipe.attention or product.operator != "Attention"]
    names = dict.fromkeys([*find_tables(model), *(product.name for product in products)])
    return [name for name in names if name and name not in kept(recipe)]
