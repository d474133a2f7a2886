"""Apply the rewrites of a recipe before quantization: split, smooth, approximate GELU, in this order."""

from __future__ import annotations

from pathlib import Path

from hasten.onnx_graph import read_graph, write_graph
from hasten.quantize.recipe import Recipe
from hasten.quantize.rewrites.gelu import approximate_gelu
from hasten.quantize.rewrites.smooth import smooth
from hasten.quantize.rewrites.split import split


def rewrite(graph: Path, file: Path, recipe: Recipe, *, external_data: bool) -> Path:
    """Write the rewritten graph to `file` and return it, or return `graph` if nothing is rewritten. Matmuls keep names.

    If a matmul is both split and smoothed, the exponents are those of the channels that remain after the split.
    """
    if not recipe.has_rewrites:
        return graph
    model = read_graph(graph)
    if recipe.split:
        split(model, recipe.split)
    if recipe.smooth:
        smooth(model, recipe.smooth)
    if recipe.gelu:
        approximate_gelu(model)
    write_graph(model, file, external_data=external_data)
    return file
