"""A module with quantizers in it (`hasten.quantize.qdq`): the graph they make, to be judged by the model in float."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hasten.builder.export import export
from hasten.builder.load import LoadedModel
from hasten.core.errors import PlanError, UnsupportedError
from hasten.core.variant import Precision
from hasten.graph import is_large, read_graph, write_graph
from hasten.quantize.qdq.export import finish
from hasten.quantize.qdq.switch import quantizers, switched

logger = logging.getLogger("hasten")


def rounds(model: Any) -> bool:
    """Whether its quantizers are on; refused where they are and would not round, or to what no bundle runs."""
    name, found = type(model).__name__, quantizers(model).values()
    if not any(part.is_enabled for part in found):
        logger.warning("all quantizers of %s are off: it is built as the float model that it is", name)
        return False
    precision = next((part.precision for part in found if part.is_active), None)
    if precision is None:
        raise PlanError(
            f"the quantizers of {name} are not calibrated",
            hint="qdq.calibration finds their ranges; after qdq.disable(model) it is built as a float model",
        )
    if precision is not Precision.INT8:
        raise UnsupportedError(
            f"the quantizers of {name} round to {precision}, and no backend computes a graph in it",
            hint="qdq.patched('int8'), or qdq.export for the graph alone",
        )
    return True


def export_quantized(loaded: LoadedModel, model: Any, file: Path) -> None:
    """Traced as the original was, so that it takes and gives the same; then weights in eight bits."""
    # A copy: the user's may lie on a GPU, in half precision, and goes on being theirs.
    model = copy.deepcopy(model).to("cpu", torch.float32).eval()
    with switched(model, off=("*",)):  # what stands around it tries it, and is not to see it round
        module = loaded.module.around(model)
    export(replace(loaded, module=module), file)
    graph, external_data = read_graph(file), is_large(file)
    finish(graph, type(model).__name__)
    write_graph(graph, file, external_data=external_data)
