"""Dynamic int8: weights stored in 8 bits, activations quantized as they come, no calibration data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hasten.core.errors import StageError
from hasten.graph import read_graph
from hasten.quantize.recipe import Recipe
from hasten.quantize.silence import silenced
from hasten.quantize.split import kept

# The place of the positions among what EmbedLayerNormalization takes, and that of the bias in Attention.
_POSITIONS = 8
_SCORE_BIAS = 5


def quantize_dynamic(graph: Path, file: Path, recipe: Recipe, *, external_data: bool) -> None:
    import onnx
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization import quantize_dynamic as quantize
    from onnxruntime.quantization.registry import IntegerOpsRegistry

    nodes = read_graph(graph, with_weights=False).graph.node
    try:
        with silenced():
            quantize(
                graph,
                file,
                op_types_to_quantize=[kind for kind in IntegerOpsRegistry if kind != "Attention" or recipe.attention],
                per_channel=True,
                reduce_range=recipe.reduce_range,
                weight_type=QuantType.QInt8,
                nodes_to_exclude=[*kept(recipe), *(node.name for node in nodes if loses_inputs(node))],
                use_external_data_format=external_data,
                # Fused operators have no shape inference, so the quantizer is told what their tensors are.
                extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
            )
    except Exception as error:
        raise StageError(f"dynamic quantization failed: {error}") from error


def loses_inputs(node: Any) -> bool:
    """Whether the quantized form of an operator takes less than it is given, and says nothing.

    Embeddings that are told their positions, as RoBERTa's, would count from zero; attention that adds to its scores,
    as MPNet's, would not.
    """
    more = {"EmbedLayerNormalization": _POSITIONS, "Attention": _SCORE_BIAS}
    return node.op_type in more and any(node.input[more[node.op_type] :])
