"""Weights to eight bits in the file: what a traced graph rounds again and again is rounded once."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch

from hasten.graph import attribute

_QUANTIZE = "QuantizeLinear"
_DEQUANTIZE = "DequantizeLinear"
_PAIRED = (_QUANTIZE, _DEQUANTIZE)


def fold(model: Any) -> None:
    """In place: constants by value, equal pairs once, weights in eight bits and turned as products read them."""
    graph = model.graph
    _name_constants(graph)
    _share(graph)
    _fold_weights(graph)


def constants(graph: Any) -> dict[str, Any]:
    """Tensors whose values the graph holds, by name."""
    found = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and (value := attribute(node, "value", None)) is not None:
            found[node.output[0]] = value
        elif node.op_type == "Identity" and node.input[0] in found:
            found[node.output[0]] = found[node.input[0]]  # how the exporter says that two weights are equal
    return found


def readers(graph: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            found[name].append(node)
    return found


def _name_constants(graph: Any) -> None:
    """Scales and zero points as initializers, one for each value: then equal pairs look equal."""
    known = constants(graph)
    named: dict[tuple[int, tuple[int, ...], bytes], str] = {}
    stored = {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type not in _PAIRED:
            continue
        for place in (1, 2):
            tensor = known[node.input[place]]
            key = (tensor.data_type, tuple(tensor.dims), _bytes(tensor))
            if key not in named:
                named[key] = f"qdq_{'scale' if place == 1 else 'zero'}_{len(named)}"
                if named[key] not in stored:
                    made = graph.initializer.add()
                    made.CopyFrom(tensor)
                    made.name = named[key]
            node.input[place] = named[key]


def _bytes(tensor: Any) -> bytes:
    from onnx import numpy_helper

    values: bytes = tensor.raw_data or numpy_helper.to_array(tensor).tobytes()
    return values


def _share(graph: Any) -> None:
    """One pair for all who read the same tensor by the same scale."""
    renamed: dict[str, str] = {}
    known: dict[tuple[Any, ...], str] = {}
    kept = []
    for node in graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = renamed.get(name, name)
        if node.op_type in (*_PAIRED, "Transpose"):
            about = tuple(sorted(entry.SerializeToString() for entry in node.attribute))
            key = (node.op_type, *node.input, about)
            if key in known:
                renamed[node.output[0]] = known[key]
                continue
            known[key] = node.output[0]
        kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)


def _fold_weights(graph: Any) -> None:
    held, reading = constants(graph), readers(graph)
    gone: set[int] = set()
    for node in graph.node:
        if node.op_type != _QUANTIZE or node.input[0] not in held:
            continue
        axis = attribute(node, "axis", None)
        back = reading[node.output[0]]
        turned = [reader for pair in back for reader in reading[pair.output[0]]]
        is_turned = bool(turned) and all(
            each.op_type == "Transpose" and list(attribute(each, "perm", [])) == [1, 0] for each in turned
        )
        weight = _to_eight_bits(held, node, axis)
        stored = graph.initializer.add()
        stored.CopyFrom(_tensor(f"{node.input[0]}_eight_bits", weight.T if is_turned else weight))
        gone.add(id(node))
        for pair in back:
            pair.input[0] = stored.name
            if axis is not None and is_turned:
                next(entry for entry in pair.attribute if entry.name == "axis").i = 1 - axis
            for each in reading[pair.output[0]] if is_turned else ():
                _reroute(reading[each.output[0]], each.output[0], pair.output[0])
                gone.add(id(each))
    kept = [node for node in graph.node if id(node) not in gone]
    del graph.node[:]
    graph.node.extend(kept)


def _reroute(nodes: list[Any], before: str, after: str) -> None:
    for node in nodes:
        for place, name in enumerate(node.input):
            node.input[place] = after if name == before else name


def _to_eight_bits(held: dict[str, Any], node: Any, axis: int | None) -> torch.Tensor:
    """As QuantizeLinear is defined: divided, rounded to even, cut off."""
    from onnx import TensorProto, numpy_helper

    weight, scale = (torch.from_numpy(numpy_helper.to_array(held[name]).copy()) for name in node.input[:2])
    if axis is not None:
        scale = scale.view([-1 if place == axis else 1 for place in range(weight.dim())])
    divided = weight.float() / scale
    if held[node.input[2]].data_type == TensorProto.FLOAT8E4M3FN:
        return divided.clamp(-448, 448).to(torch.float8_e4m3fn)
    return divided.round().clamp(-128, 127).to(torch.int8)


def _tensor(name: str, values: torch.Tensor) -> Any:
    from onnx import TensorProto

    kind = TensorProto.INT8 if values.dtype == torch.int8 else TensorProto.FLOAT8E4M3FN
    raw = values.contiguous().view(torch.uint8).numpy().astype(np.uint8).tobytes()
    return TensorProto(name=name, data_type=kind, dims=list(values.shape), raw_data=raw)
