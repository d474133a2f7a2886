"""Check that a graph's QDQ pairs follow TensorRT's documented rules of explicit quantization.

The rules are those of "Working with Quantized Types" in its documentation; checking them needs no GPU.
"""

from __future__ import annotations

from typing import Any

from hasten.onnx_graph import attribute
from hasten.quantize.analysis.matmuls import GraphIndex
from hasten.quantize.qdq.fold import DEQUANTIZE, QUANTIZE

# Operators that compute in 8 bits, and those that only move data and that a pair may pass on its way to one.
_COMPUTING = ("MatMul", "Gemm", "Conv", "Add")
_MOVING = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Slice", "Concat", "Expand", "Gather", "Split")


def find_violations(model: Any) -> list[str]:
    """Return one line for each pair that TensorRT would reject or run unfused; none for a valid graph."""
    index = GraphIndex(model)
    return [*_check_pairs(index), *_check_scales(index), *_check_operands(index)]


def _check_pairs(index: GraphIndex) -> list[str]:
    """Check that 8-bit tensors exist only inside pairs, and that an operator computes with each pair."""
    violations = []
    for node in index.graph.node:
        if node.op_type == QUANTIZE:
            output = node.output[0]
            behind = index.consumers(output)
            if not behind or output in index.outputs or any(each.op_type != DEQUANTIZE for each in behind):
                violations.append(f"{node.name}: its 8-bit output has a consumer other than {DEQUANTIZE}")
            if any(list(each.input[1:3]) != list(node.input[1:3]) for each in behind):
                violations.append(f"{node.name}: its {DEQUANTIZE} has another scale")
            if node.input[0] in index.constants:
                violations.append(f"{node.name}: its weight is not stored in 8 bits")
        if node.op_type == DEQUANTIZE:
            producer = index.producers.get(node.input[0])
            if node.input[0] not in index.constants and (producer is None or producer.op_type != QUANTIZE):
                violations.append(f"{node.name}: it is not behind a {QUANTIZE}")
            if not _reaches_computation(node, index):
                violations.append(f"{node.name}: no operator behind it computes in 8 bits")
    return violations


def _reaches_computation(node: Any, index: GraphIndex) -> bool:
    return any(
        reader.op_type in _COMPUTING or (reader.op_type in _MOVING and _reaches_computation(reader, index))
        for reader in index.consumers(node.output[0])
    )


def _check_scales(index: GraphIndex) -> list[str]:
    """Check that scales are positive constants, one per activation, and zero points zero: TensorRT is symmetric."""
    import numpy as np
    from onnx import numpy_helper

    violations = []
    for node in index.graph.node:
        if node.op_type not in (QUANTIZE, DEQUANTIZE):
            continue
        if any(name not in index.constants for name in node.input[1:3]):
            violations.append(f"{node.name}: its scale is not a constant")
            continue
        scale = numpy_helper.to_array(index.constants[node.input[1]])
        if not (np.isfinite(scale).all() and (scale > 0).all()):
            violations.append(f"{node.name}: its scale is not positive")
        if any(index.constants[node.input[2]].raw_data):
            violations.append(f"{node.name}: its zero point is not zero")
        if scale.ndim and node.input[0] not in index.constants:
            violations.append(f"{node.name}: an activation has one scale per channel")
    return violations


def _check_operands(index: GraphIndex) -> list[str]:
    """Check that all or no inputs of an operator are in 8 bits, and that weights have one scale per output channel."""
    violations = []
    for node in index.graph.node:
        if node.op_type not in _COMPUTING:
            continue
        pairs = [_dequantizer_before(name, index) for name in node.input[:2]]
        is_bias = node.op_type == "Add" and any(name in index.constants for name in node.input[:2])
        if (pairs[0] is None) != (pairs[1] is None) and not is_bias:
            violations.append(f"{node.name}: one of its inputs is in 8 bits and the other is not")
        weight = pairs[1]
        if node.op_type in ("MatMul", "Gemm") and weight is not None and weight.input[0] in index.constants:
            dims = index.constants[weight.input[1]].dims
            is_transposed = node.op_type == "Gemm" and attribute(node, "transB", 0)
            if dims and attribute(weight, "axis", 1) != (0 if is_transposed else 1):
                violations.append(f"{node.name}: its weights have one scale per input instead of per output channel")
    return violations


def _dequantizer_before(name: str, index: GraphIndex) -> Any:
    node = index.producers.get(name)
    while node is not None and node.op_type in _MOVING:
        node = index.producers.get(node.input[0])
    return node if node is not None and node.op_type == DEQUANTIZE else None
