"""Run the task head behind the encoder: a sequence of dense layers, norms and activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from hasten.kernels.ops.activation import TANH
from hasten.kernels.ops.head import dense
from hasten.kernels.ops.norm import layer_norm

# Activations that are fused into the preceding dense layer, and those that are not.
_FUSED = ("tanh", "relu", "gelu")
_UNFUSED = {TANH: lambda x: torch.nn.functional.gelu(x, approximate="tanh"), "sigmoid": torch.sigmoid}


def run_layers(x: Any, rows: Any | None, layers: Sequence[str], weights: Mapping[str, Any], eps: float) -> Any:
    """Apply the layers to the rows of x listed in `rows`, or to all.

    The weights of a name decide what it is: a matrix is a dense layer, a vector a norm, neither weight nor bias an
    activation. A bias alone is the output projection of a masked language model, by the output embeddings or, where
    they are tied, by the word embeddings.
    """
    for layer, following in pairwise([*layers, ""]):
        weight, bias = weights.get(f"head.{layer}.weight"), weights.get(f"head.{layer}.bias")
        if bias is None:
            x = _UNFUSED[layer](x) if layer in _UNFUSED else x
        elif weight is None:
            embeddings = weights.get("output_embeddings", weights["word_embeddings"])
            # In half precision but for the bias: fp32 would take too long for a whole vocabulary.
            x = torch.mm(x.to(embeddings.dtype), embeddings.T) + bias
        elif weight.dim() == 1:
            x, _ = layer_norm(x, weight, bias, eps)
        else:
            x, rows = dense(x, rows, weight, bias, following if following in _FUSED else ""), None
    # Unused sequences of the bucket start behind the last token.
    return x if rows is None else x[rows.clamp(max=len(x) - 1)]
