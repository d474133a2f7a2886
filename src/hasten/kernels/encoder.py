"""A whole encoder in BERT's order, over packed tokens: two ways through it, one for many tokens and one for few.

A product whose weight is of eight bits takes eight bits where tokens are many; whoever computes its input writes that
in both forms, or in that one alone. Where they are few, only the weights are narrow: reading them is what takes time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hasten.kernels.activation import TANH, gelu_
from hasten.kernels.attend import attend
from hasten.kernels.attention import LONE, attention, cut_for
from hasten.kernels.contract import contract
from hasten.kernels.embed import embed
from hasten.kernels.expand import expand
from hasten.kernels.norm import layer_norm, layer_norms
from hasten.kernels.products import Product, Products
from hasten.kernels.roads import Roads
from hasten.kernels.squeeze import Squeeze, squeeze


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
    # From `attention.tiles`, by `attention.cut_for`.
    tiles: Any


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a kernel for few tokens is cut into programs, and the warps of each."""

    rows: int
    columns: int
    warps: int
    # Of a product whose depth is cut too.
    depth: int = 1


@dataclass(frozen=True, slots=True)
class _Steps:
    qkv: _Cut
    attend: _Cut
    up: _Cut
    down: _Cut

    def fits(self, shape: Geometry, shared_bytes: int | None) -> bool:
        """Whether a model's sides can be cut so, and what a program holds of them fits into a GPU's shared memory."""
        size = shape.width // shape.heads
        divides = 3 * shape.width % self.qkv.columns == shape.inner % self.up.columns == 0
        cuts = shape.width % self.down.columns == shape.inner % self.down.depth == 0
        block = 1 << (shape.width - 1).bit_length()
        held = [(block, self.qkv), (block, self.up), (self.down.depth, self.down)]
        most = max(2 * depth * (cut.rows + cut.columns) for depth, cut in held)
        is_small = shared_bytes is None or most <= shared_bytes
        return divides and cuts and is_small and size & (size - 1) == 0 and size >= 16 and shape.width <= 1024


# By the most tokens they are for; found by measuring on an H200, narrow with MiniLM-L6 and wide with RoBERTa-base.
_NARROW = {
    16: _Steps(_Cut(16, 64, 8), _Cut(16, 64, 4), _Cut(16, 16, 4), _Cut(16, 32, 4, 64)),
    32: _Steps(_Cut(16, 128, 4), _Cut(16, 128, 4), _Cut(16, 128, 8), _Cut(32, 32, 8, 128)),
    64: _Steps(_Cut(16, 128, 8), _Cut(64, 64, 4), _Cut(16, 128, 8), _Cut(64, 64, 8, 128)),
    128: _Steps(_Cut(16, 128, 4), _Cut(64, 64, 4), _Cut(16, 128, 8), _Cut(64, 128, 8, 256)),
}
_WIDE = {
    16: _Steps(_Cut(16, 64, 8), _Cut(16, 128, 4), _Cut(16, 64, 4), _Cut(16, 64, 4, 256)),
    32: _Steps(_Cut(16, 64, 8), _Cut(16, 128, 4), _Cut(16, 64, 4), _Cut(16, 32, 4, 512)),
    64: _Steps(_Cut(32, 64, 8), _Cut(16, 256, 4), _Cut(32, 64, 8), _Cut(64, 64, 8, 512)),
}


