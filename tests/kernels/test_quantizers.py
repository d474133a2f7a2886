"""What the fused kernels make of a module that was given with quantizers: it rounds as the module does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from encoders import DEVICE, EIGHT_BITS, SIZES, batch_of, model_of, opened
from hasten.backends import Source
from hasten.backends.fused import BACKEND
from hasten.builder.head import Exportable
from hasten.core.errors import StageError
from hasten.core.tensors import BATCH, SEQUENCE, Batch, DType, Signature, TensorSpec, pad, unpad
from hasten.core.variant import Variant
from hasten.quantize import qdq

INPUTS = ("input_ids", "attention_mask")
STATES = "last_hidden_state"
SIGNATURE = Signature(
    tuple(TensorSpec(name, DType.INT64, (BATCH, SEQUENCE)) for name in INPUTS),
    (TensorSpec(STATES, DType.FLOAT32, (BATCH, SEQUENCE, 64)),),
    max_length=140,
)
# More than the kernels for few tokens take, which round weights alone.
MANY = batch_of(70, 1, 60)
precisions = pytest.mark.parametrize("precision", ["int8", "fp8"])
# As a share of what rounding moves. What is computed in fp16 between the products takes some values to the step beside:
# 0.33 on an H200. A range that is a tenth off makes 0.9 to 1.3.
NEAR = 0.5 if DEVICE == "cuda" else 0.2


def feeds_of(batch: Batch) -> dict[str, Any]:
    return {name: torch.from_numpy(value) for name, value in pad(batch, SIGNATURE).items()}


def quantized(precision: str) -> tuple[Any, Any]:
    """A model with quantizers at its linear layers, and the same without; ranges from rows like those to come."""
    plain = model_of("Bert", "Model", layers=1)
    with qdq.patched(precision, products=False), qdq.calibration("max") as calibrate:
        model = transformers.BertModel(transformers.BertConfig(**SIZES, num_hidden_layers=1)).eval()
        model.load_state_dict(plain.state_dict(), strict=False)
        calibrate(model, [feeds_of(MANY)])
    return model, plain


def states(model: Any, batch: Batch) -> Any:
    with torch.inference_mode():
        return unpad({STATES: model(**feeds_of(batch)).last_hidden_state.numpy()}, batch, SIGNATURE)[STATES]


def make(model: Any, precision: str, folder: Path) -> Any:
    source = Source(SIGNATURE, {}, Exportable(model, INPUTS, [STATES]))
    return BACKEND.make(source, Variant.parse(f"fused-{precision}+qdq@cuda"), folder)


def distance(found: Any, expected: Any) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@precisions
def test_it_rounds_as_the_module_does(precision: str, tmp_path: Path) -> None:
    model, plain = quantized(precision)
    with opened(make(model, precision, tmp_path)) as session:
        found = session.run(MANY)[STATES]
    if precision == "fp8":
        share_steps(model)
    rounding = distance(states(model, MANY), states(plain, MANY))
    assert rounding > 1e-3
    assert distance(found, states(model, MANY)) < NEAR * rounding


def share_steps(model: Any) -> None:
    """Of fp8 a product's weights have one step for all rows, which costs nothing; the module has one for each."""
    for layer in model.encoder.layer:
        attention = layer.attention.self
        for linears in (
            (attention.query, attention.key, attention.value), (layer.attention.output.dense,),
            (layer.intermediate.dense,), (layer.output.dense,),
        ):  # fmt: skip
            most = max(float(linear.weight.detach().abs().max()) for linear in linears)
            for linear in linears:
                linear.weight_quantizer.set_range(torch.full((len(linear.weight),), most))


@precisions
def test_what_is_off_stays_in_halves(precision: str, tmp_path: Path) -> None:
    model, _ = quantized(precision)
    qdq.disable(model, "*.key.input_quantizer", "*.output.dense.weight_quantizer")
    stored = load_file(make(model, precision, tmp_path).path())
    narrow = {name for name, value in stored.items() if value.dtype in EIGHT_BITS}
    assert narrow == {"0.up.weight"}


def test_of_quantizers_that_are_off_nothing_is_made(tmp_path: Path) -> None:
    model, _ = quantized("int8")
    qdq.disable(model)
    with pytest.raises(StageError, match="no product of the encoder has quantizers that are on"):
        make(model, "int8", tmp_path)
