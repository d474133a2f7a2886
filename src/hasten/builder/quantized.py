"""A module with quantizers in it (`hasten.quantize.qdq`): the graph they make, to be judged by the model in float."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hasten.builder.export import IR_VERSION, OPSET, export
from hasten.builder.head import Exportable
from hasten.builder.libraries import first_line, quiet_libraries
from hasten.builder.load import LoadedModel
from hasten.core.errors import PlanError, StageError, UnsupportedError
from hasten.core.variant import Precision
from hasten.graph import is_large, read_graph, write_graph
from hasten.quantize.calibration import Calibration
from hasten.quantize.qdq.calibrate import calibration
from hasten.quantize.qdq.export import finish
from hasten.quantize.qdq.patch import patched
from hasten.quantize.qdq.switch import quantizers, switched

logger = logging.getLogger("hasten")

# The first opset with scales in half precision, which TensorRT's types are made with, and the IR that came with it.
HALF_SCALES = (19, 9)


def rounds(model: Any) -> bool:
    """Whether its quantizers are on; refused where they are and would not round."""
    name = type(model).__name__
    if not any(part.is_enabled for part in quantizers(model).values()):
        logger.warning("all quantizers of %s are off: it is built as the float model that it is", name)
        return False
    if rounds_to(model) is None:
        raise PlanError(
            f"the quantizers of {name} are not calibrated",
            hint="qdq.calibration finds their ranges; after qdq.disable(model) it is built as a float model",
        )
    return True


def rounds_to(model: Any) -> Precision | None:
    """What those of its quantizers that are on and calibrated round to."""
    return next((part.precision for part in quantizers(model).values() if part.is_active), None)


def as_given(loaded: LoadedModel, model: Any) -> Exportable:
    """The user's module, calibrated or trained, in the place of the original."""
    # A copy: the user's may lie on a GPU, in half precision, and goes on being theirs.
    model = copy.deepcopy(model).to("cpu", torch.float32).eval()
    with switched(model, off=("*",)):  # what stands around it tries it, and is not to see it round
        return loaded.module.around(model)


def calibrated(loaded: LoadedModel, rows: Calibration) -> Exportable:
    """The original once more, with quantizers in it and the same weights, its ranges found on the rows."""
    original = loaded.module.model
    try:
        with quiet_libraries(), patched():
            model = type(original).from_pretrained(
                None,
                config=copy.deepcopy(original.config),
                state_dict=original.state_dict(),
                attn_implementation="eager",
            )
    except UnsupportedError as error:
        raise UnsupportedError(error.message, hint=error.hint or "in fp16 it needs no quantizers") from error
    except Exception as error:  # transformers raises whatever it comes to
        raise StageError(f"{loaded.architecture} is not made again with quantizers: {first_line(error)}") from error
    module = loaded.module.around(model.eval())
    with calibration() as calibrate:
        calibrate(module, _tensors(rows))
    return module


def _tensors(rows: Calibration) -> Iterator[dict[str, torch.Tensor]]:
    for feeds in rows.feeds():
        yield {name: torch.from_numpy(values) for name, values in feeds.items()}


def export_quantized(
    loaded: LoadedModel, module: Exportable, file: Path, versions: tuple[int, int] = (OPSET, IR_VERSION)
) -> None:
    """Traced as the original was, so that it takes and gives the same; then weights in eight bits."""
    export(replace(loaded, module=module), file, versions=versions)
    graph, external_data = read_graph(file), is_large(file)
    finish(graph, type(module.model).__name__)
    write_graph(graph, file, external_data=external_data)
