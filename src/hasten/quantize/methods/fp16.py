"""Convert graphs to fp16 with ONNX Runtime's converter; operators beyond fp16's precision or range stay in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.backends import DECODER
from hasten.core.errors import StageError, missing_package
from hasten.onnx_graph import attribute, is_large, read_graph, write_graph, write_merged
from hasten.quantize.analysis.matmuls import GraphIndex
from hasten.quantize.analysis.session import tensor_types
from hasten.quantize.quiet import quiet_logging

# The names the converter gives to the casts it puts around a node that stays in fp32, and before an output.
_CAST_TO_FP16 = "_cast_to_fp16_node"
_CAST_TO_FP32 = "_cast_to_fp32_node"
_OUTPUT_CAST = "graph_output_cast"
_FLOAT = "tensor(float)"
# Operators that compute an integer or an angle from positions: fp16 cannot tell positions beyond 2048 apart, and angles
# far sooner. In a bucket number, a rounding error is another bucket.
_POSITION_OPERATORS = ("Sin", "Cos", "Floor", "Ceil", "Round")
# The inputs and outputs of a generative model that stay in fp32: only the logits leave the GPU.
_DECODER_FP32_ENDS = ["logits"]
# The operators between the mean of squares and the divisor of a norm.
_ROOT_OPERATORS = ("Add", "Sqrt", "Div", "Reciprocal")


def convert_to_fp16(
    graphs: Mapping[str, Path], folder: Path, fp16_overflow_tensors: Mapping[str, frozenset[str]]
) -> dict[str, Path]:
    """Convert a model's graphs, of which an encoder has one, and write them to `folder` under their names.

    Nodes that compute or read an overflow tensor of their graph stay in fp32. So do the inputs and outputs of an
    encoder; the KV cache of a generative model becomes fp16.
    """
    is_generative = DECODER in graphs
    models = {
        name: _convert(read_graph(file), file.parent, fp16_overflow_tensors.get(name, frozenset()), is_generative)
        for name, file in graphs.items()
    }
    return _write(models, graphs, folder)


def fuse_norms(graphs: Mapping[str, Path], folder: Path) -> dict[str, Path]:
    """Fuse each RMSNorm of a generative model, still in fp32, into one operator: its large values stay inside."""
    return _write({name: _with_fused_norms(read_graph(file)) for name, file in graphs.items()}, graphs, folder)


def _write(models: Mapping[str, Any], graphs: Mapping[str, Path], folder: Path) -> dict[str, Path]:
    files = {name: folder / file.name for name, file in graphs.items()}
    try:
        if DECODER in graphs:
            write_merged({files[name]: model for name, model in models.items()})
        else:
            for name, model in models.items():
                write_graph(model, files[name], external_data=is_large(graphs[name]))
    except Exception as error:
        raise StageError(f"conversion to fp16 failed: {error}") from error
    return files


def _convert(model: Any, folder: Path, overflow_tensors: frozenset[str], is_generative: bool) -> Any:
    """Convert a model whose external weights lie in `folder`."""
    try:
        from onnxruntime.transformers.float16 import convert_float_to_float16
        from onnxruntime.transformers.onnx_model import OnnxModel
    except ImportError as error:
        raise missing_package(error.name or "onnx", "conversion to fp16", "build") from error

    fp32_nodes = set(_mean_square_nodes(model)) if is_generative else set()
    # The converter takes the nodes to leave alone by name.
    for index, node in enumerate(model.graph.node):
        node.name = node.name or f"{node.op_type}_{index}"
    types = tensor_types(model, folder)
    _annotate_float_tensors(model.graph, types)
    fp32_nodes |= _position_nodes(model.graph, types)
    fp32_nodes |= {
        node.name for node in model.graph.node if not overflow_tensors.isdisjoint((*node.input, *node.output))
    }
    try:
        with quiet_logging():
            model = convert_float_to_float16(
                model,
                keep_io_types=_DECODER_FP32_ENDS if is_generative else True,
                disable_shape_infer=True,
                node_block_list=sorted(fp32_nodes),
            )
            _bypass_casts(model.graph)
            OnnxModel(model).topological_sort()
    except Exception as error:
        raise StageError(f"conversion to fp16 failed: {error}") from error
    return model


def _annotate_float_tensors(graph: Any, types: Mapping[str, str]) -> None:
    """Add the types of float tensors, which onnx cannot infer behind ONNX Runtime's operators.

    The converter casts only tensors of known type.
    """
    from onnx import TensorProto, helper

    outputs = {entry.name for entry in graph.output}
    del graph.value_info[:]
    graph.value_info.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        for name, kind in types.items()
        if kind == _FLOAT and name not in outputs
    )


def _position_nodes(graph: Any, types: Mapping[str, str]) -> set[str]:
    """Find the nodes that compute relative position buckets or rotary angles: from positions, not from embeddings."""
    from onnx import TensorProto

    weights = {tensor.name for tensor in graph.initializer}
    producers: dict[str, Any] = {}
    from_embeddings: set[str] = set()
    pending: list[Any] = []
    for node in graph.node:
        is_lookup = node.op_type == "Gather" and node.input[0] in weights and types.get(node.output[0]) == _FLOAT
        reads_values = node.op_type not in ("Shape", "Size") and not from_embeddings.isdisjoint(node.input)
        if is_lookup or reads_values or "Embed" in node.op_type:
            from_embeddings.update(node.output)
            continue
        producers.update(dict.fromkeys(node.output, node))
        is_integer_cast = node.op_type == "Cast" and attribute(node, "to", 0) in (TensorProto.INT32, TensorProto.INT64)
        if node.op_type in _POSITION_OPERATORS or is_integer_cast:
            pending.append(node)
    names: set[str] = set()
    while pending:
        node = pending.pop()
        if node.name not in names and any(types.get(name) == _FLOAT for name in (*node.input, *node.output)):
            names.add(node.name)
            pending += [producers[name] for name in node.input if name in producers]
    return names


def _mean_square_nodes(model: Any) -> list[str]:
    """Find the nodes of RMSNorms that were not fused: the square of a number above 255 overflows fp16."""
    index = GraphIndex(model)
    nodes: list[Any] = []
    for mean in (node for node in model.graph.node if node.op_type == "ReduceMean"):
        square, frontier = index.producers.get(mean.input[0]), [mean]
        if square is None or square.op_type not in ("Pow", "Mul"):
            continue
        nodes += [square, mean]
        while frontier:
            readers = [reader for node in frontier for reader in index.consumers(node.output[0])]
            frontier = [reader for reader in readers if reader.op_type in _ROOT_OPERATORS]
            nodes += frontier
    return [node.name for node in nodes]


def _with_fused_norms(model: Any) -> Any:
    """Fuse the nodes of each RMSNorm, and the addition before it, into one."""
    try:
        from onnxruntime.transformers.fusion_simplified_layernorm import (
            FusionSimplifiedLayerNormalization,
            FusionSkipSimplifiedLayerNormalization,
        )
        from onnxruntime.transformers.onnx_model import OnnxModel
    except ImportError as error:
        raise missing_package(error.name or "onnx", "conversion to fp16", "build") from error

    wrapper = OnnxModel(model)
    with quiet_logging():
        FusionSimplifiedLayerNormalization(wrapper).apply()
        FusionSkipSimplifiedLayerNormalization(wrapper).apply()
        wrapper.prune_graph()
        wrapper.topological_sort()
    return wrapper.model


def _bypass_casts(graph: Any) -> None:
    """Connect fp32 nodes directly: from one to the next, or to an output, values would pass through fp16."""
    fp32_sources = {node.output[0]: node.input[0] for node in graph.node if node.name.endswith(_CAST_TO_FP16)}
    # If several fp32 nodes read one tensor, the converter puts the same cast before each of them.
    nodes = {(node.name, node.output[0]): node for node in reversed(graph.node)}.values()
    for node in nodes:
        if node.name.endswith(_CAST_TO_FP32) or node.name.startswith(_OUTPUT_CAST):
            # This leaves a cast from fp32 to fp32, which ONNX Runtime drops.
            node.input[0] = fp32_sources.get(node.input[0], node.input[0])
    unique = list(reversed(nodes))
    del graph.node[:]
    graph.node.extend(unique)
