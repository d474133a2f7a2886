"""What stands behind an encoder: layers, norms and activations, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from hasten.kernels.activation import TANH
from hasten.kernels.head import dense
from hasten.kernels.norm import layer_norm

# Activations that ride on the layer in front of them, and those that do not.
_RIDING = ("tanh", "relu", "gelu")
_OTHERS = {TANH: lambda x: torch.nn.functional.gelu(x, approximate="tanh"), "sigmoid": torch.sigmoid}


def through(x: Any, rows: Any | None, steps: Sequence[str], weights: Mapping[str, Any], eps: float) -> Any:
    """Of the rows of x that `rows` names, or of all. A step is a layer, a norm or an activation, told by its weights.

    One that has a bias alone is the way back to words: by the very vectors words came in by, or by others.
    """
    for step, following in pairwise([*steps, ""]):
        weight, bias = weights.get(f"head.{step}.weight"), weights.get(f"head.{step}.bias")
        if bias is None:
            x = _OTHERS[step](x) if step in _OTHERS else x
        elif weight is None:
            words = weights.get("vocabulary", weights["words"])
            # A vocabulary is too much for full precision, but for the last addition.
            x = torch.mm(x.to(words.dtype), words.T) + bias
        elif weight.dim() == 1:
            x = layer_norm(x, weight, bias, eps)
        else:
            x, rows = dense(x, rows, weight, bias, following if following in _RIDING else ""), None
    # Places behind the last token belong to sequences that there is room for, and none in.
    return x if rows is None else x[rows.clamp(max=len(x) - 1)]
