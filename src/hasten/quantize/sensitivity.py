"""Measure the sensitivity of a graph's operators to quantization: one at a time in int8, all others in float."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hasten.core.batching import batch_in_order
from hasten.core.progress import Progress, SilentProgress, step
from hasten.core.report import Agreement
from hasten.core.tensors import Batch, Outputs, Signature
from hasten.onnx_graph import read_graph
from hasten.quantize.analysis.matmuls import find_embedding_lookups, find_matmuls
from hasten.quantize.analysis.switchable import SwitchableGraph
from hasten.quantize.methods.dynamic import quantize_dynamic
from hasten.quantize.recipe import Recipe
from hasten.quantize.rewrites.apply_rewrites import rewrite
from hasten.quantize.rewrites.split import float_nodes

# One batch of all rows would need a gigabyte for the activations of a MiniLM.
_BATCH_ROWS = 8


def open_switchable(graph: Path, recipe: Recipe, signature: Signature, *, external_data: bool) -> SwitchableGraph:
    """Return the recipe's graph, of which any operators that it quantizes can be run in float."""
    with tempfile.TemporaryDirectory(prefix="hasten-") as work:
        quantized = Path(work) / "quantized.onnx"
        rewritten = rewrite(graph, Path(work) / "rewritten.onnx", recipe, external_data=external_data)
        quantize_dynamic(rewritten, quantized, recipe, external_data=external_data)
        names = quantizable_nodes(read_graph(rewritten, with_weights=False), recipe)
        return SwitchableGraph(rewritten, quantized, names, signature)


@dataclass(frozen=True, slots=True)
class SensitivityReference:
    """The rows that sensitivity is measured on, and the comparison of their outputs with those in float."""

    rows: Batch
    signature: Signature
    agreement_of: Callable[[Outputs], Agreement]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The operators that a recipe quantizes, the one that costs most accuracy first, and what they cost together."""

    errors: dict[str, float]
    # Returns the agreement with the float graph if the first N operators stay in float.
    agreement_with_float: Callable[[int], float]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the operators."""
        return tuple(self.errors)

    def smallest_float_count(self, min_agreement: float) -> int:
        """Return how many operators must at least stay in float for this agreement, found by bisection."""
        failing, passing = 0, max(1, len(self.errors) - 1)
        while passing - failing > 1:
            middle = (failing + passing) // 2
            if self.agreement_with_float(middle) >= min_agreement:
                passing = middle
            else:
                failing = middle
        return passing


def measure_sensitivity(
    graph: SwitchableGraph,
    reference: SensitivityReference,
    *,
    until: float = math.inf,
    progress: Progress | None = None,
) -> Sensitivity:
    """Measure the error of quantizing each operator alone; none is measured after `until`, of `time.monotonic`."""
    rows = reference.rows
    errors = {}
    with step(progress or SilentProgress(), "sensitivity", len(graph.names)) as bar:
        for name in graph.names:
            if time.monotonic() >= until:
                break
            errors[name] = reference.agreement_of(graph.outputs(rows, {name})).relative_error
            bar.advance(note=name)
    ranked = sorted(errors, key=lambda name: -errors[name])

    @cache
    def agreement_with_float(count: int) -> float:
        # In their own order, so that rows of all lengths share the scales of dynamic quantization.
        groups = batch_in_order(len(rows), _BATCH_ROWS)
        outputs = graph.outputs(rows, set(graph.names) - set(ranked[:count]), groups)
        return reference.agreement_of(outputs).value

    return Sensitivity({name: errors[name] for name in ranked}, agreement_with_float)


def quantizable_nodes(model: Any, recipe: Recipe) -> list[str]:
    """Return the nodes that dynamic quantization would quantize: matmuls and embedding lookups."""
    matmuls = [matmul for matmul in find_matmuls(model) if recipe.attention or matmul.operator != "Attention"]
    names = dict.fromkeys([*find_embedding_lookups(model), *(matmul.name for matmul in matmuls)])
    return [name for name in names if name and name not in float_nodes(recipe)]
