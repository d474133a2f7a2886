"""Build the recipe of a variant for one model, from its graphs and calibration rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from hasten.backends import BACKENDS, Dialect
from hasten.core.errors import PlanError
from hasten.core.progress import Progress
from hasten.core.system.cpu_targets import CpuTarget
from hasten.core.variant import Precision, Variant
from hasten.onnx_graph import is_large, read_graph
from hasten.quantize.analysis.calibration import Calibration
from hasten.quantize.analysis.matmuls import find_embedding_lookups
from hasten.quantize.methods.static import find_ranges
from hasten.quantize.modifiers import Modifier, calibrator_of, kept_matmuls, method_of, without_kept
from hasten.quantize.recipe import Method, Recipe
from hasten.quantize.rewrites.apply_rewrites import rewrite
from hasten.quantize.rewrites.smoothing_search import search_smoothing
from hasten.quantize.sensitivity import Sensitivity, SensitivityReference, measure_sensitivity, open_switchable

_BITS = {Precision.INT8: 8, Precision.INT4: 4}


@dataclass
class RecipeBuilder:
    """Builds recipes for a model's variants; searches and sensitivities are computed once and reused."""

    graphs: Mapping[Dialect, Path]
    # Called only if a recipe needs calibration.
    calibration: Callable[[], Calibration]
    target: CpuTarget
    # Called only if sensitivities are needed.
    reference: Callable[[], SensitivityReference]
    progress: Progress
    # A recipe to repeat unchanged for its variant.
    fixed_recipe: Recipe | None = None
    _sensitivity: dict[Variant, Sensitivity] = field(default_factory=dict)

    def recipe(self, variant: Variant) -> Recipe:
        """Return the recipe of a variant."""
        if self.fixed_recipe is not None and self.fixed_recipe.variant == variant.name:
            return self.fixed_recipe
        method, modifiers = method_of(variant), variant.modifiers
        recipe = Recipe(
            variant=variant.name,
            method=method,
            target=self.target.name,
            reduce_range=self.target.saturates and method is not Method.BLOCKS,
            attention=Modifier.ATTENTION in modifiers,
            gelu=Modifier.TANH_GELU in modifiers,
            smooth=self._smoothing_and_splits[0] if Modifier.SMOOTH in modifiers else {},
            split=self._smoothing_and_splits[1] if Modifier.SPLIT in modifiers else {},
            calibrator=calibrator_of(variant),
            bits=_BITS[variant.precision],
            calibration=self.calibration().digest if method is Method.NNCF else None,
        )
        if Modifier.SMOOTH in modifiers or Modifier.SPLIT in modifiers:
            # These variants are made for accuracy, and a quantized embedding table would only save size.
            recipe = replace(recipe, keep=self._embedding_lookups)
        if count := kept_matmuls(variant):
            names = self.sensitivity(without_kept(variant)).names
            if count >= len(names):
                raise PlanError(f"{variant} would leave nothing to quantize: there are {len(names)} matmuls")
            recipe = replace(recipe, keep=(*recipe.keep, *names[:count]))
        if recipe.calibrator is not None:
            recipe = replace(recipe, ranges=self._ranges(recipe))
        return recipe

    def sensitivity(self, variant: Variant, until: float = math.inf) -> Sensitivity:
        """Return the sensitivity of a variant's operators; none is measured after `until`."""
        if variant not in self._sensitivity:
            graph, reference = self.graphs[BACKENDS.get(variant.backend).dialect], self.reference()
            switchable = open_switchable(
                graph, self.recipe(variant), reference.signature, external_data=is_large(graph)
            )
            self._sensitivity[variant] = measure_sensitivity(switchable, reference, until=until, progress=self.progress)
        return self._sensitivity[variant]

    @cached_property
    def _smoothing_and_splits(self) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        return search_smoothing(self.graphs[Dialect.ORT], self.calibration())

    @cached_property
    def _embedding_lookups(self) -> tuple[str, ...]:
        return tuple(find_embedding_lookups(read_graph(self.graphs[Dialect.ORT], with_weights=False)))

    def _ranges(self, recipe: Recipe) -> dict[str, tuple[float, float]]:
        """Find the ranges on the rewritten graph, which is the one that is quantized."""
        assert recipe.calibrator is not None
        with TemporaryDirectory(prefix="hasten-") as work:
            graph = self.graphs[Dialect.ORT]
            rewritten = rewrite(graph, Path(work) / "model.onnx", recipe, external_data=is_large(graph))
            return find_ranges(rewritten, self.calibration(), recipe.calibrator, recipe)
