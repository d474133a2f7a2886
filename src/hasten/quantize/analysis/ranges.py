"""Measure activation ranges on calibration rows; the graph itself reduces them to maxima, batch by batch.

Padding counts: quantization and inference take the ranges of a padded batch over its padding too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hasten.core.errors import StageError
from hasten.core.tensors import FloatArray
from hasten.onnx_graph import read_graph
from hasten.quantize.analysis.calibration import Calibration
from hasten.quantize.analysis.matmuls import MatMul
from hasten.quantize.analysis.session import open_in_memory

# No exporter uses this prefix in names.
_PREFIX = "hasten/"
# The first opset in which ReduceMax takes its axes as an input.
_AXES_INPUT_OPSET = 18


def input_maxima(graph: Path, matmuls: Sequence[MatMul], calibration: Calibration) -> dict[str, FloatArray]:
    """Return the largest magnitude of each input channel of each matmul, by the matmul's name."""
    model = read_graph(graph, with_weights=False)
    widths = {matmul.input: matmul.inputs for matmul in matmuls}
    probes = {_add_probe(model, name, width): name for name, width in widths.items()}
    maxima: dict[str, FloatArray] = {}
    for values in stream(model, graph.parent, list(probes), calibration):
        for probe, value in values.items():
            name = probes[probe]
            maxima[name] = np.maximum(maxima[name], value) if name in maxima else value
    return {matmul.name: maxima[matmul.input] for matmul in matmuls}


def stream(model: Any, folder: Path, names: Sequence[str], calibration: Calibration) -> Iterator[dict[str, FloatArray]]:
    """Yield the named tensors of each batch. They become outputs of the model; `folder` holds its weights."""
    import onnx

    if not names:
        return  # with an empty list, ONNX Runtime returns all outputs
    known = {entry.name for entry in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known)
    session = open_in_memory(model, folder)
    for feeds in calibration.feeds([entry.name for entry in session.get_inputs()]):
        try:
            values = session.run(list(names), feeds)
        except Exception as error:
            raise StageError(f"the graph fails on calibration rows: {error}") from error
        yield dict(zip(names, values, strict=True))


def _add_probe(model: Any, name: str, width: int) -> str:
    from onnx import helper

    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    axes = _constant(model, "axes", np.array([0], np.int64))
    shape = _constant(model, str(width), np.array([-1, width], np.int64))
    infinity = _constant(model, "infinite", np.array(np.inf, np.float32))
    result = f"{_PREFIX}{name}"
    magnitude, is_nan, safe, flat = (f"{result}/{part}" for part in ("size", "number", "safe", "flat"))
    model.graph.node.extend(
        [
            helper.make_node("Abs", [name], [magnitude]),
            # ONNX Runtime's ReduceMax ignores NaN.
            helper.make_node("IsNaN", [name], [is_nan]),
            helper.make_node("Where", [is_nan, infinity, magnitude], [safe]),
            helper.make_node("Reshape", [safe, shape], [flat]),
            helper.make_node("ReduceMax", [flat, axes], [result], keepdims=0)
            if opset >= _AXES_INPUT_OPSET
            else helper.make_node("ReduceMax", [flat], [result], keepdims=0, axes=[0]),
        ]
    )
    return result


def _constant(model: Any, name: str, values: Any) -> str:
    from onnx import numpy_helper

    name = f"{_PREFIX}{name}"
    if all(tensor.name != name for tensor in model.graph.initializer):
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    return name
