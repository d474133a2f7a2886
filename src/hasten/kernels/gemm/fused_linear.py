"""Decide per GEMM of a pre-norm layer whether it runs fused in Triton, or by cuBLASLt with separate kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from hasten.kernels.gemm.cublaslt import CublasLtGemms, GemmShape
from hasten.kernels.ops.fused_linear import (
    LINEAR_TILE_CONFIGS,
    LinearTileConfig,
    Norm,
    Rotation,
    linear_residual,
    norm_linear_glu,
    norm_linear_rotary,
)
from hasten.kernels.ops.glu import gated_activation
from hasten.kernels.ops.rms_norm import add_and_sum_squares
from hasten.kernels.ops.rotary import Rotary, rotate

# The work that a GEMM can include.
ROTARY, GLU, RESIDUAL = "rotary", "glu", "residual"
# The name of the choice of cuBLASLt.
SEPARATE = "separate"
LINEAR_NAME = re.compile(rf"{SEPARATE}|{'|'.join(map(str, LINEAR_TILE_CONFIGS))}", re.ASCII)


class FusedLinears:
    """The choices for one model; shapes without one use `default`, None for cuBLASLt."""

    def __init__(self, cublaslt: CublasLtGemms | None, dtype: Any, activation: str, eps: float, rotary: Rotary) -> None:
        self.default: LinearTileConfig | None = None
        self._cublaslt, self._dtype, self._rotary = cublaslt, dtype, rotary
        self._activation, self._eps = activation, eps
        self._chosen: dict[GemmShape, LinearTileConfig | None] = {}

    def choose(self, names: Mapping[GemmShape, str]) -> None:
        """Use these choices, which tuning has measured, from now on."""
        self._chosen = {
            shape: None if name == SEPARATE else LinearTileConfig.parse(name) for shape, name in names.items()
        }

    def tile_config(self, shape: GemmShape) -> LinearTileConfig | None:
        """Return the tiles of a fused GEMM, or None for cuBLASLt with separate kernels."""
        return self._chosen.get(shape, self.default)

    def fastest(self, shape: GemmShape, measure_seconds: Callable[[Callable[[], Any]], float]) -> str:
        """Return the choice that takes the fewest seconds on random operands."""
        launches = self.launches(shape)
        return min(launches, key=lambda name: measure_seconds(launches[name]))

    def launches(self, shape: GemmShape) -> dict[str, Callable[[], Any]]:
        """Return by choice a function that runs a GEMM with the work around it on random operands."""
        rotary = self._rotary
        device = rotary.table.device
        x, weight = (
            torch.randn(sides, shape.depth, device=device).to(self._dtype) for sides in (shape.rows, shape.columns)
        )
        multiply = partial(torch.mm, x, weight.T) if self._cublaslt is None else partial(self._cublaslt, x, weight)
        square_sums = torch.full((shape.rows,), float(shape.depth), device=device)
        norm, kind = Norm(square_sums, self._eps), self._activation
        positions = torch.arange(shape.rows, dtype=torch.int32, device=device) % len(rotary.table)
        residual = torch.randn(shape.rows, shape.columns, device=device).to(self._dtype)

        def separate() -> Any:
            if shape.epilogue == ROTARY:
                return rotate(multiply(), positions, rotary)
            if shape.epilogue == GLU:
                return gated_activation(multiply(), kind)
            return add_and_sum_squares(multiply(), residual, square_sums)

        def fused(tile_config: LinearTileConfig) -> Any:
            if shape.epilogue == ROTARY:
                return norm_linear_rotary(x, weight, norm, Rotation(positions, rotary), tile_config)
            if shape.epilogue == GLU:
                return norm_linear_glu(x, weight, norm, kind, tile_config)
            return linear_residual(x, weight, residual, square_sums, tile_config)

        return {SEPARATE: separate} | {str(config): partial(fused, config) for config in LINEAR_TILE_CONFIGS}
