"""Measure the sensitivity of a graph's operators to quantization: one at a time in int8, all others in float."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hasten.core.progress import Progress, SilentProgress, step
from hasten.onnx_graph import read_graph
from hasten.quantize.analysis.matmuls import find_embedding_lookups, find_matmuls
from hasten.quantize.methods.dynamic import quantize_dynamic
from hasten.quantize.recipe import Recipe
from hasten.quantize.rewrites.apply_rewrites import rewrite
from hasten.quantize.rewrites.split import float_nodes


def graph_sensitivity(
    graph: Path,
    recipe: Recipe,
    evaluate: Callable[[Path], float],
    *,
    external_data: bool,
    until: float = math.inf,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Return the error of quantizing each operator alone, by its name in the recipe's graph, the largest first.

    `evaluate` returns the error of a graph's outputs; none is measured after `until`, a time of `time.monotonic`.
    """
    with tempfile.TemporaryDirectory(prefix="hasten-") as work:
        quantized = Path(work) / "quantized.onnx"
        rewritten = rewrite(graph, Path(work) / "rewritten.onnx", recipe, external_data=external_data)
        names = quantizable_nodes(read_graph(rewritten, with_weights=False), recipe)
        errors = {}
        with step(progress or SilentProgress(), "sensitivity", len(names)) as bar:
            for name in names:
                if time.monotonic() >= until:
                    break
                others = tuple(other for other in names if other != name)
                alone = replace(recipe, keep=(*recipe.keep, *others))
                quantize_dynamic(rewritten, quantized, alone, external_data=external_data)
                errors[name] = evaluate(quantized)
                bar.advance(note=name)
    return dict(sorted(errors.items(), key=lambda pair: -pair[1]))


def quantizable_nodes(model: Any, recipe: Recipe) -> list[str]:
    """Return the nodes that dynamic quantization would quantize: matmuls and embedding lookups."""
    matmuls = [matmul for matmul in find_matmuls(model) if recipe.attention or matmul.operator != "Attention"]
    names = dict.fromkeys([*find_embedding_lookups(model), *(matmul.name for matmul in matmuls)])
    return [name for name in names if name and name not in float_nodes(recipe)]
