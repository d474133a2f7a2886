"""A pre-norm encoder with rotary positions, gated feed-forward blocks and windowed layers (ModernBERT).

Its weights are transformed when they are read (see `modernbert.py`) so that a norm is a factor per row, and rotation
and gating work on adjacent columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch

from hasten.kernels.encoder_base import PackedBatch, PackedEncoder
from hasten.kernels.gemm.cublaslt import GemmShape
from hasten.kernels.ops.attention import attention, tile_config_for, windowed
from hasten.kernels.ops.attention_out_proj import attention_out_proj
from hasten.kernels.ops.embed_norm import embed_norm
from hasten.kernels.ops.glu import gated_activation
from hasten.kernels.ops.linear_accumulate import linear_accumulate
from hasten.kernels.ops.norm import layer_norm
from hasten.kernels.ops.rms_linear import rms_linear
from hasten.kernels.ops.rms_norm import rms_norm
from hasten.kernels.ops.rotary import Rotary, Rotation, rotate
from hasten.kernels.ops.small_batch import Tile


@dataclass(frozen=True, slots=True)
class PreNormGeometry:
    """The hyperparameters of a pre-norm encoder."""

    layers: int
    width: int
    heads: int
    # Gated: the first linear layer of a feed-forward block has twice as many outputs.
    inner: int
    eps: float
    activation: str
    # How far apart a query and its keys may be in layers that are not global, and which layers are.
    window: int
    global_layers: tuple[int, ...]
    # The rotary bases of both kinds of layers, and the number of positions.
    global_theta: float
    local_theta: float
    positions: int

    @property
    def position_offset(self) -> int:
        """Return where positions begin."""
        return 0


# By the largest number of tokens: the tiles of the kernels qkv, attention, up and down.
_TILES = {
    16: (Tile(16, 64, 8), Tile(16, 128, 4), Tile(16, 64, 4), Tile(16, 64, 4, 128)),
    32: (Tile(16, 64, 8), Tile(16, 128, 4), Tile(16, 64, 4), Tile(16, 32, 4, 128)),
    64: (Tile(32, 64, 8), Tile(16, 256, 4), Tile(32, 64, 8), Tile(64, 64, 8, 128)),
}
# The smallest side of a tile that tensor cores support.
_MIN_SIDE = 16
_LINEARS = ("qkv", "out", "up", "down")


class PreNormEncoder(PackedEncoder):
    """A pre-norm encoder with its weights on the device."""

    geometry: PreNormGeometry

    def __init__(self, geometry: PreNormGeometry, weights: Mapping[str, Any], **options: Any) -> None:
        super().__init__(geometry, weights, **options)
        embeddings = weights["word_embeddings"]
        self._global_rotary, self._local_rotary = (
            Rotary.of(theta, geometry.positions, geometry.width // geometry.heads, embeddings.device, embeddings.dtype)
            for theta in (geometry.global_theta, geometry.local_theta)
        )

    def small_batch(self, batch: PackedBatch) -> Any:
        """Return the hidden states of a small batch: four kernels per layer, and a residual in fp32."""
        geometry, weights, use_pdl = self.geometry, self._weights, self.use_pdl
        tokens, device, dtype = batch.ids.shape[0], batch.ids.device, weights["word_embeddings"].dtype
        qkv_tile, attention_tile, up_tile, down_tile = next(
            tiles for max_tokens, tiles in self._tiles.items() if tokens <= max_tokens
        )
        qkv = torch.empty((tokens, 3 * geometry.width), dtype=dtype, device=device)
        inner = torch.empty((tokens, geometry.inner), dtype=dtype, device=device)
        x, total = embed_norm(
            batch.ids, weights["word_embeddings"], weights["embedding_norm.weight"], geometry.eps, dtype=torch.float32
        )
        for layer in range(geometry.layers):
            # The embeddings are normalized already.
            eps = geometry.eps if layer else None
            rms_linear(
                total if layer else x, eps, weights[f"{layer}.qkv.weight"], qkv, self._rotation(batch, layer), None,
                *self._weight_quant(f"{layer}.qkv"), tile=qkv_tile, use_pdl=use_pdl,
            )  # fmt: skip
            # The window holds the whole batch (see `_small_batch_limit`).
            attention_out_proj(
                qkv, batch.sequence, weights[f"{layer}.out.weight"], total, geometry.heads, None,
                *self._weight_quant(f"{layer}.out"), tile=attention_tile, use_pdl=use_pdl,
            )  # fmt: skip
            rms_linear(
                total, geometry.eps, weights[f"{layer}.up.weight"], inner, None, geometry.activation,
                *self._weight_quant(f"{layer}.up"), tile=up_tile, use_pdl=use_pdl,
            )  # fmt: skip
            linear_accumulate(
                inner, weights[f"{layer}.down.weight"], total, *self._weight_quant(f"{layer}.down"),
                tile=down_tile, use_pdl=use_pdl,
            )  # fmt: skip
        return self._final_norm(total, use_pdl=use_pdl)

    def large_batch(self, batch: PackedBatch, rows: Any | None = None) -> Any:
        """Return the hidden states of a batch of any size; with `rows`, of those tokens only."""
        geometry, weights = self.geometry, self._weights
        # The first layer has the norm of the embeddings only.
        x, residual = embed_norm(
            batch.ids, weights["word_embeddings"], weights["embedding_norm.weight"], geometry.eps,
            self._quants.get("0.qkv"),
        )  # fmt: skip
        for layer in range(geometry.layers):
            is_last = layer == geometry.layers - 1
            qkv = self._linear(x, f"{layer}.qkv")
            rotate(qkv, self._rotation(batch, layer))
            if rows is None or not is_last:
                context = self._attend(qkv, batch, layer)
            else:
                # Unused sequences of the bucket start behind the last token.
                rows = rows.clamp(max=len(residual) - 1)
                context = self._attend_rows(qkv, batch, rows, f"{layer}.out", self._window(layer))
                residual = residual[rows]
            y = self._linear(context, f"{layer}.out")
            x, residual = rms_norm(y, residual, geometry.eps, self._quants.get(f"{layer}.up"))
            up = self._linear(x, f"{layer}.up")
            inner = gated_activation(up, geometry.activation, self._quants.get(f"{layer}.down"))
            y = self._linear(inner, f"{layer}.down")
            if not is_last:
                x, residual = rms_norm(y, residual, geometry.eps, self._quants.get(f"{layer + 1}.qkv"))
        return self._final_norm(y, residual)

    def gemm_shapes(self, tokens: int) -> list[GemmShape]:
        """Return the distinct GEMMs of all layers, as `large_batch` runs them."""
        shapes: dict[GemmShape, None] = {}
        for layer in range(self.geometry.layers):
            for name in _LINEARS:
                columns, depth = self._weights[f"{layer}.{name}.weight"].shape
                shapes[GemmShape(tokens, columns, depth, input_dtype=self._dtype_of(f"{layer}.{name}"))] = None
        return list(shapes)

    def _small_batch_limit(self, shared_bytes: int | None) -> int:
        geometry = self.geometry
        head_size = geometry.width // geometry.heads
        self._tiles = {}
        if head_size & (head_size - 1) or head_size < 16 or geometry.width > 1024:
            return 0
        block = 1 << (geometry.width - 1).bit_length()
        for max_tokens, (qkv, out, up, down) in _TILES.items():
            fitted = (
                replace(qkv, columns=gcd(qkv.columns, 3 * geometry.width)),
                out,
                replace(up, columns=gcd(up.columns, 2 * geometry.inner)),
                replace(down, columns=gcd(down.columns, geometry.width), depth=gcd(down.depth, geometry.inner)),
            )
            loaded = [(block, fitted[0]), (block, fitted[2]), (fitted[3].depth, fitted[3])]
            needed_bytes = max(2 * depth * (tile.rows + tile.columns) for depth, tile in loaded)
            is_wide = min(min(tile.columns, depth) for depth, tile in loaded) >= _MIN_SIDE
            fits_memory = shared_bytes is None or needed_bytes <= shared_bytes
            # The small-batch attention has no window: all tokens must be within it.
            if is_wide and fits_memory and max_tokens <= geometry.window + 1:
                self._tiles[max_tokens] = fitted
        return max(self._tiles, default=0)

    def _attend(self, qkv: Any, batch: PackedBatch, layer: int) -> Any:
        tile_config = tile_config_for(batch.ids.shape[0], batch.starts.shape[0] - 1)
        window, quant = self._window(layer), self._quants.get(f"{layer}.out")
        part = tile_config if window is None else windowed(tile_config)
        return attention(
            qkv, batch.tiles, self.geometry.heads, None, quant,
            window=window, tile_config=part, parts=tile_config.rows // part.rows,
        )  # fmt: skip

    def _final_norm(self, x: Any, residual: Any | None = None, *, use_pdl: bool = False) -> Any:
        weight, bias = (self._weights[f"final_norm.{part}"] for part in ("weight", "bias"))
        return layer_norm(x, weight, bias, self.geometry.eps, None, residual, use_pdl=use_pdl)[0]

    def _rotation(self, batch: PackedBatch, layer: int) -> Rotation:
        is_global = layer in self.geometry.global_layers
        return Rotation(batch.positions, self._global_rotary if is_global else self._local_rotary)

    def _window(self, layer: int) -> int | None:
        return None if layer in self.geometry.global_layers else self.geometry.window
