"""Export a module with quantizers in it (`hasten.quantize.qdq`) as a quantized graph."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hasten.builder.export.encoder import IR_VERSION, OPSET, export
from hasten.builder.sources.export_wrapper import Exportable
from hasten.builder.sources.pytorch_model import LoadedModel
from hasten.builder.sources.quiet import first_line, quiet_libraries
from hasten.core.errors import StageError, UnsupportedError
from hasten.core.variant import Precision
from hasten.onnx_graph import is_large, read_graph, write_graph
from hasten.quantize.analysis.calibration import Calibration
from hasten.quantize.qdq.calibrate import calibration
from hasten.quantize.qdq.export import finalize_graph
from hasten.quantize.qdq.patch import patched
from hasten.quantize.qdq.toggle import switched

# The first opset with fp16 scales, which TensorRT's strongly typed networks need, and its IR version.
FP16_SCALES = (19, 9)


def in_float(loaded: LoadedModel, model: Any) -> Exportable:
    """Return the user's module, calibrated or trained, wrapped for export like the loaded model."""
    # A copy: the user's module may be on a GPU or in fp16, and must stay as it is.
    model = copy.deepcopy(model).to("cpu", torch.float32).eval()
    with switched(model, off=("*",)):  # the wrapper runs it once, which must see float outputs
        return loaded.module.with_model(model)


def calibrate_module(loaded: LoadedModel, rows: Calibration, precision: Precision = Precision.INT8) -> Exportable:
    """Return a copy of the model with quantizers in it, calibrated on the rows."""
    float_model = loaded.module.model
    try:
        with quiet_libraries(), patched(precision):
            model = type(float_model).from_pretrained(
                None,
                config=copy.deepcopy(float_model.config),
                state_dict=float_model.state_dict(),
                attn_implementation="eager",
            )
    except UnsupportedError as error:
        raise UnsupportedError(error.message, hint=error.hint or "fp16 variants need no quantizers") from error
    except Exception as error:  # transformers raises many kinds of errors
        raise StageError(f"{loaded.architecture} cannot be rebuilt with quantizers: {first_line(error)}") from error
    module = loaded.module.with_model(model.eval())
    with calibration() as calibrate:
        batches = ({name: torch.from_numpy(values) for name, values in feeds.items()} for feeds in rows.feeds())
        calibrate(module, batches)
    return module


def export_quantized(
    loaded: LoadedModel, module: Exportable, file: Path, versions: tuple[int, int] = (OPSET, IR_VERSION)
) -> None:
    """Export with the inputs and outputs of the float graph, then store the weights in 8 bits."""
    export(replace(loaded, module=module), file, versions=versions)
    graph, external_data = read_graph(file), is_large(file)
    finalize_graph(graph, type(module.model).__name__)
    write_graph(graph, file, external_data=external_data)
