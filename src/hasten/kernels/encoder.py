"""A BERT-style (post-norm) encoder over packed tokens, with one implementation for small and one for large batches.

Large batches multiply 8-bit activations with 8-bit weights: the kernel that computes an activation also writes it
quantized, or only quantized. Small batches are limited by reading weights, so only the weights are 8-bit there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hasten.kernels.encoder_base import PackedBatch, PackedEncoder
from hasten.kernels.gemm.cublaslt import GemmOperands, GemmShape
from hasten.kernels.ops.activation import TANH, activate
from hasten.kernels.ops.attention import attention, tile_config_for
from hasten.kernels.ops.attention_out_proj import attention_out_proj
from hasten.kernels.ops.embed import embed
from hasten.kernels.ops.linear_accumulate import linear_accumulate
from hasten.kernels.ops.norm import layer_norm
from hasten.kernels.ops.norm_linear import norm_linear
from hasten.kernels.ops.quantize import ActivationQuant
from hasten.kernels.ops.small_batch import Tile


@dataclass(frozen=True, slots=True)
class Geometry:
    """The hyperparameters of an encoder."""

    layers: int
    width: int
    heads: int
    inner: int
    eps: float
    activation: str
    # RoBERTa numbers positions from behind its padding token's id.
    position_offset: int = 0
    # Whether all layers share their weights, as in ALBERT.
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class LayerTiles:
    """The tiles of the four small-batch kernels of a layer."""

    qkv: Tile
    attention: Tile
    up: Tile
    down: Tile

    def fits(self, geometry: Geometry, shared_bytes: int | None) -> bool:
        """Return whether the tiles divide the model's sizes and fit into the GPU's shared memory."""
        head_size = geometry.width // geometry.heads
        divide_columns = 3 * geometry.width % self.qkv.columns == geometry.inner % self.up.columns == 0
        divide_down = geometry.width % self.down.columns == geometry.inner % self.down.depth == 0
        block = 1 << (geometry.width - 1).bit_length()
        loaded = [(block, self.qkv), (block, self.up), (self.down.depth, self.down)]
        needed_bytes = max(2 * depth * (tile.rows + tile.columns) for depth, tile in loaded)
        fits_memory = shared_bytes is None or needed_bytes <= shared_bytes
        is_supported = head_size & (head_size - 1) == 0 and head_size >= 16 and geometry.width <= 1024
        return divide_columns and divide_down and fits_memory and is_supported


# Keyed by the largest number of tokens they serve; measured on an H200, narrow with MiniLM-L6, wide with RoBERTa-base.
_NARROW = {
    16: LayerTiles(Tile(16, 64, 8), Tile(16, 64, 4), Tile(16, 16, 4), Tile(16, 32, 4, 64)),
    32: LayerTiles(Tile(16, 128, 4), Tile(16, 128, 4), Tile(16, 128, 8), Tile(32, 32, 8, 128)),
    64: LayerTiles(Tile(16, 128, 8), Tile(64, 64, 4), Tile(16, 128, 8), Tile(64, 64, 8, 128)),
    128: LayerTiles(Tile(16, 128, 4), Tile(64, 64, 4), Tile(16, 128, 8), Tile(64, 128, 8, 256)),
}
_WIDE = {
    16: LayerTiles(Tile(16, 64, 8), Tile(16, 128, 4), Tile(16, 64, 4), Tile(16, 64, 4, 256)),
    32: LayerTiles(Tile(16, 64, 8), Tile(16, 128, 4), Tile(16, 64, 4), Tile(16, 32, 4, 512)),
    64: LayerTiles(Tile(32, 64, 8), Tile(16, 256, 4), Tile(32, 64, 8), Tile(64, 64, 8, 512)),
}


class Encoder(PackedEncoder):
    """A post-norm encoder with its weights on the device."""

    geometry: Geometry

    def __init__(self, geometry: Geometry, weights: Mapping[str, Any], **options: Any) -> None:
        super().__init__(geometry, weights, **options)
        # The index of each layer's weights; layers that share weights use those of layer 0.
        self._layers = [0] * geometry.layers if geometry.is_shared else range(geometry.layers)

    def _small_batch_limit(self, shared_bytes: int | None) -> int:
        table = _NARROW if self.geometry.width < 512 else _WIDE
        has_small_kernels = "embedding_projection.weight" not in self._weights
        self._layer_tiles = {
            max_tokens: tiles
            for max_tokens, tiles in table.items()
            if has_small_kernels and tiles.fits(self.geometry, shared_bytes)
        }
        return max(self._layer_tiles, default=0)

    def small_batch(self, batch: PackedBatch) -> Any:
        """Return the hidden states of a small batch: four kernels per layer, accumulating in fp32."""
        geometry, weights, use_pdl = self.geometry, self._weights, self.use_pdl
        tokens, device, dtype = batch.ids.shape[0], batch.ids.device, weights["word_embeddings"].dtype
        tiles = next(tiles for max_tokens, tiles in self._layer_tiles.items() if tokens <= max_tokens)
        qkv = torch.empty((tokens, 3 * geometry.width), dtype=dtype, device=device)
        inner = torch.empty((tokens, geometry.inner), dtype=dtype, device=device)
        attention_total = torch.empty((tokens, geometry.width), dtype=torch.float32, device=device)
        total = torch.empty_like(attention_total)
        self._embed(batch, None, total)
        norm = "embedding_norm"
        for layer in self._layers:
            norm_linear(
                total, *self._norm(norm), weights[f"{layer}.qkv.weight"], weights[f"{layer}.qkv.bias"],
                weights[f"{layer}.out.bias"], qkv, attention_total, None, *self._weight_quant(f"{layer}.qkv"),
                tile=tiles.qkv, use_pdl=use_pdl,
            )  # fmt: skip
            attention_out_proj(
                qkv, batch.sequence, weights[f"{layer}.out.weight"], attention_total, geometry.heads,
                weights.get("relative_position_bias"), *self._weight_quant(f"{layer}.out"),
                tile=tiles.attention, use_pdl=use_pdl,
            )  # fmt: skip
            norm_linear(
                attention_total, *self._norm(f"{layer}.attention_norm"),
                weights[f"{layer}.up.weight"], weights[f"{layer}.up.bias"], weights[f"{layer}.down.bias"],
                inner, total, geometry.activation, *self._weight_quant(f"{layer}.up"), tile=tiles.up, use_pdl=use_pdl,
            )  # fmt: skip
            linear_accumulate(
                inner, weights[f"{layer}.down.weight"], total, *self._weight_quant(f"{layer}.down"),
                tile=tiles.down, use_pdl=use_pdl,
            )  # fmt: skip
            norm = f"{layer}.output_norm"
        return layer_norm(total, *self._norm(norm), use_pdl=use_pdl)[0]

    def large_batch(self, batch: PackedBatch, rows: Any | None = None) -> Any:
        """Return the hidden states of a batch of any size: GEMMs by cuBLAS, and our kernels between them.

        With `rows`, return the states of those tokens only, which saves most of the last layer.
        """
        geometry, position_bias = self.geometry, self._weights.get("relative_position_bias")
        tile_config = tile_config_for(batch.ids.shape[0], batch.starts.shape[0] - 1)
        # The residual, and the input of the next GEMM, which may be quantized.
        x, gemm_input = self._embed_large(batch)
        for index, layer in enumerate(self._layers):
            is_last = index == geometry.layers - 1
            qkv = self._linear(gemm_input, f"{layer}.qkv", has_bias=True)
            if rows is None or not is_last:
                quant = self._quants.get(f"{layer}.out")
                context = attention(qkv, batch.tiles, geometry.heads, position_bias, quant, tile_config=tile_config)
            else:
                # Unused sequences of the bucket start behind the last token.
                rows = rows.clamp(max=x.shape[0] - 1)
                context, x = self._attend_rows(qkv, batch, rows, f"{layer}.out"), x[rows]
            projected = self._linear(context, f"{layer}.out")
            x, gemm_input = self._add_norm(projected, x, f"{layer}.out", f"{layer}.attention_norm", f"{layer}.up")
            inner = self._linear(self._linear_gelu(gemm_input, f"{layer}.up", f"{layer}.down"), f"{layer}.down")
            next_linear = "" if is_last else f"{self._layers[index + 1]}.qkv"
            x, gemm_input = self._add_norm(inner, x, f"{layer}.down", f"{layer}.output_norm", next_linear)
        return x

    def _embed_large(self, batch: PackedBatch) -> tuple[Any, Any]:
        weights, quant = self._weights, self._quants.get("0.qkv")
        norm = self._norm("embedding_norm")
        if "embedding_projection.weight" not in weights:
            return self._embed(batch, norm, quant=quant)
        x, _ = self._embed(batch, norm)
        x = torch.addmm(weights["embedding_projection.bias"], x, weights["embedding_projection.weight"].T)
        return x, x if quant is None else activate(x, None, quant)

    def gemm_shapes(self, tokens: int) -> list[GemmShape]:
        """Return the distinct GEMMs of all layers, as `large_batch` runs them."""
        width, inner, is_tanh = self.geometry.width, self.geometry.inner, self.geometry.activation == TANH
        sizes = {"qkv": (3 * width, width), "out": (width, width), "up": (inner, width), "down": (width, inner)}
        shapes = {}
        for layer in dict.fromkeys(self._layers):
            for name, (columns, depth) in sizes.items():
                input_dtype, output_dtype = (self._dtype_of(f"{layer}.{linear}") for linear in (name, "down"))
                is_up = name == "up"
                # In half precision, GELU is fused where cuBLAS can, unless its output is to be quantized.
                has_gelu = is_up and (bool(input_dtype) or (is_tanh and not output_dtype))
                output_dtype = output_dtype if input_dtype and is_up else ""
                has_bias = name in ("qkv", "up")
                shapes[GemmShape(tokens, columns, depth, has_bias, has_gelu, input_dtype, output_dtype)] = name
        return list(shapes)

    def _linear_gelu(self, x: Any, name: str, next_linear: str) -> Any:
        """Fuse GELU into the GEMM where possible; cuBLAS has the tanh approximation only, and cannot quantize fp16."""
        kind, quant = self.geometry.activation, self._quants.get(next_linear)
        if name in self._quants:
            weight, scale, bias = (self._weights[f"{name}.{part}"] for part in ("weight", "scale", "bias"))
            return self.gemm_dispatch(GemmOperands(x, weight, scale, bias, quant), has_gelu=True)
        if self.cublaslt is not None and kind == TANH and quant is None:
            return self._linear(x, name, has_bias=True, has_gelu=True)
        return activate(self._linear(x, name, has_bias=True), kind, quant)

    def _embed(
        self, batch: PackedBatch, norm: Any | None, out: Any | None = None, quant: ActivationQuant | None = None
    ) -> tuple[Any, Any]:
        words, positions, token_types = (
            self._weights.get(f"{name}_embeddings") for name in ("word", "position", "token_type")
        )
        # Between cuBLAS kernels, programmatic dependent launch costs more than it gains.
        use_pdl = self.use_pdl and norm is None
        return embed(
            batch.ids, batch.positions, batch.token_types, words, positions, token_types, norm, out, quant,
            use_pdl=use_pdl,
        )  # fmt: skip

    def _add_norm(self, x: Any, residual: Any, linear: str, norm: str, next_linear: str) -> tuple[Any, Any]:
        bias, quant = self._weights[f"{linear}.bias"], self._quants.get(next_linear)
        return layer_norm(x, *self._norm(norm), bias, residual, quant)

    def _norm(self, name: str) -> tuple[Any, Any, float]:
        return self._weights[f"{name}.weight"], self._weights[f"{name}.bias"], self.geometry.eps