class Encoder:
    """Its weights, on the device they compute on; `is_dependent` where kernels may overlap (Hopper and newer).

    `shared_bytes` is what a program may hold there.
    """

    def __init__(
        self,
        geometry: Geometry,
        weights: Mapping[str, Any],
        *,
        is_dependent: bool = False,
        products: Products | None = None,
        shared_bytes: int | None = None,
    ) -> None:
        self.geometry = geometry
        self._weights = weights
        self.is_dependent = is_dependent
        self.products = products
        self._squeezes = {
            name.removesuffix(".factors"): Squeeze(factors, weights[f"{name.removesuffix('.factors')}.weight"].dtype)
            for name, factors in weights.items()
            if name.endswith(".factors")
        }
        self.roads = Roads(geometry.activation, weights["words"].dtype if weights else None, products)
        table = _NARROW if geometry.width < 512 else _WIDE
        is_able = "project.weight" not in weights
        fitting = {most: steps for most, steps in table.items() if is_able and steps.fits(geometry, shared_bytes)}
        self._steps = fitting
        # Up to how many tokens there are kernels for few, and up to how many they win.
        self.most_few = self.few_tokens = max(self._steps, default=0)

    def __call__(self, batch: Packed) -> Any:
        return self.few(batch) if batch.ids.shape[0] <= self.few_tokens else self.many(batch)

    def few(self, batch: Packed) -> Any:
        """The hidden states of few tokens: four kernels a layer, sums in fp32."""
        shape, weights, dependent = self.geometry, self._weights, self.is_dependent
        tokens, device, dtype = batch.ids.shape[0], batch.ids.device, weights["words"].dtype
        steps = next(steps for most, steps in self._steps.items() if tokens <= most)
        qkv_cut, attend_cut, up_cut, down_cut = steps.qkv, steps.attend, steps.up, steps.down
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
                weights[f"{layer}.out.bias"], qkv, between, None, *self._narrow(f"{layer}.qkv"),
                rows=qkv_cut.rows, columns=qkv_cut.columns, warps=qkv_cut.warps, is_dependent=dependent,
            )  # fmt: skip
            attend(
                qkv, batch.sequence, weights[f"{layer}.out.weight"], between, shape.heads, weights.get("distances"),
                *self._narrow(f"{layer}.out"),
                rows=attend_cut.rows, columns=attend_cut.columns, warps=attend_cut.warps, is_dependent=dependent,
            )  # fmt: skip
            expand(
                between, weights[f"{layer}.middle.scale"], weights[f"{layer}.middle.shift"], shape.eps,
                weights[f"{layer}.up.weight"], weights[f"{layer}.up.bias"], weights[f"{layer}.down.bias"], inner, total,
                shape.activation, *self._narrow(f"{layer}.up"),
                rows=up_cut.rows, columns=up_cut.columns, warps=up_cut.warps, is_dependent=dependent,
            )  # fmt: skip
            contract(
                inner, weights[f"{layer}.down.weight"], total, *self._narrow(f"{layer}.down"),
                rows=down_cut.rows, columns=down_cut.columns, depth=down_cut.depth, warps=down_cut.warps,
                is_dependent=dependent,
            )  # fmt: skip
            norm = f"{layer}.end"
        scale, shift = weights[f"{norm}.scale"], weights[f"{norm}.shift"]
        return layer_norm(total, scale, shift, shape.eps, is_dependent=dependent)

    def many(self, batch: Packed, rows: Any | None = None) -> Any:
        """The hidden states of any number of tokens: the products by cuBLAS, and our kernels between them.

        With `rows` those of the tokens it names alone, which spares most of the last layer.
        """
        shape, distances = self.geometry, self._weights.get("distances")
        cut = cut_for(batch.ids.shape[0], batch.starts.shape[0] - 1)
        # What is added to, and what is multiplied.
        x, taken = self._started(batch)
        for place in range(shape.layers):
            layer = self._layer(place)
            is_last = place == shape.layers - 1
            qkv = self._product(taken, f"{layer}.qkv", has_bias=True)
            if rows is None or not is_last:
                how = self._squeezes.get(f"{layer}.out")
                mixed = attention(qkv, batch.tiles, shape.heads, distances, how, cut=cut)
            else:
                # A sequence that there is room for, and none in, begins behind the last token.
                rows = rows.clamp(max=x.shape[0] - 1)
                mixed, x = self._mixed(qkv, batch, rows, f"{layer}.out"), x[rows]
            mixed = self._product(mixed, f"{layer}.out")
            x, taken = self._normed(mixed, x, f"{layer}.out", f"{layer}.middle", f"{layer}.up")
            inner = self._product(self._expanded(taken, f"{layer}.up", f"{layer}.down"), f"{layer}.down")
            following = "" if is_last else f"{self._layer(place + 1)}.qkv"
            x, taken = self._normed(inner, x, f"{layer}.down", f"{layer}.end", following)
        return x

    def _started(self, batch: Packed) -> tuple[Any, Any]:
        shape, weights, first = self.geometry, self._weights, self._squeezes.get("0.qkv")
        norm = (weights["norm.scale"], weights["norm.shift"], shape.eps)
        if "project.weight" not in weights:
            return self._embed(batch, norm, None, first)
        x, _ = self._embed(batch, norm, None)
        x = torch.addmm(weights["project.bias"], x, weights["project.weight"].T)
        return x, x if first is None else squeeze(x, first)

    def _mixed(self, qkv: Any, batch: Packed, rows: Any, following: str) -> Any:
        """Attention of these rows: they look at all tokens of their sequences, and nobody looks at the others."""
        own = batch.sequence[rows]
        asking = torch.stack([rows, batch.starts[own], batch.starts[own + 1]], dim=1)
        how, heads, distances = self._squeezes.get(following), self.geometry.heads, self._weights.get("distances")
        mixed = attention(qkv, asking, heads, distances, how, cut=LONE)
        # Rows of fp8 are picked as the bytes they are.
        return mixed[rows] if how is None else mixed.view(torch.uint8)[rows].view(how.dtype)

    def shapes(self, tokens: int) -> list[Product]:
        """The products of all layers, each once, as `many` asks for them."""
        width, inner, is_tanh = self.geometry.width, self.geometry.inner, self.geometry.activation == TANH
        sides = {"qkv": (3 * width, width), "out": (width, width), "up": (inner, width), "down": (width, inner)}
        found = {}
        for layer in range(1 if self.geometry.is_shared else self.geometry.layers):
            for name, (columns, depth) in sides.items():
                takes, gives = (self._dtype_of(f"{layer}.{one}") for one in (name, "down"))
                is_up = name == "up"
                # In half precision GELU rides along where it can, and not where what comes of it is squeezed.
                has_gelu = is_up and (bool(takes) or (is_tanh and not gives))
                gives = gives if takes and is_up else ""
                found[Product(tokens, columns, depth, name in ("qkv", "up"), has_gelu, takes, gives)] = name
        return list(found)

    def _dtype_of(self, name: str) -> str:
        how = self._squeezes.get(name)
        return "" if how is None else str(how.dtype).removeprefix("torch.")

    def _product(self, x: Any, name: str, *, has_bias: bool = False, has_gelu: bool = False) -> Any:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"] if has_bias else None
        if name in self._squeezes:
            return self.roads(x, weight, self._weights[f"{name}.step"], bias)
        if self.products is not None:
            return self.products(x, weight, bias, has_gelu=has_gelu)
        return torch.mm(x, weight.T) if bias is None else torch.addmm(bias, x, weight.T)

    def _expanded(self, x: Any, name: str, following: str) -> Any:
        """cuBLAS has GELU by tanh, and no other; what it gives in half precision nobody squeezes."""
        kind, how = self.geometry.activation, self._squeezes.get(following)
        if name in self._squeezes:
            weight, step, bias = (self._weights[f"{name}.{part}"] for part in ("weight", "step", "bias"))
            return self.roads(x, weight, step, bias, has_gelu=True, squeeze=how)
        if self.products is not None and kind == TANH and how is None:
            return self._product(x, name, has_bias=True, has_gelu=True)
        return gelu_(self._product(x, name, has_bias=True), kind, how)

    def _narrow(self, name: str) -> tuple[Any, Squeeze | None]:
        """What goes with a weight of eight bits."""
        return self._weights.get(f"{name}.step"), self._squeezes.get(name)

    def _embed(
        self, batch: Packed, norm: tuple[Any, Any, float] | None, out: Any | None, how: Squeeze | None = None
    ) -> tuple[Any, Any]:
        words, places, kinds = (self._weights.get(name) for name in ("words", "places", "kinds"))
        # Between cuBLAS's kernels overlapping costs more than it gains.
        overlaps = self.is_dependent and norm is None
        return embed(batch.ids, batch.places, batch.kinds, words, places, kinds, norm, out, how, is_dependent=overlaps)

    def _normed(self, product: Any, residual: Any, bias: str, norm: str, following: str) -> tuple[Any, Any]:
        weights, how = self._weights, self._squeezes.get(following)
        scale, shift = weights[f"{norm}.scale"], weights[f"{norm}.shift"]
        return layer_norms(product, scale, shift, self.geometry.eps, weights[f"{bias}.bias"], residual, how)

    def _layer(self, place: int) -> int:
        return 0 if self.geometry.is_shared else place
