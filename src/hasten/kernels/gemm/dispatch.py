"""Dispatch 8-bit GEMMs to cuBLASLt, `torch._scaled_mm` or our Triton kernel, whichever tuning found fastest.

A GEMM backend has a name that tuning stores: `cublaslt` with the number of a candidate, `torch`, or `triton` with one
of our tile configurations. The epilogue (GELU, quantization) is part of the backend, since some can fuse it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hasten.core.errors import StageError
from hasten.kernels.gemm.cublaslt import CublasLtGemms, GemmOperands, GemmShape, random_operands
from hasten.kernels.ops.activation import TANH, activate
from hasten.kernels.ops.gemm import DEFAULT_TILES, TILE_CONFIGS, TileConfig, gemm
from hasten.kernels.ops.quantize import FP8

CUBLASLT, TORCH, TRITON = "cublaslt", "torch", "triton"
BACKEND_NAME = re.compile(rf"{CUBLASLT}( \d\d?)?|{TORCH}|{TRITON}( ({'|'.join(map(str, TILE_CONFIGS))}))?", re.ASCII)


class GemmDispatch:
    """The 8-bit GEMMs of one model with its kind of GELU; without `cublaslt`, which needs a GPU, all run in Triton."""

    def __init__(self, gelu_kind: str, dtype: Any, cublaslt: CublasLtGemms | None = None) -> None:
        self._gelu_kind, self._dtype, self._cublaslt = gelu_kind, dtype, cublaslt
        self._fast_accum = cublaslt is not None and cublaslt.fast_accum
        self._chosen: dict[GemmShape, str] = {}
        self._unit_scale: Any = None

    def __call__(self, operands: GemmOperands, *, has_gelu: bool = False) -> Any:
        """Return x · weightᵀ · scale + bias, or GELU of it, quantized or in half precision."""
        x, scale, quant = operands.x, operands.scale, operands.quant
        (rows, depth), columns = x.shape, operands.weight.shape[0]
        has_bias, output_dtype = operands.bias is not None, _dtype_name(quant.dtype) if quant is not None else ""
        shape = GemmShape(rows, columns, depth, has_bias, has_gelu, _dtype_name(x.dtype), output_dtype)
        is_cublaslt_default = self._cublaslt is not None and x.dtype == FP8 and scale is not None and scale.numel() == 1
        backend = self._chosen.get(shape) or (CUBLASLT if is_cublaslt_default else TRITON)
        try:
            return self.run(backend, shape, operands)
        except StageError:
            if not backend.startswith(CUBLASLT):
                raise
            # cuBLASLt does not support this shape: do not try it again.
            self._chosen[shape] = _fallback(shape)
            return self.run(self._chosen[shape], shape, operands)

    def choose(self, backends: Mapping[GemmShape, str]) -> None:
        """Use these backends, which tuning has measured, from now on."""
        self._chosen = dict(backends)

    def candidates(self, shape: GemmShape) -> list[str]:
        """Return the names of all backends for a GEMM."""
        triton = [f"{TRITON} {tile_config}" for tile_config in TILE_CONFIGS]
        if shape.input_dtype != _dtype_name(FP8) or self._cublaslt is None:
            return triton
        try:
            candidates = self._cublaslt.candidates(self._cublaslt_shape(shape))
        except StageError:
            return [TORCH, *triton] if _fallback(shape) == TORCH else triton
        return [*(f"{CUBLASLT} {candidate}" for candidate in candidates), *triton]

    def fastest(self, shape: GemmShape, measure_seconds: Callable[[Callable[[], Any]], float]) -> str:
        """Return the backend that takes the fewest seconds on random operands."""
        operands = random_operands(shape, self._dtype, "cuda")
        return min(
            self.candidates(shape), key=lambda backend: measure_seconds(partial(self.run, backend, shape, operands))
        )

    def run(self, backend: str, shape: GemmShape, operands: GemmOperands) -> Any:
        """Run a GEMM on the named backend."""
        name, _, detail = backend.partition(" ")
        gelu_kind = self._gelu_kind if shape.has_gelu else None
        x, weight, scale, bias = operands.x, operands.weight, operands.scale, operands.bias
        if name == TRITON:
            return gemm(
                x, weight, scale, bias, dtype=self._dtype, gelu_kind=gelu_kind, quant=operands.quant,
                tile_config=TileConfig.parse(detail) if detail else DEFAULT_TILES, fast_accum=self._fast_accum,
            )  # fmt: skip
        if name == TORCH:
            if self._unit_scale is None:
                self._unit_scale = torch.ones_like(scale)
            y = torch._scaled_mm(
                x, weight.T, scale_a=self._unit_scale, scale_b=scale, bias=bias, out_dtype=self._dtype,
                use_fast_accum=self._fast_accum,
            )  # fmt: skip
            return y if gelu_kind is None else activate(y, gelu_kind, operands.quant)
        assert self._cublaslt is not None
        fused = self._cublaslt_shape(shape)
        fused_operands = operands if fused.output_dtype else replace(operands, quant=None)
        y = self._cublaslt.run(fused, fused_operands, int(detail) if detail else None)
        return y if gelu_kind is None or fused.has_gelu else activate(y, gelu_kind, operands.quant)

    def _cublaslt_shape(self, shape: GemmShape) -> GemmShape:
        """Return the part that cuBLASLt computes: it fuses the tanh approximation of GELU, but not the exact one."""
        can_fuse = self._gelu_kind == TANH or not shape.has_gelu
        return shape if can_fuse else replace(shape, has_gelu=False, output_dtype="")


def _fallback(shape: GemmShape) -> str:
    """Return the backend for shapes without a cuBLASLt algorithm.

    PyTorch calls cuBLASLt with other settings, and supports only sides that are multiples of 16.
    """
    return TRITON if shape.columns % 16 or shape.depth % 16 else TORCH


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
