"""A graph in fp16, by ONNX Runtime's own converter; what leaves the range of fp16 stays in fp32, and so do its ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hasten.core.errors import StageError, missing_package
from hasten.graph import read_graph, write_graph
from hasten.quantize.session import tensor_types
from hasten.quantize.silence import silenced

# What the converter calls the casts it puts around a node that stays as it is, and before an output.
_NARROWING = "_cast_to_fp16_node"
_WIDENING = "_cast_to_fp32_node"
_ENDING = "graph_output_cast"


def halve(graph: Path, file: Path, beyond_fp16: frozenset[str], *, external_data: bool) -> None:
    """What computes or reads one of these tensors stays in fp32."""
    try:
        from onnxruntime.transformers.float16 import convert_float_to_float16
        from onnxruntime.transformers.onnx_model import OnnxModel
    except ImportError as error:
        raise missing_package(error.name or "onnx", "making a graph of fp16", "build") from error

    model = read_graph(graph)
    _name_nodes(model.graph)
    _tell_types(model, graph.parent)
    kept = [node.name for node in model.graph.node if not beyond_fp16.isdisjoint((*node.input, *node.output))]
    try:
        with silenced():
            model = convert_float_to_float16(model, keep_io_types=True, disable_shape_infer=True, node_block_list=kept)
            _join(model.graph)
            OnnxModel(model).topological_sort()
        write_graph(model, file, external_data=external_data)
    except Exception as error:
        raise StageError(f"the graph cannot be made in fp16: {error}") from error


def _name_nodes(graph: Any) -> None:
    """It knows what to leave alone by name."""
    for place, node in enumerate(graph.node):
        node.name = node.name or f"{node.op_type}_{place}"


def _tell_types(model: Any, folder: Path) -> None:
    """It puts casts only where it knows the type of a tensor, and onnx knows none behind ONNX Runtime's operators."""
    from onnx import TensorProto, helper

    types = tensor_types(model, folder)
    ends = {entry.name for entry in model.graph.output}
    del model.graph.value_info[:]
    model.graph.value_info.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        for name, kind in types.items()
        if kind == "tensor(float)" and name not in ends
    )


def _join(graph: Any) -> None:
    """From one node that stays in fp32 to another, or to an output, values would go through fp16, too narrow for them."""
    before = {node.output[0]: node.input[0] for node in graph.node if node.name.endswith(_NARROWING)}
    for node in graph.node:
        if node.name.endswith(_WIDENING) or node.name.startswith(_ENDING):
            # A cast from fp32 to fp32 is left, which ONNX Runtime drops.
            node.input[0] = before.get(node.input[0], node.input[0])
