"""A whole encoder in BERT's order, over packed tokens: two ways through it, one for many tokens and one for few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hasten.kernels.activation import bias_gelu
from hasten.kernels.attend import attend
from hasten.kernels.attention import attention
from hasten.kernels.contract import contract
from hasten.kernels.embed import embed
from hasten.kernels.expand import expand
from hasten.kernels.norm import layer_norm

# Tokens a program of attention asks for; `attention.tiles` must be told the same.
TILE = 64
# Where only some tokens ask, each in a tile of its own: the fewest rows that tensor cores take.
_ONE = 16


@dataclass(frozen=True, slots=True)
class Geometry:
    """What is not a tensor."""

    layers: int
    width: int
    heads: int
    inner: int
    eps: float
    activation: str
    # RoBERTa counts places from behind its padding token.
    first_place: int = 0
    # Whether all layers are the same one, as ALBERT's.
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class Packed:
    """A batch on the device: of each token its word, its place and its kind; and how tokens make sequences."""

    ids: Any
    places: Any
    kinds: Any
    # Of each token the sequence, none twice; past the end −1.
    sequence: Any
    # Of each sequence the first token, and behind the last one the end.
    starts: Any
    # From `attention.tiles`.
    tiles: Any


@dataclass(frozen=True, slots=True)
class _Steps:
    """How the four kernels for few tokens are cut, and up to how many they win: found by measuring on an H200."""

    most_tokens: int
    qkv: tuple[int, int]
    up: tuple[int, int]
    attend: tuple[int, int]
    down: tuple[int, int, int]


_NARROW = _Steps(128, qkv=(64, 8), up=(16, 4), attend=(64, 4), down=(32, 64, 4))
_WIDE = _Steps(64, qkv=(64, 8), up=(64, 8), attend=(128, 4), down=(64, 512, 4))


class Encoder:
    """Its weights, on the device they compute on; `is_dependent` where kernels may overlap (Hopper and newer)."""

    def __init__(self, geometry: Geometry, weights: Mapping[str, Any], *, is_dependent: bool = False) -> None:
        self.geometry = geometry
        self._weights = weights
        self.is_dependent = is_dependent
        self._steps = _NARROW if geometry.width < 512 else _WIDE

    @property
    def few_tokens(self) -> int:
        """Up to how many the kernels for few take; none where its sides cannot be cut the way they want them."""
        shape, steps = self.geometry, self._steps
        size = shape.width // shape.heads
        divides = 3 * shape.width % steps.qkv[0] == shape.inner % 64 == 0
        cuts = shape.width % steps.down[0] == shape.inner % steps.down[1] == 0
        is_fitting = size & (size - 1) == 0 and size >= 16 and shape.width <= 1024
        is_able = divides and cuts and is_fitting and "project.weight" not in self._weights
        return steps.most_tokens if is_able else 0

    def __call__(self, batch: Packed) -> Any:
        return self.few(batch) if batch.ids.shape[0] <= self.few_tokens else self.many(batch)

    def few(self, batch: Packed) -> Any:
        """The hidden states of few tokens: four kernels a layer, sums in fp32."""
        shape, steps, weights, dependent = self.geometry, self._steps, self._weights, self.is_dependent
        tokens, device, dtype = batch.ids.shape[0], batch.ids.device, weights["words"].dtype
        rows = 16 if tokens <= 16 else 32
        # With several programs on the same columns, wide ones read the weights less often.
        up = steps.up if tokens <= 16 else (64, 8)
        qkv = torch.empty((tokens, 3 * shape.width), dtype=dtype, device=device)
        inner = torch.empty((tokens, shape.inner), dtype=dtype, device=device)
        between = torch.empty((tokens, shape.width), dtype=torch.float32, device=device)
        total = torch.empty_like(between)
        self._embed(batch, None, total)
        norm = "norm"
        for place in range(shape.layers):
            layer = self._layer(place)
            scale, shift = weights[f"{norm}.scale"], weights[f"{norm}.shift"]
            expand(
                total, scale, shift, shape.eps, weights[f"{layer}.qkv.weight"], weights[f"{layer}.qkv.bias"],
                weights[f"{layer}.out.bias"], qkv, between,
                rows=rows, columns=steps.qkv[0], warps=steps.qkv[1], is_dependent=dependent,
            )  # fmt: skip
            attend(
                qkv, batch.sequence, weights[f"{layer}.out.weight"], between, shape.heads, weights.get("distances"),
                rows=rows, columns=steps.attend[0], warps=steps.attend[1], is_dependent=dependent,
            )  # fmt: skip
            expand(
                between, weights[f"{layer}.middle.scale"], weights[f"{layer}.middle.shift"], shape.eps,
                weights[f"{layer}.up.weight"], weights[f"{layer}.up.bias"], weights[f"{layer}.down.bias"], inner, total,
                shape.activation, rows=rows, columns=up[0], warps=up[1], is_dependent=dependent,
            )  # fmt: skip
            contract(
                inner, weights[f"{layer}.down.weight"], total,
                rows=rows, columns=steps.down[0], depth=steps.down[1], warps=steps.down[2], is_dependent=dependent,
            )  # fmt: skip
            norm = f"{layer}.end"
        scale, shift = weights[f"{norm}.scale"], weights[f"{norm}.shift"]
        return layer_norm(total, scale, shift, shape.eps, is_dependent=dependent)

    def many(self, batch: Packed, rows: Any | None = None) -> Any:
        """The hidden states of any number of tokens: the products by cuBLAS, and three kernels between them.

        With `rows` those of the tokens it names alone, which spares most of the last layer.
        """
        shape, weights = self.geometry, self._weights
        x = self._embed(batch, (weights["norm.scale"], weights["norm.shift"], shape.eps), None)
        if "project.weight" in weights:
            x = torch.addmm(weights["project.bias"], x, weights["project.weight"].T)
        for place in range(shape.layers if rows is None else shape.layers - 1):
            layer = self._layer(place)
            qkv = torch.addmm(weights[f"{layer}.qkv.bias"], x, weights[f"{layer}.qkv.weight"].T)
            mixed = attention(qkv, batch.tiles, shape.heads, weights.get("distances"), rows=TILE)
            x = self._normed(torch.mm(mixed, weights[f"{layer}.out.weight"].T), x, f"{layer}.out", f"{layer}.middle")
            inner = torch.mm(x, weights[f"{layer}.up.weight"].T)
            bias_gelu(inner, weights[f"{layer}.up.bias"], shape.activation)
            x = self._normed(torch.mm(inner, weights[f"{layer}.down.weight"].T), x, f"{layer}.down", f"{layer}.end")
        return x if rows is None else self._last(batch, x, rows)

    def _last(self, batch: Packed, x: Any, rows: Any) -> Any:
        """The last layer of these rows: they look at all tokens of their sequences, and nobody looks at the others."""
        shape, weights, layer = self.geometry, self._weights, self._layer(self.geometry.layers - 1)
        # A sequence that there is room for, and none in, begins behind the last token.
        rows = rows.clamp(max=x.shape[0] - 1)
        qkv = torch.addmm(weights[f"{layer}.qkv.bias"], x, weights[f"{layer}.qkv.weight"].T)
        own = batch.sequence[rows]
        asking = torch.stack([rows, batch.starts[own], batch.starts[own + 1]], dim=1)
        mixed = attention(qkv, asking, shape.heads, weights.get("distances"), rows=_ONE)[rows]
        x = self._normed(torch.mm(mixed, weights[f"{layer}.out.weight"].T), x[rows], f"{layer}.out", f"{layer}.middle")
        inner = torch.mm(x, weights[f"{layer}.up.weight"].T)
        bias_gelu(inner, weights[f"{layer}.up.bias"], shape.activation)
        return self._normed(torch.mm(inner, weights[f"{layer}.down.weight"].T), x, f"{layer}.down", f"{layer}.end")

    def _embed(self, batch: Packed, norm: tuple[Any, Any, float] | None, out: Any | None) -> Any:
        words, places, kinds = (self._weights.get(name) for name in ("words", "places", "kinds"))
        # Between cuBLAS's kernels overlapping costs more than it gains.
        overlaps = self.is_dependent and norm is None
        return embed(batch.ids, batch.places, batch.kinds, words, places, kinds, norm, out, is_dependent=overlaps)

    def _normed(self, product: Any, residual: Any, bias: str, norm: str) -> Any:
        weights = self._weights
        scale, shift = weights[f"{norm}.scale"], weights[f"{norm}.shift"]
        return layer_norm(product, scale, shift, self.geometry.eps, weights[f"{bias}.bias"], residual)

    def _layer(self, place: int) -> int:
        return 0 if self.geometry.is_shared else place
