"""From a graph and a recipe to the graph of lower precision."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hasten.core.errors import PlanError
from hasten.graph import read_graph
from hasten.quantize.blocks import quantize_blocks
from hasten.quantize.calibration import Calibration
from hasten.quantize.dynamic import quantize_dynamic
from hasten.quantize.openvino_int8 import quantize_nncf
from hasten.quantize.recipe import Method, Recipe
from hasten.quantize.rewrite import rewrite
from hasten.quantize.static import quantize_static


def make_graph(
    graph: Path, file: Path, recipe: Recipe, calibration: Calibration | None, *, external_data: bool
) -> None:
    """Rewritten where the recipe asks for it, then quantized; only NNCF needs to see the calibration rows again."""
    if not (recipe.split or recipe.smooth or recipe.gelu):
        _quantize(graph, file, recipe, calibration, external_data=external_data)
        return
    with tempfile.TemporaryDirectory(prefix="hasten-") as work:
        rewritten = Path(work) / graph.name
        rewrite(graph, rewritten, recipe, external_data=external_data)
        _quantize(rewritten, file, recipe, calibration, external_data=external_data)


def _quantize(graph: Path, file: Path, recipe: Recipe, calibration: Calibration | None, *, external_data: bool) -> None:
    _check_kept(graph, recipe)
    match recipe.method:
        case Method.DYNAMIC:
            quantize_dynamic(graph, file, recipe, external_data=external_data)
        case Method.STATIC:
            quantize_static(graph, file, recipe, external_data=external_data)
        case Method.BLOCKS:
            quantize_blocks(graph, file, recipe, external_data=external_data)
        case Method.NNCF:
            if calibration is None:
                raise PlanError(
                    f"{recipe.variant} is made again from the rows it was calibrated on", hint="give --calibration"
                )
            quantize_nncf(graph, file, recipe, calibration)


def _check_kept(graph: Path, recipe: Recipe) -> None:
    """A name that no node has would be passed over by every quantizer, and the product quantized."""
    known = {node.name for node in read_graph(graph, with_weights=False).graph.node}
    unknown = [name for name in recipe.keep if name not in known]
    if unknown:
        raise PlanError(
            f"the recipe keeps {unknown[0]} in float, which the graph does not have",
            hint="a recipe fits the model it was found for",
        )
