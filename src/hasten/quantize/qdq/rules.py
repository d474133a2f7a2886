"""Whether a graph's pairs stand where TensorRT takes them as explicit quantization, by its documented rules.

The rules are those of "Working with Quantized Types" in its documentation, and need no GPU to be checked.
"""

from __future__ import annotations

from typing import Any

from hasten.graph import attribute
from hasten.quantize.qdq.fold import constants, readers

_QUANTIZE = "QuantizeLinear"
_DEQUANTIZE = "DequantizeLinear"
# Operators that compute in eight bits, or that a pair may ride through on its way to one.
_COMPUTING = ("MatMul", "Gemm", "Conv", "Add")
_MOVING = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Slice", "Concat", "Expand", "Gather", "Split")


def misplaced(model: Any) -> list[str]:
    """One line for each pair that TensorRT would refuse, or leave to run by itself; none for a sound graph."""
    graph = model.graph
    return [*_pairs(graph), *_scales(graph), *_operands(graph)]


def _pairs(graph: Any) -> list[str]:
    """Nothing in eight bits but between a pair, and no pair without somebody to compute with it."""
    held, reading = constants(graph), readers(graph)
    makers = {name: node for node in graph.node for name in node.output}
    results = {entry.name for entry in graph.output}
    found = []
    for node in graph.node:
        if node.op_type == _QUANTIZE:
            output = node.output[0]
            after = reading[output]
            if not after or output in results or any(each.op_type != _DEQUANTIZE for each in after):
                found.append(f"{node.name}: its eight bits are read by something else than {_DEQUANTIZE}")
            if any(list(each.input[1:3]) != list(node.input[1:3]) for each in after):
                found.append(f"{node.name}: its pair has another scale")
            if node.input[0] in held:
                found.append(f"{node.name}: a weight that is not stored in eight bits")
        if node.op_type == _DEQUANTIZE:
            maker = makers.get(node.input[0])
            if node.input[0] not in held and (maker is None or maker.op_type != _QUANTIZE):
                found.append(f"{node.name}: it is not behind a {_QUANTIZE}")
            if not _ends_in_computing(node, reading):
                found.append(f"{node.name}: nothing behind it computes in eight bits")
    return found


def _ends_in_computing(node: Any, reading: dict[str, list[Any]]) -> bool:
    for reader in reading[node.output[0]]:
        if reader.op_type in _COMPUTING or (reader.op_type in _MOVING and _ends_in_computing(reader, reading)):
            return True
    return False


def _scales(graph: Any) -> list[str]:
    """Positive constants, one for an activation; zero points of zero: TensorRT quantizes symmetrically."""
    import numpy as np
    from onnx import numpy_helper

    held = constants(graph)
    found = []
    for node in graph.node:
        if node.op_type not in (_QUANTIZE, _DEQUANTIZE):
            continue
        if any(name not in held for name in node.input[1:3]):
            found.append(f"{node.name}: its scale is not a constant")
            continue
        scale = numpy_helper.to_array(held[node.input[1]])
        if not (np.isfinite(scale).all() and (scale > 0).all()):
            found.append(f"{node.name}: a scale that is not positive")
        if any(held[node.input[2]].raw_data):
            found.append(f"{node.name}: a zero point that is not zero")
        if scale.ndim and node.input[0] not in held:
            found.append(f"{node.name}: an activation with a scale for each channel")
    return found


def _operands(graph: Any) -> list[str]:
    """All inputs of a product or sum in eight bits, or none; channels of weights on the axis that is not summed."""
    held, makers = constants(graph), {name: node for node in graph.node for name in node.output}
    found = []
    for node in graph.node:
        if node.op_type not in _COMPUTING:
            continue
        pairs = [_pair_behind(name, makers) for name in node.input[:2]]
        is_shift = node.op_type == "Add" and any(name in held for name in node.input[:2])  # a bias
        if (pairs[0] is None) != (pairs[1] is None) and not is_shift:
            found.append(f"{node.name}: one of its inputs is in eight bits, and the other is not")
        weight = pairs[1]
        if node.op_type in ("MatMul", "Gemm") and weight is not None and weight.input[0] in held:
            dims = held[weight.input[1]].dims
            is_turned = node.op_type == "Gemm" and attribute(node, "transB", 0)
            if dims and attribute(weight, "axis", 1) != (0 if is_turned else 1):
                found.append(f"{node.name}: its weights have a scale for each input instead of each output")
    return found


def _pair_behind(name: str, makers: dict[str, Any]) -> Any:
    node = makers.get(name)
    while node is not None and node.op_type in _MOVING:
        node = makers.get(node.input[0])
    return node if node is not None and node.op_type == _DEQUANTIZE else None
