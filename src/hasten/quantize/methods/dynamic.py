"""Dynamic int8 quantization: int8 weights, activations quantized at run time, no calibration data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hasten.core.errors import StageError
from hasten.onnx_graph import read_graph
from hasten.quantize.quiet import quiet_logging
from hasten.quantize.recipe import Recipe
from hasten.quantize.rewrites.split import float_nodes

# The index of the first lost input, by operator: position ids, and attention's bias.
_FIRST_LOST_INPUTS = {"EmbedLayerNormalization": 8, "Attention": 5}


def quantize_dynamic(graph: Path, file: Path, recipe: Recipe, *, external_data: bool) -> None:
    """Quantize the graph with ONNX Runtime's dynamic quantizer as the recipe says."""
    import onnx
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization import quantize_dynamic as quantize
    from onnxruntime.quantization.registry import IntegerOpsRegistry

    nodes = read_graph(graph, with_weights=False).graph.node
    try:
        with quiet_logging():
            quantize(
                graph,
                file,
                op_types_to_quantize=[kind for kind in IntegerOpsRegistry if kind != "Attention" or recipe.attention],
                per_channel=True,
                reduce_range=recipe.reduce_range,
                weight_type=QuantType.QInt8,
                nodes_to_exclude=[*float_nodes(recipe), *(node.name for node in nodes if loses_inputs(node))],
                use_external_data_format=external_data,
                # Fused operators have no shape inference: without a default, the types of their outputs are unknown.
                extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
            )
    except Exception as error:
        raise StageError(f"dynamic quantization failed: {error}") from error


def loses_inputs(node: Any) -> bool:
    """Return whether the quantized form of an operator silently ignores some of its inputs.

    Embeddings with position ids (RoBERTa) would count from zero; attention with a bias (MPNet) would not add it.
    """
    return node.op_type in _FIRST_LOST_INPUTS and any(node.input[_FIRST_LOST_INPUTS[node.op_type] :])
