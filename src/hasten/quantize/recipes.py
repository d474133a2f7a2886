"""What the words in a variant's name mean for one model: recipes, found on its graphs and its calibration rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from hasten.backends import BACKENDS, Dialect
from hasten.core.progress import Progress
from hasten.core.targets import Target
from hasten.core.variant import Precision, Variant
from hasten.graph import is_large, read_graph
from hasten.quantize.calibration import Calibration
from hasten.quantize.products import find_tables
from hasten.quantize.propose import propose
from hasten.quantize.recipe import Method, Recipe
from hasten.quantize.rewrite import rewrite
from hasten.quantize.sensitivity import sensitivity
from hasten.quantize.static import find_ranges
from hasten.quantize.ways import Way, calibrator_of, kept_products, method_of, without_kept

_BITS = {Precision.INT8: 8, Precision.INT4: 4}


@dataclass
class Recipes:
    graphs: Mapping[Dialect, Path]
    # Asked for only where something is calibrated.
    calibration: Callable[[], Calibration]
    target: Target
    # How far a graph's answers are from the original's, on calibration rows.
    error_of: Callable[[Path], float]
    progress: Progress
    # One that is repeated as it is.
    given: Recipe | None = None
    _sensitive: dict[Variant, tuple[str, ...]] = field(default_factory=dict)

    def recipe(self, variant: Variant) -> Recipe:
        if self.given is not None and self.given.variant == variant.name:
            return self.given
        method, ways = method_of(variant), variant.ways
        recipe = Recipe(
            variant=variant.name,
            method=method,
            target=self.target.name,
            reduce_range=self.target.saturates and method is not Method.BLOCKS,
            attention=Way.ATTENTION in ways,
            gelu=Way.GELU in ways,
            smooth=self._proposed[0] if Way.SMOOTH in ways else {},
            split=self._proposed[1] if Way.SPLIT in ways else {},
            calibrator=calibrator_of(variant),
            bits=_BITS[variant.precision],
            calibration=self.calibration().digest if method is Method.NNCF else None,
        )
        if Way.SMOOTH in ways or Way.SPLIT in ways:
            # Who takes this much care has no use for a coarse table: nothing is gained by it but size.
            recipe = replace(recipe, keep=self._tables)
        if count := kept_products(variant):
            recipe = replace(recipe, keep=(*recipe.keep, *self.most_sensitive(without_kept(variant))[:count]))
        if recipe.calibrator is not None:
            recipe = replace(recipe, ranges=self._ranges(recipe))
        return recipe

    def most_sensitive(self, variant: Variant, until: float = math.inf) -> tuple[str, ...]:
        """The products of a variant, the one that costs most accuracy first."""
        if variant not in self._sensitive:
            graph = self._graph(variant)
            found = sensitivity(
                graph,
                self.recipe(variant),
                self.error_of,
                external_data=is_large(graph),
                until=until,
                progress=self.progress,
            )
            self._sensitive[variant] = tuple(product.name for product in found)
        return self._sensitive[variant]

    def _graph(self, variant: Variant) -> Path:
        return self.graphs[BACKENDS.get(variant.backend).dialect]

    @cached_property
    def _proposed(self) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        return propose(self.graphs[Dialect.ORT], self.calibration())

    @cached_property
    def _tables(self) -> tuple[str, ...]:
        return tuple(find_tables(read_graph(self.graphs[Dialect.ORT], with_weights=False)))

    def _ranges(self, recipe: Recipe) -> dict[str, tuple[float, float]]:
        """Of the graph as it is when it is quantized: rewritten."""
        assert recipe.calibrator is not None
        with TemporaryDirectory(prefix="hasten-") as work:
            rewritten = Path(work) / "model.onnx"
            graph = self.graphs[Dialect.ORT]
            rewrite(graph, rewritten, recipe, external_data=is_large(graph))
            return find_ranges(rewritten, self.calibration(), recipe.calibrator, recipe)
