"""Random inputs for kernels, and the tolerances of their results."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from support.models.fused_encoders import DEVICE

# Relative error that rounding explains, by precision. Triton's interpreter multiplies bf16 matrices as integers.
# Measured in the interpreter on x86-64 with AVX-512 (2026-11): 2.9e-4 in fp16, 2.8e-7 in fp32; doubled and more, since
# other CPUs add in another order. The bounds of compiled kernels have not been narrowed.
TOLERANCE = (
    {torch.float16: 8e-4, torch.float32: 8e-7} if DEVICE == "cpu" else {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
)
TOKENS = [1, 17, 129]
MIXED = [[1], [17], [40, 1, 3, 70]]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    """Return normally distributed values."""
    return torch.randn(*shape).to(DEVICE, dtype)


def check(actual: Any, expected: Any, dtype: torch.dtype) -> None:
    """Assert that the relative error is within the tolerance of the precision."""
    error = ((actual.float() - expected.float()).norm() / expected.float().norm()).item()
    assert error <= TOLERANCE[dtype]  # false for NaN


def starts_of(lengths: list[int]) -> Any:
    """Return the first token of each sequence, and the end."""
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=DEVICE)


def sequence_of(lengths: list[int]) -> Any:
    """Return the sequence of each token."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int().to(DEVICE)
