"""Dynamic int8: weights stored in 8 bits, activations quantized as they come, no calibration data."""

from __future__ import annotations

import logging
from pathlib import Path

from hasten.core.errors import StageError

# The place of the positions among what EmbedLayerNormalization takes.
_POSITIONS = 8


def quantize_dynamic(graph: Path, file: Path, *, external_data: bool, reduce_range: bool = False) -> None:
    """Of reduced range: weights in seven bits, for processors whose sums of two products saturate."""
    import onnx
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization import quantize_dynamic as quantize

    # Its advice to preprocess does not fit a graph that is fused already, and it goes to the root logger.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        quantize(
            graph,
            file,
            per_channel=True,
            weight_type=QuantType.QInt8,
            reduce_range=reduce_range,
            nodes_to_exclude=_with_positions(graph),
            use_external_data_format=external_data,
            # Fused operators have no shape inference, so the quantizer is told what their tensors are.
            extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
        )
    except Exception as error:
        raise StageError(f"dynamic quantization failed: {error}") from error
    finally:
        logging.disable(before)


def _with_positions(graph: Path) -> list[str]:
    """Embeddings that are told their positions, as RoBERTa's: their quantized form is not, and counts from zero."""
    import onnx

    nodes = onnx.load(graph, load_external_data=False).graph.node
    return [node.name for node in nodes if node.op_type == "EmbedLayerNormalization" and any(node.input[_POSITIONS:])]
