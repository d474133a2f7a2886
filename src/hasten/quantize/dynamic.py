"""Dynamic int8: weights stored in 8 bits, activations quantized as they come, no calibration data."""

from __future__ import annotations

import logging
from pathlib import Path

from hasten.core.errors import StageError


def quantize_dynamic(graph: Path, file: Path, *, external_data: bool) -> None:
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
            use_external_data_format=external_data,
            # Fused operators have no shape inference, so the quantizer is told what their tensors are.
            extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
        )
    except Exception as error:
        raise StageError(f"dynamic quantization failed: {error}") from error
    finally:
        logging.disable(before)
