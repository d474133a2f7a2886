"""Tiny encoders of every family that the fused kernels support, with weights that all affect the output."""

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
EIGHT_BIT_DTYPES = (torch.float8_e4m3fn, torch.int8)
POSITIONS = 150
SIZES = {
    "vocab_size": 50,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": POSITIONS,
}
NARROW = SIZES | {"embedding_size": 32}
# Local layers see 32 tokens to each side; special tokens are within the vocabulary.
MODERN = SIZES | {"intermediate_size": 96, "local_attention": 64, "global_attn_every_n_layers": 2}
MODERN |= {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
DISTILLED = {"vocab_size": 50, "dim": 64, "n_heads": 4, "hidden_dim": 128}
FAMILIES = {
    "Bert": SIZES,
    "Roberta": SIZES,
    "XLMRoberta": SIZES,
    "Camembert": SIZES,
    "Electra": NARROW,
    "DistilBert": DISTILLED,
    "MPNet": SIZES,
    # As published: with the tanh approximation of GELU.
    "Albert": NARROW | {"hidden_act": "gelu_new"},
    "ModernBert": MODERN,
}
# Enough for tests of other things than layers: each takes the interpreter a tenth of a second.
FEW_LAYERS = 2 if DEVICE == "cuda" else 1
# fp16 on a GPU; the interpreter runs in fp32, where only the order of additions differs.
TOLERANCE = 1e-2 if DEVICE == "cuda" else 1e-5


def model_of(family: str, kind: str, *, layers: int = 2, **options: Any) -> Any:
    """Return a random model of a family, with a head of this kind."""
    options |= {"n_layers" if family == "DistilBert" else "num_hidden_layers": layers}
    config = getattr(transformers, f"{family}Config")(**(FAMILIES[family] | options), num_labels=2)
    model = getattr(transformers, f"{family}{kind}")(config).eval()
    for parameter in model.parameters():
        # Large enough for every weight to affect the output.
        mean, spread = (0.0, 0.2) if parameter.dim() > 1 else (0.3, 0.3)
        torch.nn.init.normal_(parameter, mean, spread)
        # Rounded as the backend stores it, so that only the computation differs.
        parameter.data = parameter.data.half().float()
    return model


def batch_of(*lengths: int, mask_id: int | None = None) -> Batch:
    """Return rows of random tokens without special ones, but with `mask_id` in the middle of each, if given."""
    random = np.random.default_rng(3)
    ids = [random.integers(5, 50, length) for length in lengths]
    if mask_id is not None:
        for row in ids:
            row[len(row) // 2] = mask_id
    return Batch.from_rows({"input_ids": [row.tolist() for row in ids]})


def open_session(artifact: Artifact) -> FusedSession:
    """Open an artifact; on the CPU through Triton's interpreter, with fp32 instead of fp16."""
    from hasten.backends.fused import BACKEND
    from hasten.backends.fused.session import FusedSession, read_metadata

    if DEVICE == "cuda":
        return BACKEND.open(artifact, RunOptions(1))
    stored = load_file(artifact.path())
    weights = {name: value if value.dtype in EIGHT_BIT_DTYPES else value.float() for name, value in stored.items()}
    return FusedSession(read_metadata(artifact), weights, artifact, device="cpu", use_pdl=False)
