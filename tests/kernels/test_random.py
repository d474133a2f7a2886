"""Random batches against PyTorch in fp32: ten thousand on a GPU with --slow, a handful everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from encoders import DEVICE, FEW_LAYERS, TOLERANCE, model_of, opened
from hasten.backends import Source
from hasten.backends.fused import BACKEND
from hasten.builder.head import Exportable
from hasten.core.tensors import BATCH, SEQUENCE, Batch, DType, Signature, TensorSpec, pad, unpad
from hasten.core.variant import Variant

INPUTS = ("input_ids", "attention_mask")
# Of the rows of a batch and of the tokens of a row.
MOST_ROWS, LONGEST = (16, 140) if DEVICE == "cuda" else (3, 9)


def drawn(draw: np.random.Generator) -> Batch:
    """Mostly short rows, some of one token, some of the longest; few rows or many."""
    rows = int(draw.integers(1, MOST_ROWS, endpoint=True))
    lengths = np.clip(draw.geometric(2.5 / LONGEST, rows), 1, LONGEST)
    return Batch.from_rows({"input_ids": [draw.integers(5, 50, length).tolist() for length in lengths]})


def answers(module: Any, batch: Batch, signature: Signature) -> Any:
    feeds = {name: torch.from_numpy(value).to(DEVICE) for name, value in pad(batch, signature).items()}
    with torch.inference_mode():
        (found,) = module(**feeds)
    return unpad({signature.outputs[0].name: found.cpu().numpy()}, batch, signature)[signature.outputs[0].name]


@pytest.mark.parametrize(
    ("family", "kind", "output"),
    [("Bert", "ForSequenceClassification", "logits"), ("MPNet", "Model", "last_hidden_state")],
)
def test_random_batches(family: str, kind: str, output: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    is_long = DEVICE == "cuda" and request.config.getoption("--slow")
    count = 5000 if is_long else 50 if DEVICE == "cuda" else 2
    module = Exportable(model_of(family, kind, layers=FEW_LAYERS), INPUTS, [output])
    axes = (BATCH,) if kind.startswith("For") else (BATCH, SEQUENCE)
    inputs = tuple(TensorSpec(name, DType.INT64, (BATCH, SEQUENCE)) for name in INPUTS)
    signature = Signature(inputs, (TensorSpec(output, DType.FLOAT32, (*axes, 2)),), max_length=LONGEST)
    session = opened(BACKEND.make(Source(signature, {}, module), Variant.parse("fused-fp16@cuda"), tmp_path))
    module.to(DEVICE)
    draw = np.random.default_rng(7)
    batches = [drawn(draw) for _ in range(count)]
    # Of all together: two logits of one row may be next to nothing.
    scale = np.sqrt(np.mean([np.square(answers(module, batch, signature)).mean() for batch in batches[:50]]))
    worst = 0.0
    for batch in batches:
        expected, found = answers(module, batch, signature), session.run(batch)[output]
        assert found.shape == expected.shape
        error = float(np.sqrt(np.square(found - expected).mean()) / scale)
        assert error <= TOLERANCE, (batch.lengths.tolist(), error)
        worst = max(worst, error)
    print(f"{count} batches of {family}: largest relative error {worst:.1e}")
