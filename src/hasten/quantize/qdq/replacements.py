"""Functions that compute the same by operators that TensorRT takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def cumsum(values: Tensor, dim: int) -> Tensor:
    """Of whole numbers too, as RoBERTa counts its positions: TensorRT's CumSum takes floats alone.

    They are exact up to 2^24, which no text is long enough to reach.
    """
    if values.is_floating_point():
        return torch.cumsum(values, dim)
    return torch.cumsum(values.float(), dim).to(torch.int64)


REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {torch.cumsum: cumsum}


def name_of(function: Callable[..., Any]) -> str:
    """What a replacement is called in rewritten code."""
    return f"_hasten_{function.__name__}"
