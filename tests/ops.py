"""Values to draw for kernels, and how near to plain PyTorch they have to be."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from encoders import DEVICE

# What rounding each precision allows, relative to the whole. Triton's interpreter takes bf16 for whole numbers where it
# multiplies matrices.
TOLERANCE = {torch.float16: 2e-3} | ({torch.float32: 2e-6} if DEVICE == "cpu" else {torch.bfloat16: 1.6e-2})
TOKENS = [1, 17, 129]
MIXED = [[1], [17], [40, 1, 3, 70]]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return torch.randn(*shape).to(DEVICE, dtype)


def check(found: Any, expected: Any, dtype: torch.dtype) -> None:
    error = ((found.float() - expected.float()).norm() / expected.float().norm()).item()
    assert error <= TOLERANCE[dtype]  # which no NaN is


def starts_of(lengths: list[int]) -> Any:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=DEVICE)


def sequence_of(lengths: list[int]) -> Any:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int().to(DEVICE)
