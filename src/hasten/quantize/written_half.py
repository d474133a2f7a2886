"""Models that write, in fp16 as a GPU wants them: caches too, and norms in one operator, which adds up in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.core.errors import missing_package
from hasten.graph import read_graph, write_together
from hasten.quantize.half import halved
from hasten.quantize.silence import silenced

# What is chosen from: the one end that leaves the device.
_ENDS = ("logits",)
# From the mean of squares to what a norm divides by.
_ROOT = ("Add", "Sqrt", "Div", "Reciprocal")


def join_norms(graphs: Mapping[str, Path], folder: Path) -> dict[str, Path]:
    """The same in fp32, each norm in one operator: what is large inside it never leaves it."""
    return _written({name: _with_norms(read_graph(file)) for name, file in graphs.items()}, graphs, folder)


def halve_written(
    graphs: Mapping[str, Path], folder: Path, beyond_fp16: Mapping[str, frozenset[str]]
) -> dict[str, Path]:
    """What computes or reads a tensor that is named for its graph stays in fp32."""
    models = {}
    for name, file in graphs.items():
        model = read_graph(file)
        models[name] = halved(model, file.parent, beyond_fp16.get(name, frozenset()), _ENDS, _squares(model.graph))
    return _written(models, graphs, folder)


def _written(models: Mapping[str, Any], graphs: Mapping[str, Path], folder: Path) -> dict[str, Path]:
    made = {name: folder / file.name for name, file in graphs.items()}
    write_together({made[name]: models[name] for name in made})
    return made


def _with_norms(model: Any) -> Any:
    """Where a norm by the mean of squares is many nodes, one, with the addition before it."""
    try:
        from onnxruntime.transformers.fusion_simplified_layernorm import (
            FusionSimplifiedLayerNormalization,
            FusionSkipSimplifiedLayerNormalization,
        )
        from onnxruntime.transformers.onnx_model import OnnxModel
    except ImportError as error:
        raise missing_package(error.name or "onnx", "making a graph of fp16", "build") from error

    held = OnnxModel(model)
    with silenced():
        FusionSimplifiedLayerNormalization(held).apply()
        FusionSkipSimplifiedLayerNormalization(held).apply()
        held.prune_graph()
        held.topological_sort()
    return held.model


def _squares(graph: Any) -> list[str]:
    """What is left of such norms stays in fp32: fp16 knows no square of a number above 255."""
    makers = {name: node for node in graph.node for name in node.output}
    readers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    kept: list[Any] = []
    for mean in (node for node in graph.node if node.op_type == "ReduceMean"):
        before, after = makers.get(mean.input[0]), [mean]
        if before is None or before.op_type not in ("Pow", "Mul"):
            continue
        kept += [before, mean]
        while after:
            after = [one for node in after for one in readers.get(node.output[0], ()) if one.op_type in _ROOT]
            kept += after
    return [node.name for node in kept]
