"""What values a graph computes with on calibration rows: only maxima leave the runtime, rows come a few at a time.

Padding counts: the ranges of a padded batch are taken over it too, when a graph is quantized and when it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hasten.core.errors import StageError
from hasten.core.tensors import FloatArray
from hasten.graph import read_graph
from hasten.quantize.calibration import Calibration
from hasten.quantize.products import Product
from hasten.quantize.session import open_changed

# Of names that no exporter gives.
_PREFIX = "hasten/"
# From here on a reduction takes its axes as an input.
_AXES_ARE_INPUTS = 18


def input_maxima(graph: Path, products: Sequence[Product], calibration: Calibration) -> dict[str, FloatArray]:
    """The largest magnitude of each channel that a product takes, by the product's name."""
    widths = {product.input: product.inputs for product in products}
    maxima = _maxima(read_graph(graph, with_weights=False), graph.parent, widths, calibration)
    return {product.name: maxima[product.input] for product in products}


def stream(model: Any, folder: Path, names: Sequence[str], calibration: Calibration) -> Iterator[dict[str, FloatArray]]:
    """Tensors of a graph by name, batch after batch. They become outputs of it; `folder` is where it lies."""
    import onnx

    if not names:
        return  # asked for none, ONNX Runtime gives all
    known = {entry.name for entry in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known)
    session = open_changed(model, folder)
    taken = [entry.name for entry in session.get_inputs()]
    for feeds in calibration.feeds():
        try:
            values = session.run(list(names), {name: feeds[name] for name in taken})
        except Exception as error:
            raise StageError(f"the graph does not run on calibration rows: {error}") from error
        yield dict(zip(names, values, strict=True))


def _maxima(model: Any, folder: Path, widths: Mapping[str, int], calibration: Calibration) -> dict[str, FloatArray]:
    """By tensor, of each of its channels; a tensor is taken as one channel where it is said to be one wide."""
    names = {_add_probe(model, name, width): name for name, width in widths.items()}
    result: dict[str, FloatArray] = {}
    for values in stream(model, folder, list(names), calibration):
        for probe, value in values.items():
            name = names[probe]
            result[name] = np.maximum(result[name], value) if name in result else value
    return result


def _add_probe(model: Any, name: str, width: int) -> str:
    from onnx import helper

    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    axes = _constant(model, "axes", np.array([0], np.int64))
    shape = _constant(model, str(width), np.array([-1, width], np.int64))
    infinite = _constant(model, "infinite", np.array(np.inf, np.float32))
    result = f"{_PREFIX}{name}"
    size, number, safe, flat = (f"{result}/{part}" for part in ("size", "number", "safe", "flat"))
    model.graph.node.extend(
        [
            helper.make_node("Abs", [name], [size]),
            # ONNX Runtime's ReduceMax overlooks NaN.
            helper.make_node("IsNaN", [name], [number]),
            helper.make_node("Where", [number, infinite, size], [safe]),
            helper.make_node("Reshape", [safe, shape], [flat]),
            helper.make_node("ReduceMax", [flat, axes], [result], keepdims=0)
            if opset >= _AXES_ARE_INPUTS
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
