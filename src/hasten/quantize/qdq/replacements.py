"""Functions that compute the same by operators that TensorRT takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def cumsum(values: Tensor, dim: int | None = None, *, axis: int | None = None, dtype: Any = None) -> Tensor:
    """Of whole numbers too, as RoBERTa counts its positions: TensorRT's CumSum takes floats alone.

    They are exact up to 2^24, which no text is long enough to reach.
    """
    place = dim if dim is not None else axis
    if place is None:
        raise TypeError("cumsum needs dim or axis")
    if values.is_floating_point():
        return torch.cumsum(values, place, dtype=dtype)
    return torch.cumsum(values.float(), place).to(dtype or torch.int64)


REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {torch.cumsum: cumsum}


def name_of(function: Callable[..., Any]) -> str:
    """What a replacement is called in rewritten code."""
    return f"_hasten_{function.__name__}"
