"""A pre-norm encoder with rotary positions, gated feed-forward blocks and windowed layers (ModernBERT).

Its weights are transformed when they are read (see `modernbert.py`) so that a norm is a factor per row, and rotation
and gating work on adjacent columns. A large batch then needs five kernels per layer: GEMMs that include the norm before
and the element-wise work behind them, or, where tuning finds it faster, cuBLASLt with separate kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch

from hasten.kernels.encoder_base import PackedBatch, PackedEncoder
from hasten.kernels.gemm.cublaslt import GemmShape
from hasten.kernels.gemm.fused_linear import GLU, RESIDUAL, ROTARY, FusedLinears
from hasten.kernels.ops.attention import attention, tile_config_for, windowed
from hasten.kernels.ops.attention_out_proj import attention_out_proj
from hasten.kernels.ops.embed_norm import embed_norm
from hasten.kernels.ops.fused_linear import (
    LinearTileConfig,
    Norm,
    Rotation,
    linear_residual,
    norm_linear_glu,
    norm_linear_rotary,
)
from hasten.kernels.ops.glu import gated_activation
from hasten.kernels.ops.linear_accumulate import linear_accumulate
from hasten.kernels.ops.norm import layer_norm
from hasten.kernels.ops.rms_linear import rms_linear
from hasten.kernels.ops.rms_norm import add_and_sum_squares, rms_norm
from hasten.kernels.ops.rotary import Rotary, rotate
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
_EPILOGUES = {"qkv": ROTARY, "out": RESIDUAL, "up": GLU, "down": RESIDUAL}


@dataclass(frozen=True, slots=True)
class _Stream:
    """The residual, and the input of the next GEMM: normalized, or to be normalized by that GEMM."""

    residual: Any
    gemm_input: Any
    norm: Norm | None = None


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
        self.fused_linears = FusedLinears(
            self.cublaslt, embeddings.dtype, geometry.activation, geometry.eps, self._global_rotary
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
        geometry, tokens = self.geometry, batch.ids.shape[0]
        stream = self._embed_large(batch)
        # Fused GEMMs add to the sums of squares of their rows.
        square_sums = torch.zeros((2 * geometry.layers, tokens), dtype=torch.float32, device=batch.ids.device)
        for layer in range(geometry.layers):
            is_last = layer == geometry.layers - 1
            qkv = self._qkv(stream, batch, layer)
            if rows is None or not is_last:
                context = self._attend(qkv, batch, layer)
            else:
                # Unused sequences of the bucket start behind the last token.
                rows = rows.clamp(max=tokens - 1)
                context = self._attend_rows(qkv, batch, rows, f"{layer}.out", self._window(layer))
                stream = replace(stream, residual=stream.residual[rows])
            stream = self._add(context, stream.residual, f"{layer}.out", f"{layer}.up", square_sums[2 * layer])
            inner = self._up(stream, layer)
            if not is_last:
                down, next_qkv = f"{layer}.down", f"{layer + 1}.qkv"
                stream = self._add(inner, stream.residual, down, next_qkv, square_sums[2 * layer + 1])
        return self._final_norm(self._linear(inner, f"{layer}.down"), stream.residual)

    def gemm_shapes(self, tokens: int) -> list[GemmShape]:
        """Return the distinct GEMMs of all layers as cuBLASLt runs them, then as they are fused."""
        shapes: dict[GemmShape, None] = {}
        for layer in range(self.geometry.layers):
            for name in _EPILOGUES:
                columns, depth = self._weights[f"{layer}.{name}.weight"].shape
                shapes[GemmShape(tokens, columns, depth, input_dtype=self._dtype_of(f"{layer}.{name}"))] = None
        fused = {
            self._fused_shape(tokens, f"{layer}.{name}"): None
            for layer in range(self.geometry.layers)
            for name in _EPILOGUES
            if self._can_fuse(f"{layer}.{name}")
        }
        return [*shapes, *fused]

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

    def _embed_large(self, batch: PackedBatch) -> _Stream:
        """Return the embeddings, whose norm is also that of the first layer: its factor is one."""
        geometry, weights, tokens = self.geometry, self._weights, batch.ids.shape[0]
        x, residual = embed_norm(
            batch.ids, weights["word_embeddings"], weights["embedding_norm.weight"], geometry.eps,
            self._quants.get("0.qkv"),
        )  # fmt: skip
        if self._tile_config(tokens, "0.qkv") is None:
            return _Stream(residual, x)
        square_sums = torch.full((tokens,), geometry.width * (1.0 - geometry.eps), device=x.device)
        return _Stream(residual, x, Norm(square_sums, geometry.eps))

    def _qkv(self, stream: _Stream, batch: PackedBatch, layer: int) -> Any:
        rotation, name = self._rotation(batch, layer), f"{layer}.qkv"
        if stream.norm is not None:
            tile_config = self._tile_config(len(stream.gemm_input), name)
            weight = self._weights[f"{name}.weight"]
            assert tile_config is not None
            return norm_linear_rotary(stream.gemm_input, weight, stream.norm, rotation, tile_config)
        qkv = self._linear(stream.gemm_input, name)
        rotate(qkv, rotation.positions, rotation.rotary)
        return qkv

    def _attend(self, qkv: Any, batch: PackedBatch, layer: int) -> Any:
        tile_config = tile_config_for(batch.ids.shape[0], batch.starts.shape[0] - 1)
        window, quant = self._window(layer), self._quants.get(f"{layer}.out")
        part = tile_config if window is None else windowed(tile_config)
        return attention(
            qkv, batch.tiles, self.geometry.heads, None, quant,
            window=window, tile_config=part, parts=tile_config.rows // part.rows,
        )  # fmt: skip

    def _up(self, stream: _Stream, layer: int) -> Any:
        name, kind = f"{layer}.up", self.geometry.activation
        if stream.norm is not None:
            tile_config = self._tile_config(len(stream.gemm_input), name)
            assert tile_config is not None
            return norm_linear_glu(stream.gemm_input, self._weights[f"{name}.weight"], stream.norm, kind, tile_config)
        return gated_activation(self._linear(stream.gemm_input, name), kind, self._quants.get(f"{layer}.down"))

    def _add(self, x: Any, residual: Any, linear: str, next_linear: str, square_sums: Any) -> _Stream:
        """Add a linear layer of x to the residual, and prepare the input of the next linear layer."""
        rows, eps = len(x), self.geometry.eps
        norm = Norm(square_sums[:rows], eps) if self._tile_config(rows, next_linear) is not None else None
        tile_config = self._tile_config(rows, linear)
        if tile_config is not None:
            weight, sums = self._weights[f"{linear}.weight"], None if norm is None else norm.square_sums
            total = linear_residual(x, weight, residual, sums, tile_config)
            if norm is None:
                return _Stream(*rms_norm(total, eps, None, self._quants.get(next_linear)))
            return _Stream(total, total, norm)
        y = self._linear(x, linear)
        if norm is None:
            return _Stream(*rms_norm(y, eps, residual, self._quants.get(next_linear)))
        total = add_and_sum_squares(y, residual, norm.square_sums)
        return _Stream(total, total, norm)

    def _final_norm(self, x: Any, residual: Any | None = None, *, use_pdl: bool = False) -> Any:
        weight, bias = (self._weights[f"final_norm.{part}"] for part in ("weight", "bias"))
        return layer_norm(x, weight, bias, self.geometry.eps, None, residual, use_pdl=use_pdl)[0]

    def _rotation(self, batch: PackedBatch, layer: int) -> Rotation:
        is_global = layer in self.geometry.global_layers
        return Rotation(batch.positions, self._global_rotary if is_global else self._local_rotary)

    def _window(self, layer: int) -> int | None:
        return None if layer in self.geometry.global_layers else self.geometry.window

    def _tile_config(self, tokens: int, name: str) -> LinearTileConfig | None:
        """Return the tiles of a GEMM that runs fused, or None."""
        if self.fused_linears is None or not self._can_fuse(name):
            return None
        return self.fused_linears.tile_config(self._fused_shape(tokens, name))

    def _can_fuse(self, name: str) -> bool:
        """Return whether the GEMM and its output are in half precision."""
        layer, _, kind = name.partition(".")
        return name not in self._quants and not (kind == "up" and f"{layer}.down" in self._quants)

    def _fused_shape(self, tokens: int, name: str) -> GemmShape:
        columns, depth = self._weights[f"{name}.weight"].shape
        return GemmShape(tokens, columns, depth, epilogue=_EPILOGUES[name.partition(".")[2]])
