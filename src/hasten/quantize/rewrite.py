"""What a recipe asks of a graph before it is quantized: split, smooth, approximate, in this order."""

from __future__ import annotations

from pathlib import Path

from hasten.graph import copy_graph, read_graph, write_graph
from hasten.quantize.gelu import approximate_gelu
from hasten.quantize.recipe import Recipe
from hasten.quantize.smooth import smooth
from hasten.quantize.split import split


def rewrite(graph: Path, file: Path, recipe: Recipe, *, external_data: bool) -> None:
    """Write the graph to quantize; products go by the names they have in the graph that is given, and keep them.

    Where a product is both split and smoothed, the exponents are of the channels that are left to it.
    """
    if not (recipe.split or recipe.smooth or recipe.gelu):
        copy_graph(graph, file)
        return
    model = read_graph(graph)
    if recipe.split:
        split(model, recipe.split)
    if recipe.smooth:
        smooth(model, recipe.smooth)
    if recipe.gelu:
        approximate_gelu(model)
    write_graph(model, file, external_data=external_data)
