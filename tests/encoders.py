"""Tiny encoders of every family that the fused kernels know, with weights that all matter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from hasten.backends import Artifact, RunOptions
from hasten.core.tensors import Batch

if TYPE_CHECKING:
    from hasten.backends.fused.session import FusedSession

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EIGHT_BITS = (torch.float8_e4m3fn, torch.int8)
POSITIONS = 150
SIZES = {
    "vocab_size": 50,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": POSITIONS,
}
NARROW = SIZES | {"embedding_size": 32}
DISTILLED = {"vocab_size": 50, "dim": 64, "n_heads": 4, "hidden_dim": 128}
FAMILIES = {
    "Bert": SIZES,
    "Roberta": SIZES,
    "XLMRoberta": SIZES,
    "Camembert": SIZES,
    "Electra": NARROW,
    "DistilBert": DISTILLED,
    "MPNet": SIZES,
    # As published: with the other GELU.
    "Albert": NARROW | {"hidden_act": "gelu_new"},
}
# Enough where not the layers are tested: each takes the interpreter a tenth of a second.
FEW_LAYERS = 2 if DEVICE == "cuda" else 1
# fp16 on a GPU; through the interpreter in fp32, where only the order of additions differs.
TOLERANCE = 1e-2 if DEVICE == "cuda" else 1e-5


def model_of(family: str, kind: str, *, layers: int = 2, **about: Any) -> Any:
    about |= {"n_layers" if family == "DistilBert" else "num_hidden_layers": layers}
    config = getattr(transformers, f"{family}Config")(**(FAMILIES[family] | about), num_labels=2)
    model = getattr(transformers, f"{family}{kind}")(config).eval()
    for parameter in model.parameters():
        # Large enough for every weight to matter.
        mean, spread = (0.0, 0.2) if parameter.dim() > 1 else (0.3, 0.3)
        torch.nn.init.normal_(parameter, mean, spread)
        # As the backend will hold it, so that what differs is what it computes.
        parameter.data = parameter.data.half().float()
    return model


def batch_of(*lengths: int, masks: int | None = None) -> Batch:
    """Rows of any tokens but special ones; with `masks`, a token of that number in the middle of each."""
    rows = np.random.default_rng(3)
    ids = [rows.integers(5, 50, length) for length in lengths]
    if masks is not None:
        for row in ids:
            row[len(row) // 2] = masks
    return Batch.from_rows({"input_ids": [row.tolist() for row in ids]})


def opened(artifact: Artifact) -> FusedSession:
    """On the CPU through Triton's interpreter, in fp32 but for what is of eight bits."""
    from hasten.backends.fused import BACKEND
    from hasten.backends.fused.session import FusedSession, read_about

    if DEVICE == "cuda":
        return BACKEND.open(artifact, RunOptions(1))
    stored = load_file(artifact.path())
    weights = {name: value if value.dtype in EIGHT_BITS else value.float() for name, value in stored.items()}
    return FusedSession(read_about(artifact), weights, artifact, device="cpu", is_dependent=False)
