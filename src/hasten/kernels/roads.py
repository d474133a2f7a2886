"""Products of numbers of eight bits: by cuBLASLt, by PyTorch or by our own kernel, whichever was found to be fastest.

A road has a name, for what was measured to be kept: `library` and an algorithm in hexadecimal digits, `torch`, or `own`
and a cut. What stands behind a product (GELU, eight bits again) belongs to the road, since some take it along.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hasten.core.errors import StageError
from hasten.kernels.activation import TANH, gelu_
from hasten.kernels.multiply import CUTS, USUAL, Cut, multiply
from hasten.kernels.products import ALGORITHM_BYTES, Product, Products
from hasten.kernels.squeeze import FP8, INT8, Squeeze

LIBRARY, TORCH, OWN = "library", "torch", "own"
NAME = re.compile(rf"{LIBRARY}( [0-9a-f]{{{2 * ALGORITHM_BYTES}}})?|{TORCH}|{OWN}( \d+(x\d+){{4}})?")


class Roads:
    """Of one model: `kind` is its GELU. Without `products`, which a GPU has, its own kernel is the only one."""

    def __init__(self, kind: str, dtype: Any, products: Products | None = None) -> None:
        self._kind, self._dtype, self._products = kind, dtype, products
        self._sums_fast = products is not None and products.sums_fast
        self._chosen: dict[Product, str] = {}
        self._one: Any = None

    def __call__(
        self,
        x: Any,
        weight: Any,
        step: Any,
        bias: Any | None = None,
        *,
        has_gelu: bool = False,
        squeeze: Squeeze | None = None,
    ) -> Any:
        """x · weightᵀ · step + bias, and GELU of it; squeezed, or in half precision."""
        gives = _name(squeeze.dtype) if squeeze is not None else ""
        what = Product(x.shape[0], weight.shape[0], x.shape[1], bias is not None, has_gelu, _name(x.dtype), gives)
        road = self._chosen.get(what) or self._usual(x, step)
        try:
            return self.go(road, what, x, weight, step, bias, squeeze)
        except StageError:
            if not road.startswith(LIBRARY):
                raise
            # It has nothing for this shape, and is not asked again.
            self._chosen[what] = _instead(what)
            return self.go(self._chosen[what], what, x, weight, step, bias, squeeze)

    def choose(self, roads: Mapping[Product, str]) -> None:
        """Of products that were timed."""
        self._chosen = dict(roads)

    def known(self, what: Product) -> list[str]:
        """All roads for a product."""
        own = [f"{OWN} {cut}" for cut in CUTS]
        if what.takes != _name(FP8) or self._products is None:
            return own
        try:
            found = [f"{LIBRARY} {algorithm.hex()}" for algorithm in self._products.proposals(self._asked(what))]
        except StageError:
            found = []
        if not found and _instead(what) == TORCH:
            found = [TORCH]
        return [*found, *own]

    def fastest(self, what: Product, seconds: Callable[[Callable[[], Any]], float]) -> str:
        """The road that takes the fewest `seconds`, on values like those of a model."""
        given = self.drawn(what, "cuda")
        return min(self.known(what), key=lambda road: seconds(partial(self.go, road, what, *given)))

    def drawn(self, what: Product, device: str) -> tuple[Any, Any, Any, Any | None, Squeeze | None]:
        """What such a product takes: x, weight, step, bias and how it is squeezed."""
        dtype = getattr(torch, what.takes)
        x, weight = (_drawn(rows, what.depth, dtype, device) for rows in (what.rows, what.columns))
        step = torch.full((what.columns if dtype == INT8 else 1,), 1e-3, device=device)
        bias = torch.randn(what.columns, device=device).to(self._dtype) if what.has_bias else None
        factor = torch.full((1,), 16.0, device=device)
        return x, weight, step, bias, Squeeze(factor, getattr(torch, what.gives)) if what.gives else None

    def _usual(self, x: Any, step: Any) -> str:
        return LIBRARY if self._products is not None and x.dtype == FP8 and step.numel() == 1 else OWN

    def go(
        self, road: str, what: Product, x: Any, weight: Any, step: Any, bias: Any | None, squeeze: Squeeze | None
    ) -> Any:
        """One product by the road that is named."""
        name, _, detail = road.partition(" ")
        kind = self._kind if what.has_gelu else None
        if name == OWN:
            cut = Cut.parse(detail) if detail else USUAL
            return multiply(
                x, weight, step, bias,
                dtype=self._dtype, kind=kind, squeeze=squeeze, cut=cut, sums_fast=self._sums_fast,
            )  # fmt: skip
        if name == TORCH:
            if self._one is None:
                self._one = torch.ones_like(step)
            y = torch._scaled_mm(
                x, weight.T, scale_a=self._one, scale_b=step, bias=bias, out_dtype=self._dtype,
                use_fast_accum=self._sums_fast,
            )  # fmt: skip
            return y if kind is None else gelu_(y, kind, squeeze)
        assert self._products is not None
        asked = self._asked(what)
        factor = squeeze.factors if squeeze is not None and asked.gives else None
        y = self._products.squeezed(asked, x, weight, step, bias, factor, bytes.fromhex(detail))
        return y if kind is None or asked.has_gelu else gelu_(y, kind, squeeze)

    def _asked(self, what: Product) -> Product:
        """What the library is asked for: GELU by tanh it takes along, the other one is ours."""
        return what if self._kind == TANH or not what.has_gelu else replace(what, has_gelu=False, gives="")


def _instead(what: Product) -> str:
    """Where the library has nothing. PyTorch asks it once more in its own way, for sides that 16 divides alone."""
    return OWN if what.columns % 16 or what.depth % 16 else TORCH


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _drawn(rows: int, depth: int, dtype: Any, device: str) -> Any:
    return (torch.randn(rows, depth, device=device) * 16).clamp(-127, 127).to(dtype)
