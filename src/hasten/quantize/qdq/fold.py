"""Fold the quantization of weights in a traced graph: they are stored in 8 bits and quantized only once."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hasten.onnx_graph import attribute
from hasten.quantize.analysis.matmuls import GraphIndex

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
_QDQ = (QUANTIZE, DEQUANTIZE)


def fold(model: Any) -> None:
    """Share constants and QDQ pairs that are equal, and store weights in 8 bits, transposed as matmuls read them."""
    _share_constants(model)
    _share_pairs(model.graph)
    _fold_weights(model)


def _share_constants(model: Any) -> None:
    """Make scales and zero points initializers, one for each value, so that equal pairs look equal."""
    from onnx import numpy_helper

    graph, constants = model.graph, GraphIndex(model).constants
    shared: dict[tuple[int, tuple[int, ...], bytes], str] = {}
    stored = {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type not in _QDQ:
            continue
        for index in (1, 2):
            tensor = constants[node.input[index]]
            key = (tensor.data_type, tuple(tensor.dims), numpy_helper.to_array(tensor).tobytes())
            if key not in shared:
                shared[key] = f"qdq_{'scale' if index == 1 else 'zero'}_{len(shared)}"
                if shared[key] not in stored:
                    copy = graph.initializer.add()
                    copy.CopyFrom(tensor)
                    copy.name = shared[key]
            node.input[index] = shared[key]


def _share_pairs(graph: Any) -> None:
    """Share one QDQ pair between all consumers that read a tensor with the same scale."""
    renamed: dict[str, str] = {}
    known: dict[tuple[Any, ...], str] = {}
    unique = []
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = renamed.get(name, name)
        if node.op_type in (*_QDQ, "Transpose"):
            attributes = tuple(sorted(entry.SerializeToString() for entry in node.attribute))
            key = (node.op_type, *node.input, attributes)
            if key in known:
                renamed[node.output[0]] = known[key]
                continue
            known[key] = node.output[0]
        unique.append(node)
    del graph.node[:]
    graph.node.extend(unique)


def _fold_weights(model: Any) -> None:
    graph, index = model.graph, GraphIndex(model)
    removed: set[int] = set()
    for node in graph.node:
        if node.op_type != QUANTIZE or node.input[0] not in index.constants:
            continue
        axis = attribute(node, "axis", None)
        dequantizers = index.consumers(node.output[0])
        behind = [reader for dequantizer in dequantizers for reader in index.consumers(dequantizer.output[0])]
        is_transposed = bool(behind) and all(
            each.op_type == "Transpose" and list(attribute(each, "perm", [])) == [1, 0] for each in behind
        )
        weight = _quantize(index.constants, node, axis)
        stored = graph.initializer.add()
        stored.CopyFrom(_tensor(f"{node.input[0]}_eight_bits", weight.T if is_transposed else weight))
        removed.add(id(node))
        for dequantizer in dequantizers:
            dequantizer.input[0] = stored.name
            if axis is not None and is_transposed:
                next(entry for entry in dequantizer.attribute if entry.name == "axis").i = 1 - axis
            for transpose in index.consumers(dequantizer.output[0]) if is_transposed else ():
                removed.add(id(transpose))
                for reader in index.consumers(transpose.output[0]):
                    inputs = (dequantizer.output[0] if name == transpose.output[0] else name for name in reader.input)
                    reader.input[:] = list(inputs)
    remaining = [node for node in graph.node if id(node) not in removed]
    del graph.node[:]
    graph.node.extend(remaining)


def _quantize(tensors: dict[str, Any], node: Any, axis: int | None) -> torch.Tensor:
    """Quantize a weight as QuantizeLinear is defined: divide, round half to even, clip."""
    from onnx import TensorProto, numpy_helper

    weight, scale = (torch.from_numpy(numpy_helper.to_array(tensors[name]).copy()) for name in node.input[:2])
    if axis is not None:
        scale = scale.view([-1 if dimension == axis else 1 for dimension in range(weight.dim())])
    divided = weight.float() / scale
    if tensors[node.input[2]].data_type == TensorProto.FLOAT8E4M3FN:
        return divided.clamp(-448, 448).to(torch.float8_e4m3fn)
    return divided.round().clamp(-128, 127).to(torch.int8)


def _tensor(name: str, values: torch.Tensor) -> Any:
    from onnx import TensorProto

    data_type = TensorProto.INT8 if values.dtype == torch.int8 else TensorProto.FLOAT8E4M3FN
    raw = values.contiguous().view(torch.uint8).numpy().astype(np.uint8).tobytes()
    return TensorProto(name=name, data_type=data_type, dims=list(values.shape), raw_data=raw)
