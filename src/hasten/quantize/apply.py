"""Apply a recipe to a graph: rewrite it, then quantize it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hasten.core.errors import PlanError
from hasten.onnx_graph import read_graph
from hasten.quantize.analysis.calibration import Calibration
from hasten.quantize.methods.blocks import quantize_blocks
from hasten.quantize.methods.dynamic import quantize_dynamic
from hasten.quantize.methods.nncf import compress_weights, quantize_nncf
from hasten.quantize.methods.static import quantize_static
from hasten.quantize.recipe import Method, Recipe
from hasten.quantize.rewrites.apply_rewrites import rewrite


def make_graph(
    graph: Path, file: Path, recipe: Recipe, calibration: Calibration | None, *, external_data: bool
) -> None:
    """Write the quantized graph; only NNCF needs the calibration rows again."""
    with tempfile.TemporaryDirectory(prefix="hasten-") as work:
        source = rewrite(graph, Path(work) / graph.name, recipe, external_data=external_data)
        _check_float_nodes(source, recipe)
        match recipe.method:
            case Method.DYNAMIC:
                quantize_dynamic(source, file, recipe, external_data=external_data)
            case Method.STATIC:
                quantize_static(source, file, recipe, external_data=external_data)
            case Method.BLOCKS:
                quantize_blocks(source, file, recipe, external_data=external_data)
            case Method.WEIGHTS:
                compress_weights(source, file, recipe)
            case Method.NNCF:
                if calibration is None:
                    raise PlanError(
                        f"{recipe.variant} needs the rows it was calibrated on", hint="pass them to --calibration"
                    )
                quantize_nncf(source, file, recipe, calibration)


def _check_float_nodes(graph: Path, recipe: Recipe) -> None:
    """Raise for names the graph does not have: every quantizer would ignore them and quantize the matmul."""
    known = {node.name for node in read_graph(graph, with_weights=False).graph.node}
    unknown = [name for name in recipe.keep if name not in known]
    if unknown:
        raise PlanError(
            f"the recipe keeps {unknown[0]} in float, which the graph does not have",
            hint="a recipe fits only the model it was made for",
        )
