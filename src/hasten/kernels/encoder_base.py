"""Parts that encoders over packed tokens share: the batch, the weights, and the dispatch of their GEMMs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hasten.kernels.gemm.cublaslt import CublasLtGemms, GemmOperands, GemmShape
from hasten.kernels.gemm.dispatch import GemmDispatch
from hasten.kernels.ops.attention import SINGLE_ROW_TILE_CONFIG, attention
from hasten.kernels.ops.quantize import ActivationQuant


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A padding-free batch on the device: id, position and token type per token, and the bounds of the sequences."""

    ids: Any
    positions: Any
    token_types: Any
    # The sequence of each token; −1 past the end.
    sequence: Any
    # The first token of each sequence, then the end of the last one.
    starts: Any
    # From `attention.query_tiles`, for `attention.tile_config_for`.
    tiles: Any


class PackedEncoder(ABC):
    """An encoder with its weights on the device.

    `use_pdl` lets kernels overlap (Hopper and newer), `cublaslt` is needed on a GPU, and `shared_bytes` is the shared
    memory that one program may use there.
    """

    geometry: Any

    def __init__(
        self,
        geometry: Any,
        weights: Mapping[str, Any],
        *,
        use_pdl: bool = False,
        cublaslt: CublasLtGemms | None = None,
        shared_bytes: int | None = None,
    ) -> None:
        self.geometry = geometry
        self._weights = weights
        self.use_pdl = use_pdl
        self.cublaslt = cublaslt
        suffix = ".inverse_scales"
        quantized = [name.removesuffix(suffix) for name in weights if name.endswith(suffix)]
        self._quants = {
            name: ActivationQuant(weights[f"{name}{suffix}"], weights[f"{name}.weight"].dtype) for name in quantized
        }
        dtype = weights["word_embeddings"].dtype if weights else None
        self.gemm_dispatch = GemmDispatch(geometry.activation, dtype, cublaslt)
        # Receives the name and the input of each GEMM of a large batch, for calibration.
        self.observe: Callable[[str, Any], None] | None = None
        # The largest batch the small-batch kernels support, and the largest for which they are used (see tuning).
        self.small_batch_limit = self.small_batch_max_tokens = self._small_batch_limit(shared_bytes)

    def __call__(self, batch: PackedBatch) -> Any:
        is_small = batch.ids.shape[0] <= self.small_batch_max_tokens
        return self.small_batch(batch) if is_small else self.large_batch(batch)

    @abstractmethod
    def small_batch(self, batch: PackedBatch) -> Any:
        """Return the hidden states of a batch of up to `small_batch_limit` tokens, accumulated in fp32."""

    @abstractmethod
    def large_batch(self, batch: PackedBatch, rows: Any | None = None) -> Any:
        """Return the hidden states of a batch of any size.

        With `rows`, return the states of those tokens only, which saves most of the last layer.
        """

    @abstractmethod
    def gemm_shapes(self, tokens: int) -> list[GemmShape]:
        """Return the distinct GEMMs of all layers, as `large_batch` runs them."""

    @abstractmethod
    def _small_batch_limit(self, shared_bytes: int | None) -> int:
        """Return the most tokens that the small-batch kernels support; 0 if they do not support the model."""

    def _attend_rows(self, qkv: Any, batch: PackedBatch, rows: Any, next_linear: str, window: int | None = None) -> Any:
        """Compute attention for these query rows only, over all keys of their sequences."""
        sequence = batch.sequence[rows]
        tiles = torch.stack([rows, batch.starts[sequence], batch.starts[sequence + 1]], dim=1)
        quant, position_bias = self._quants.get(next_linear), self._weights.get("relative_position_bias")
        context = attention(
            qkv, tiles, self.geometry.heads, position_bias, quant, window=window, tile_config=SINGLE_ROW_TILE_CONFIG
        )
        # PyTorch cannot index fp8 tensors: view them as bytes.
        return context[rows] if quant is None else context.view(torch.uint8)[rows].view(quant.dtype)

    def _linear(self, x: Any, name: str, *, has_bias: bool = False, has_gelu: bool = False) -> Any:
        if self.observe is not None:
            self.observe(name, x)
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"] if has_bias else None
        if name in self._quants:
            return self.gemm_dispatch(GemmOperands(x, weight, self._weights[f"{name}.scale"], bias))
        if self.cublaslt is not None:
            return self.cublaslt(x, weight, bias, has_gelu=has_gelu)
        return torch.mm(x, weight.T) if bias is None else torch.addmm(bias, x, weight.T)

    def _dtype_of(self, name: str) -> str:
        quant = self._quants.get(name)
        return "" if quant is None else str(quant.dtype).removeprefix("torch.")

    def _weight_quant(self, name: str) -> tuple[Any, ActivationQuant | None]:
        """Return the scale and activation quantization that belong to an 8-bit weight."""
        return self._weights.get(f"{name}.scale"), self._quants.get(name)
