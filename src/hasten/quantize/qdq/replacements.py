"""Replacements for functions whose ONNX operators TensorRT does not support."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def cumsum(values: Tensor, dim: int | None = None, *, axis: int | None = None, dtype: Any = None) -> Tensor:
    """Compute a cumulative sum, of integers in float: RoBERTa counts positions, and TensorRT sums only floats.

    Floats are exact up to 2^24, which is longer than any text.
    """
    dimension = dim if dim is not None else axis
    if dimension is None:
        raise TypeError("cumsum needs dim or axis")
    if values.is_floating_point():
        return torch.cumsum(values, dimension, dtype=dtype)
    return torch.cumsum(values.float(), dimension).to(dtype or torch.int64)


REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {torch.cumsum: cumsum}


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a replacement in rewritten code."""
    return f"_hasten_{function.__name__}"
