"""Random batches match PyTorch in fp32: ten thousand on a GPU with --slow, a handful elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hasten.backends import Source
from hasten.backends.fused import BACKEND
from hasten.builder.sources.export_wrapper import Exportable
from hasten.core.tensors import BATCH, SEQUENCE, Batch, DType, Signature, TensorSpec, pad, unpad
from hasten.core.variant import Variant
from support.models.fused_encoders import DEVICE, FEW_LAYERS, TOLERANCE, model_of, open_session

INPUTS = ("input_ids", "attention_mask")
MAX_ROWS, MAX_LENGTH = (16, 140) if DEVICE == "cuda" else (3, 9)


def draw_batch(random: np.random.Generator) -> Batch:
    """Return up to MAX_ROWS rows, mostly short, some of one token, some of the maximum length."""
    rows = int(random.integers(1, MAX_ROWS, endpoint=True))
    lengths = np.clip(random.geometric(2.5 / MAX_LENGTH, rows), 1, MAX_LENGTH)
    return Batch.from_rows({"input_ids": [random.integers(5, 50, length).tolist() for length in lengths]})


def reference_outputs(module: Any, batch: Batch, signature: Signature) -> Any:
    feeds = {name: torch.from_numpy(value).to(DEVICE) for name, value in pad(batch, signature).items()}
    with torch.inference_mode():
        (actual,) = module(**feeds)
    return unpad({signature.outputs[0].name: actual.cpu().numpy()}, batch, signature)[signature.outputs[0].name]


@pytest.mark.parametrize(
    ("family", "kind", "output"),
    [("Bert", "ForSequenceClassification", "logits"), ("MPNet", "Model", "last_hidden_state")],
)
def test_random_batches_match_pytorch(
    family: str, kind: str, output: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    is_long = DEVICE == "cuda" and request.config.getoption("--slow")
    count = 5000 if is_long else 50 if DEVICE == "cuda" else 2
    module = Exportable(model_of(family, kind, layers=FEW_LAYERS), INPUTS, [output])
    axes = (BATCH,) if kind.startswith("For") else (BATCH, SEQUENCE)
    inputs = tuple(TensorSpec(name, DType.INT64, (BATCH, SEQUENCE)) for name in INPUTS)
    signature = Signature(inputs, (TensorSpec(output, DType.FLOAT32, (*axes, 2)),), max_length=MAX_LENGTH)
    session = open_session(BACKEND.make(Source(signature, {}, module), Variant.parse("fused-fp16@cuda"), tmp_path))
    module.to(DEVICE)
    random = np.random.default_rng(7)
    batches = [draw_batch(random) for _ in range(count)]
    # Relative to all outputs: the two logits of a row may both be close to zero.
    scale = np.sqrt(np.mean([np.square(reference_outputs(module, batch, signature)).mean() for batch in batches[:50]]))
    max_error = 0.0
    for batch in batches:
        expected, actual = reference_outputs(module, batch, signature), session.run(batch)[output]
        assert actual.shape == expected.shape
        error = float(np.sqrt(np.square(actual - expected).mean()) / scale)
        assert error <= TOLERANCE, (batch.lengths.tolist(), error)
        max_error = max(max_error, error)
    print(f"{count} batches of {family}: largest relative error {max_error:.1e}")
